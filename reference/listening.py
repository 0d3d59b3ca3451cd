"""Being told by autograd of every gradient that it has accumulated."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Any, Any], None]
"""What an autograd node calls after its work: `hook(outputs, gradients)`."""


class Listener(Protocol):
    """Who wants to be told."""

    def arrived(self, index: int, gradient: Tensor | None) -> None:
        """A parameter's gradient has been accumulated; None: an undefined one passed, and nothing was added."""


def accumulators(parameters: Sequence[Parameter]) -> list[Node]:
    """The autograd node that accumulates each parameter's gradient. It only lives while someone holds it."""
    return [get_gradient_edge(parameter).node for parameter in parameters]


def listen(nodes: Sequence[Node], listener: Listener, *, threads: bool) -> weakref.finalize:  # type: ignore[type-arg]  # not generic
    """Call `listener.arrived` after each of `nodes` has accumulated a gradient, hooks of the user's included.

    Args:
        nodes: The accumulating nodes, by parameter index; whoever listens must hold them.
        listener: Held weakly: hooks do not keep it alive.
        threads: Whether gradients come from several threads, as for a module on several devices; then the
            listener is told of one at a time.

    Returns:
        A function that ends it; also called when the listener is garbage.
    """
    hooks = [_hook(weakref.ref(listener), index) for index in range(len(nodes))]
    if threads:
        lock = threading.RLock()
        hooks = [_locked(hook, lock) for hook in hooks]
    handles = [node.register_hook(hook) for node, hook in zip(nodes, hooks, strict=True)]
    return weakref.finalize(listener, _remove, handles)


def _hook(listener: "weakref.ref[Listener]", index: int) -> Hook:
    def gradient_arrived(_outputs: Any, gradients: Any) -> None:
        if (alive := listener()) is not None:
            alive.arrived(index, gradients[0])

    return gradient_arrived


def _locked(hook: Hook, lock: Any) -> Hook:
    def gradient_arrived(outputs: Any, gradients: Any) -> None:
        with lock:
            hook(outputs, gradients)

    return gradient_arrived


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
