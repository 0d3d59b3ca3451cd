"""Autograd hooks: record each accumulated gradient in an inbox, and call the reducer when it has something to do.

Between two layers of the backward pass, the layers' own code and data have displaced the interpreter from the CPU
caches, so a Python call there costs many times as much as in a loop. The hook of a gradient therefore only appends a
number to a list, unless the inbox then holds as many gradients as the limit that the reducer has set.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .buckets import Bucket

AutogradHook = Callable[[Any, Any], None]
"""Called by an autograd node after its work: `hook(outputs, gradients)`."""

MOST_BUCKETS_TO_COUNT = 8
"""If more buckets than this are left, counting the gradients that each lacks costs more than the calls it saves."""
NEVER = 2**62
"""An inbox limit that is never reached."""


class Inbox:
    """Parameter indices whose gradients have arrived since the reducer last looked.

    Attributes:
        indices: Parameter indices, in the order in which their gradients arrived.
        limit: Number of gradients at which the hooks call the reducer.
    """

    __slots__ = ("indices", "limit")

    def __init__(self) -> None:
        self.indices: list[int] = []  # never replaced by another list, because the hooks hold this one
        self.limit = 1

    def take(self) -> list[int]:
        """Remove and return all indices."""
        taken = self.indices.copy()
        self.indices.clear()
        return taken

    def reset(self) -> None:
        """Forget all gradients, and have the hooks call the reducer for the next one."""
        self.indices.clear()
        self.limit = 1


def gradients_until_pack(buckets: Sequence[Bucket], next_bucket: int) -> int:
    """How many gradients can arrive before a bucket may have to be packed; at least 1.

    Args:
        buckets: All buckets, in launch order.
        next_bucket: Index of the first bucket that has not been launched.
    """
    if len(buckets) - next_bucket > MOST_BUCKETS_TO_COUNT:
        return 1
    return min((bucket.puts_until_pack for bucket in buckets if not bucket.ready), default=1)


class GradientListener(Protocol):
    """An object to which the hooks of `attach_hooks` report gradients."""

    inbox: Inbox

    def gradients_arrived(self, gradient: Tensor | None) -> None:
        """Called when the inbox holds `inbox.limit` gradients; `gradient`: the last one. None: it is undefined."""


def accumulators(parameters: Sequence[nn.Parameter]) -> list[Node]:
    """The autograd node that accumulates each parameter's gradient; the caller must keep the nodes alive.

    Raises:
        TypeError: A parameter is not a leaf of autograd's graph, so nothing accumulates its gradient.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a subclass of Tensor may put nodes of its own in between
        nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    for index, (parameter, node) in enumerate(zip(parameters, nodes, strict=True)):
        if node.name() != "torch::autograd::AccumulateGrad":
            raise TypeError(
                f"expected autograd to accumulate the gradient of parameter {index} ({type(parameter).__name__}, "
                f"shape {tuple(parameter.shape)}), got the node {node.name()}. Wrap a module whose parameters are "
                "leaves of autograd's graph"
            )
    return nodes


def attach_hooks(nodes: Sequence[Node], listener: GradientListener, *, locked: bool) -> weakref.finalize:  # type: ignore[type-arg]  # not generic
    """Have each node put its index into the listener's inbox whenever it has accumulated a gradient.

    Hooks on the nodes run after the user's hooks on the parameters, and also for undefined gradients.

    Args:
        nodes: The accumulating nodes, by parameter index; the listener must hold them.
        listener: Held weakly: hooks do not keep it alive.
        locked: Whether gradients arrive in several threads, as for a module on several devices. If so, a lock lets
            only one hook run at a time.

    Returns:
        A function that removes the hooks; also called when the listener is garbage-collected.
    """
    hooks = [_gradient_hook(weakref.ref(listener), listener.inbox, index) for index in range(len(nodes))]
    if locked:
        lock = threading.RLock()
        hooks = [_with_lock(hook, lock) for hook in hooks]
    handles = [node.register_hook(hook) for node, hook in zip(nodes, hooks, strict=True)]
    return weakref.finalize(listener, _remove, handles)


def _gradient_hook(listener: "weakref.ref[GradientListener]", inbox: Inbox, index: int) -> AutogradHook:
    indices = inbox.indices

    def gradient_accumulated(_outputs: Any, gradients: Any) -> None:
        indices.append(index)
        if len(indices) >= inbox.limit and (alive := listener()) is not None:
            alive.gradients_arrived(gradients[0])

    return gradient_accumulated


def _with_lock(hook: AutogradHook, lock: Any) -> AutogradHook:
    def gradient_accumulated(outputs: Any, gradients: Any) -> None:
        with lock:
            hook(outputs, gradients)

    return gradient_accumulated


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
