"""Interactive timeline: one iteration whose bucket boundaries can be dragged, in Jupyter and as a page of its own.

`widget.InteractiveTimeline` shows any trace in a notebook; the kernel computes every answer with `simulator.predict`.
`page.interactive_page` makes an HTML page that needs no kernel and no network.
"""
