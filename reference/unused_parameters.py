"""Unused parameters: track which parameters get a gradient, and search the autograd graph for those that get none.

The reducer calls one of three trackers, which have the same methods:

- `AllParametersUsed` (default): every parameter gets one gradient in each backward pass;
- `UnusedFoundInGraph` (`find_unused_parameters`): searches the graph behind forward's outputs in every iteration;
- `StaticGraph` (`static_graph`): counts each parameter's gradients in the first iteration and expects as many later.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from .buckets import Features

Change = Callable[[Tensor], Tensor]


def make_tracker(
    features: Features, parameters: Sequence[nn.Parameter], accumulators: Sequence[Node], group: dist.ProcessGroup
) -> "AllParametersUsed":
    """The tracker that the features require; a static graph needs no search."""
    if features.static_graph:
        return StaticGraph(accumulators, UsedParameterMap(parameters, group))
    if features.find_unused_parameters:
        return UnusedFoundInGraph(accumulators, UsedParameterMap(parameters, group))
    return AllParametersUsed()


class AllParametersUsed:
    """Every parameter gets exactly one gradient in each backward pass."""

    counts_gradients = False
    """Whether `gradient_arrived` must be called."""

    needs_sink = False
    """Whether forward's outputs must pass through the sink; see `through_sink`."""

    launches_during_backward = True
    """False: all buckets are launched at the end of the backward pass."""

    iterations_without_ready_order = 0
    """Number of iterations at the start that yield no ready order."""

    unused: frozenset[int] = frozenset()
    """Parameter indices that get no gradient in the coming backward pass."""

    is_static = True
    """Whether the same parameters were unused in all iterations so far."""

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """Called after a synchronised forward pass with the tensors that it returned."""

    def gradient_arrived(self, index: int, gradient: Tensor | None, expected: bool) -> int:  # noqa: FBT001 - in every hook
        """Called after a gradient was accumulated.

        Args:
            index: Parameter index.
            gradient: The gradient that was added. None: an undefined gradient, nothing was added.
            expected: Whether the gradient will be averaged.

        Returns:
            Gradients still expected for this parameter; negative if too many arrived.
        """
        return 0

    def all_arrived(self) -> bool:
        """Whether a first iteration that launches all buckets at its end has all the gradients that it waits for."""
        return True

    def launched_all(self) -> None:
        """Called after the last bucket was launched; a tracker exchanges here which parameters each rank used."""

    def untouched(self) -> frozenset[int]:
        """Parameter indices that no rank used, so their gradients must stay as they are."""
        return frozenset()

    def finished(self) -> None:
        """Called at the end of a synchronised backward pass."""

    def abandoned(self) -> None:
        """Called after an exception ended a backward pass before the first launch: the next pass starts again."""


class UsedParameterMap:
    """How many ranks used each of `parameters`, summed over `group` (torch: `local_used_map`)."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        device = parameters[0].device if parameters else None  # none: the all-reduce of each one is delayed
        self.tensor = torch.zeros(len(parameters), dtype=torch.int32, device=device)
        """Number of ranks that used each parameter, int32, as of the last exchange."""
        self._group = group
        self._used: set[int] = set()
        self._work: dist.Work | None = None

    def add(self, index: int) -> None:
        """Note that this rank used a parameter."""
        self._used.add(index)

    def exchange(self) -> None:
        """Start the all-reduce of the map; every rank must call this at the same place among its collectives.

        A gradient that was accumulated under `no_sync` and then set to None does not count as a use.
        """
        self.wait()  # an exchange that an exception has left still uses the tensor
        self._used = {index for index in self._used if self._parameters[index].grad is not None}
        used = torch.zeros(len(self.tensor), dtype=torch.int32, pin_memory=self.tensor.is_cuda)
        used[sorted(self._used)] = 1
        self.tensor.copy_(used, non_blocking=True)  # on CUDA from pinned memory, as in torch: the host does not wait
        self._work = dist.all_reduce(self.tensor, group=self._group, async_op=True)

    def unused(self) -> frozenset[int]:
        """Parameters that no rank used. As in torch, the host waits for the exchange unless this rank used all."""
        if len(self._used) == len(self.tensor):
            return frozenset()
        self.wait()
        return frozenset(index for index, count in enumerate(self.tensor.tolist()) if not count)

    def wait(self) -> None:
        """Wait for the exchange."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def clear(self) -> None:
        """Reset to no used parameters."""
        self._used.clear()


