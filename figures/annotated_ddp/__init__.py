"""The Annotated DDP: one page with five ways to average gradients, each with its code beside a live timeline.

`page.py` joins the JavaScript and data of this folder into `figures/annotated_ddp.html`, which needs no network. The
predictions are computed in the browser: `replay.js` repeats the closed form, `bucketing.js` the rule of the buckets,
`models.js` and `profiler_import.js` read dropped traces and profiles, which `forecast.js` answers. Tests compare each
with its Python original.
"""
