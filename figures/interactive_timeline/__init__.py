"""Interactive timeline: one iteration whose bucket boundaries can be dragged, in Jupyter.

`widget.InteractiveTimeline` shows any trace in a notebook; the kernel computes every answer with `simulator.predict`.
The Annotated DDP, a page in `figures` that needs no kernel, shows the same timeline.
"""
