"""What the reducer has of autograd: hooks that report a backward pass's start, gradients and end, and its graph.

[Note: the inbox] Between two layers of the backward pass, the layers' own code and data have displaced the
interpreter from the CPU caches, so a Python call there costs many times as much as in a loop. The hook of a gradient
therefore only appends a number to a list, the inbox, and calls the reducer when it has something to do: when the
inbox holds as many gradients, or more bytes of them, than the limits that the reducer has set.
"""

import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves
from torch.utils.hooks import RemovableHandle

from .buckets import Bucket

if TYPE_CHECKING:
    from .reducer import Reducer

AutogradHook = Callable[[Any, Any], None]  # called by an autograd node after its work: `hook(outputs, gradients)`
MOST_BUCKETS_TO_COUNT = 8
"""If more buckets than this are left, counting the gradients that each lacks costs more than the calls it saves."""
F = TypeVar("F", bound=Callable[..., Any])
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func`, such as `grad` or `vmap`, runs."""


def not_traced(function: F) -> F:
    """Have `torch.compile` run a function, and what it calls, instead of tracing it.

    A step that is compiled as a whole runs autograd's hooks too. Unlike `torch.compiler.disable`, this costs nothing
    when the function is called.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


# The nodes that accumulate gradients


def accumulators(parameters: Sequence[nn.Parameter]) -> list[Node]:
    """The autograd node that accumulates each parameter's gradient; the caller must keep the nodes alive."""
    with torch._C.DisableTorchFunctionSubclass():  # a subclass of Tensor may put nodes of its own in between
        return [get_gradient_edge(parameter).node for parameter in parameters]


def outside_of_transforms(tensor: Tensor) -> Tensor:
    """The tensor that a transform of `torch.func` has wrapped, whose graph leads to the module's parameters."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


# Where gradients arrive


class Inbox:
    """Parameter indices whose gradients have arrived since the reducer last looked."""

    __slots__ = ("indices", "limit", "room_bytes", "undefined")

    def __init__(self) -> None:
        #: In the order of arrival; never replaced by another list, because the hooks hold this one.
        self.indices: list[int] = []
        #: Those whose gradients were undefined, so that nothing was accumulated, in this backward pass.
        self.undefined: set[int] = set()
        self.limit = 1  #: number of gradients at which the hooks call the reducer
        self.room_bytes = 1  #: how many more bytes of gradients can arrive without a call

    def take(self) -> list[int]:
        """Remove and return all indices."""
        taken = self.indices.copy()
        self.indices.clear()
        return taken

    def reset(self) -> None:
        """Forget all gradients, and have the hooks call the reducer for the next one."""
        self.indices.clear()
        self.undefined.clear()
        self.limit = 1


def arrivals_until_pack(buckets: Sequence[Bucket], next_bucket: int) -> tuple[int, int]:
    """With how many gradients a bucket from `next_bucket` on may have to be packed, and beyond how many bytes."""
    filling = [bucket for bucket in buckets[next_bucket:] if bucket.pending]
    if not 0 < len(filling) <= MOST_BUCKETS_TO_COUNT:
        return 1, 0
    return min(bucket.pending for bucket in filling), min(bucket.room_bytes for bucket in filling)


def attach_hooks(nodes: Sequence[Node], reducer: "Reducer", *, locked: bool) -> weakref.finalize:  # type: ignore[type-arg]  # not generic
    """Have each node put its index into the reducer's inbox whenever it has accumulated a gradient.

    Hooks on the nodes run after the user's hooks on the parameters, and also for undefined gradients. The reducer
    must hold the nodes; the hooks hold the reducer weakly. With `locked`, only one hook runs at a time, because a
    module on several devices has several. The returned function removes the hooks, also at the reducer's end.
    """
    sizes_bytes = [parameter.nbytes for parameter in reducer.parameters]
    hooks = [_gradient_hook(weakref.ref(reducer), reducer.inbox, *one) for one in enumerate(sizes_bytes)]
    if locked:
        lock = threading.RLock()
        hooks = [_with_lock(hook, lock) for hook in hooks]
    handles = [node.register_hook(hook) for node, hook in zip(nodes, hooks, strict=True)]
    return weakref.finalize(reducer, lambda: deque(map(RemovableHandle.remove, handles), maxlen=0))


def _gradient_hook(reducer: "weakref.ref[Reducer]", inbox: Inbox, index: int, size_bytes: int) -> AutogradHook:
    indices = inbox.indices

    @not_traced
    def gradient_accumulated(_outputs: Any, gradients: Any) -> None:
        indices.append(index)
        inbox.room_bytes -= size_bytes
        if gradients[0] is None:
            inbox.undefined.add(index)
        if (len(indices) >= inbox.limit or inbox.room_bytes < 0) and (alive := reducer()) is not None:
            alive.gradients_arrived()

    return gradient_accumulated


def _with_lock(hook: AutogradHook, lock: Any) -> AutogradHook:
    @not_traced
    def gradient_accumulated(outputs: Any, gradients: Any) -> None:
        with lock:
            hook(outputs, gradients)

    return gradient_accumulated


# Where a backward pass starts


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor in lists, tuples, named tuples, dicts, dataclasses and registered pytree nodes, to any depth."""
    pending, entered = [output], dict[int, Any]()  # parts by `id`: one may contain itself, as a tree's nodes do
    while pending:
        part = pending.pop()
        if isinstance(part, Tensor):
            yield part
        elif id(part) not in entered:
            entered[id(part)] = part
            pending += reversed(parts_of(part))


def parts_of(output: Any) -> list[Any]:
    """What a structure consists of; nothing, if `output` is no structure in which tensors are found."""
    try:
        if isinstance(output, list | tuple):
            return list(output)
        if isinstance(output, dict):
            return list(output.values())
        if dataclasses.is_dataclass(output) and not isinstance(output, type):
            return [getattr(output, one.name) for one in dataclasses.fields(output) if hasattr(output, one.name)]
        return tree_leaves(output) if type(output) in SUPPORTED_NODES else []
    except Exception:  # noqa: BLE001 - the class's own code may raise anything, and torch's class seldom runs it
        kinds: list[Any] = [list, tuple]
        return next((list(kind.__iter__(output)) for kind in kinds if isinstance(output, kind)), [])


@dataclasses.dataclass(frozen=True)
class _Calls:
    action: Callable[[], None]
    __torch_unserializable__ = True  # a saved tensor comes without it, without a warning

    @not_traced
    def __call__(self, _gradient: Tensor) -> None:
        self.action()


def call_at_backward(outputs: Iterable[Tensor], action: Callable[[], None]) -> list[RemovableHandle]:
    """Call `action` whenever a backward pass reaches one of `outputs`, before gradients behind it are accumulated.

    A tensor that calls an equal action already, because the module returns one tensor again and again, gets no second
    hook. Returns handles of the new hooks.
    """
    hook = _Calls(action)
    return [
        output.register_hook(hook)
        for output in outputs
        # A hook on a leaf would outlive this iteration.
        if output.grad_fn is not None and hook not in (output._backward_hooks or {}).values()
    ]


# Where a backward pass ends


class PassEnd:
    """Calls `ended(task)` when autograd's backward pass `task` ends, `raised(task)` when an exception ends the pass.

    Autograd then drops this object, and its destructor is the only sign of the exception, so nothing else may hold
    it. (On a GPU, autograd's own thread may drop it a little after the exception has reached the script.)
    """

    def __init__(self, task: int, ended: Callable[[int], None], raised: Callable[[int], None]) -> None:
        self._task, self._ended, self._raised = task, ended, raised
        self._was_called = False

    @not_traced
    def __call__(self) -> None:
        """Called by autograd when the backward pass ends without an exception."""
        self._was_called = True
        self._ended(self._task)

    @not_traced
    def __del__(self) -> None:
        if not self._was_called:
            self._raised(self._task)