class UnusedFoundInGraph(AllParametersUsed):
    """Searches the graph behind forward's outputs for parameters that the graph leaves out.

    Args:
        accumulators: The autograd node that accumulates each parameter's gradient, by parameter index.
        used: A map of the same parameters.
    """

    counts_gradients = True
    needs_sink = True

    def __init__(self, accumulators: Sequence[Node], used: UsedParameterMap) -> None:
        self._indices = {node: index for index, node in enumerate(accumulators)}
        self.used = used
        self._searched = False

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """Search the graph behind the outputs for unused parameters."""
        unused = frozenset(range(len(self._indices))) - reachable(outputs, self._indices)
        self.is_static = self.is_static and (not self._searched or unused == self.unused)
        self.unused, self._searched = unused, True

    def gradient_arrived(self, index: int, gradient: Tensor | None, expected: bool) -> int:  # noqa: FBT001
        """Note the use, also under `no_sync`: the next synchronised backward pass averages that gradient."""
        if gradient is not None:
            self.used.add(index)
        return 0

    def launched_all(self) -> None:
        """Exchange which parameters each rank used."""
        self.used.exchange()

    def untouched(self) -> frozenset[int]:
        """Parameters that no rank used since the last synchronised backward pass."""
        return self.used.unused()

    def finished(self) -> None:
        """Forget which parameters were used in this iteration."""
        self.used.wait()
        self.used.clear()


class StaticGraph(AllParametersUsed):
    """Counts each parameter's gradients in the first iteration and expects as many in all others.

    A parameter that several activation checkpoints share is therefore ready when its last gradient has arrived. The
    first iteration launches all buckets at its end. Its graph alone is searched, for the parameters to wait for.

    Args:
        accumulators: The autograd node that accumulates each parameter's gradient, by parameter index.
        used: A map of the same parameters.
    """

    counts_gradients = True
    needs_sink = True
    launches_during_backward = False
    iterations_without_ready_order = 1

    def __init__(self, accumulators: Sequence[Node], used: UsedParameterMap) -> None:
        self._indices = {node: index for index, node in enumerate(accumulators)}
        self.used = used
        self._awaited: frozenset[int] = frozenset()  # parameters whose gradients the first iteration waits for
        self._expected: Counter[int] = Counter()  # gradients per parameter in the first iteration
        self._remaining: Counter[int] = Counter()
        self._exchanged = False
        self._untouched: frozenset[int] | None = None

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """Expect as many gradients of each parameter as in the first iteration; search the first one's graph."""
        self._remaining = Counter(self._expected)
        if not self.launches_during_backward:
            self._expected.clear()
            through_the_sink = [output for output in outputs if output.grad_fn is not None]
            all_indices = frozenset(self._indices.values())  # outputs that are in an iterator, say, are not found
            self._awaited = reachable(through_the_sink, self._indices) if through_the_sink else all_indices

    def gradient_arrived(self, index: int, gradient: Tensor | None, expected: bool) -> int:  # noqa: FBT001
        """Count up in the first iteration, count down in the others."""
        if not self.launches_during_backward:
            if gradient is not None:
                self.used.add(index)
            if expected:
                self._expected[index] += 1
            return 1  # all buckets are launched at the end
        if expected:
            self._remaining[index] -= 1
        if gradient is not None and self._untouched is not None and index in self._untouched:
            return -1  # the first iteration brought an undefined gradient, as for an output that the loss ignores
        return self._remaining[index]

    def all_arrived(self) -> bool:
        """Whether the first iteration's gradients have arrived, in one backward pass or several.

        `autograd.grad` and a pass through a module whose parameters are all frozen reach the outputs but bring none.
        """
        trainable = any(node.variable.requires_grad for node in self._indices)  # type: ignore[attr-defined]  # of C++
        return trainable and self._awaited <= self._expected.keys()

    def launched_all(self) -> None:
        """Exchange which parameters each rank used, in the first iteration only."""
        if not self._exchanged:
            self._exchanged = True
            self.used.exchange()

    def untouched(self) -> frozenset[int]:
        """Parameters that no rank used in the first iteration, and therefore uses in no iteration."""
        if self._untouched is None:
            self._untouched = self.used.unused()
        return self._untouched

    def finished(self) -> None:
        """After this rank's first iteration: fix the set of unused parameters; the sink is no longer needed."""
        self.used.wait()
        if self._expected and not self.launches_during_backward:
            self.unused = frozenset(range(len(self.used.tensor))) - frozenset(self._expected)
            self.launches_during_backward, self.needs_sink = True, False

    def abandoned(self) -> None:
        """Count from the start again."""
        if self.launches_during_backward:
            self._remaining = Counter(self._expected)
        else:
            self._expected.clear()


# The graph behind forward's outputs


def reachable(outputs: Iterable[Tensor], indices: dict[Node, int]) -> frozenset[int]:
    """Parameter indices whose gradients a backward pass from `outputs` can reach.

    Args:
        outputs: Tensors that forward returned.
        indices: Parameter index of each node that accumulates a gradient.
    """
    found = set()
    seen: set[Node] = set()
    pending = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    with torch.autograd.profiler.record_function("search_unused_parameters"):  # torch's name
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in indices:
                found.add(indices[node])
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return frozenset(found)


