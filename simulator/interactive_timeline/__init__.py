"""Interactive timeline: one iteration whose bucket boundaries can be dragged, in Jupyter and as a page of its own.

`InteractiveTimeline` shows any trace in a notebook; the kernel computes every answer with `simulator.predict`.
`page.interactive_page` makes an HTML page that needs no kernel and no network.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .widget import InteractiveTimeline

__all__ = ["InteractiveTimeline"]


def __getattr__(name: str) -> Any:
    """Load `InteractiveTimeline`, which needs anywidget, when it is first used."""
    if name == "InteractiveTimeline":
        from .widget import InteractiveTimeline

        return InteractiveTimeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