@dataclasses.dataclass(frozen=True)
class _Calls:
    """A hook of a tensor that calls `action`."""

    action: Callable[[], None]

    def __call__(self, _gradient: Tensor) -> None:
        self.action()


def call_at_backward(outputs: Iterable[Tensor], action: Callable[[], None]) -> list[RemovableHandle]:
    """Call `action` whenever a backward pass reaches one of `outputs`, before gradients behind it are accumulated.

    A tensor that calls an equal action already, because the module returns one tensor again and again, gets no second
    hook.

    Returns:
        Handles of the new hooks.
    """
    hook = _Calls(action)
    return [
        output.register_hook(hook)
        for output in outputs
        # A hook on a leaf would outlive this iteration.
        if output.grad_fn is not None and hook not in (output._backward_hooks or {}).values()
    ]


def through_sink(output: Any, on_backward: Callable[[], None], *, clone: bool = True) -> Any:
    """Pass tensors in `output` that have a `grad_fn` through one autograd node, the *sink*; returns the new output.

    The sink is the first node of the module's backward pass, so `on_backward` is called in the outermost backward
    pass, before any re-entrant one that checkpointing starts. The sink passes on a gradient, possibly undefined, for
    *every* tensor, so the nodes that accumulate gradients also run for parameters behind an output that the loss
    ignores.

    Args:
        output: What forward returned.
        on_backward: Called when the backward pass begins.
        clone: Whether to clone tensors, so that the caller may change them in place (torch: `_set_ddp_sink_clone`).
    """
    inputs = list({id(tensor): tensor for tensor in tensors_in(output) if tensor.grad_fn is not None}.values())
    if not inputs:
        return output
    passed = dict(zip(map(id, inputs), _Sink.apply(on_backward, clone, *inputs), strict=True))  # type: ignore[no-untyped-call]
    changed = map_tensors(lambda tensor: passed.get(id(tensor), tensor), output)
    call_at_backward((tensor for tensor in tensors_in(changed) if id(tensor) in passed), on_backward)
    return changed


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, on_backward: Callable[[], None], clone: bool, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: FBT001 - autograd functions take no keywords
        context.set_materialize_grads(False)  # an undefined gradient stays undefined
        context.on_backward = on_backward
        return tuple(tensor.clone() for tensor in inputs) if clone else inputs

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        context.on_backward()
        return (None, None, *gradients)


# The structure of forward's outputs


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor in lists, tuples, named tuples, dicts, dataclasses and registered pytree nodes, to any depth."""
    if isinstance(output, Tensor):
        yield output
    else:
        for part in _parts(output):
            yield from tensors_in(part)


def map_tensors(change: Change, output: Any) -> Any:
    """The same structure with every tensor replaced by `change(tensor)`; a part without tensors stays as it is.

    So does a part of a class that permits no copies. Constructors of lists and tuples are not called, because a
    subclass may have one of its own.
    """
    if isinstance(output, Tensor):
        return change(output)
    if not any(True for _ in tensors_in(output)):
        return output
    try:
        return _with_parts_changed(change, output)
    except Exception:  # noqa: BLE001 - the class's own code may raise anything
        return output


def _with_parts_changed(change: Change, output: Any) -> Any:
    if isinstance(output, tuple):
        parts = [map_tensors(change, part) for part in output]
        if hasattr(output, "n_fields"):  # a type of torch.return_types
            return type(output)(parts)
        twin: Any = tuple.__new__(type(output), parts)
        if hasattr(output, "__dict__"):
            twin.__dict__.update(output.__dict__)
        return twin
    if isinstance(output, list):
        twin = copy.copy(output)  # keeps the class and other attributes
        list.__setitem__(twin, slice(None), [map_tensors(change, part) for part in output])
        return twin
    if isinstance(output, dict):
        twin = copy.copy(output)
        for key, part in output.items():
            twin[key] = map_tensors(change, part)
        return twin
    if not dataclasses.is_dataclass(output):  # a registered pytree node
        return tree_map(lambda part: change(part) if isinstance(part, Tensor) else part, output)
    twin = copy.copy(output)
    for field in dataclasses.fields(output):
        object.__setattr__(twin, field.name, map_tensors(change, getattr(output, field.name)))  # frozen ones too
    return twin


def _parts(output: Any) -> list[Any]:
    if isinstance(output, list | tuple):
        return list(output)
    if isinstance(output, dict):
        return list(output.values())
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return tree_leaves(output) if type(output) in SUPPORTED_NODES else []
