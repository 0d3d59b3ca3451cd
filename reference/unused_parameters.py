"""Unused parameters: which parameters take part in a backward pass, and the graph search that finds out."""

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

from .buckets import Features


class AllParametersUsed:
    """Every parameter gets exactly one gradient in each backward pass."""

    needs_sink = False
    """Whether outputs must pass through the sink, see `outputs.through_sink`."""

    launches_during_backward = True
    """False: all buckets are launched at the end of the backward pass."""

    iterations_without_order = 0
    """Iterations at the start that do not tell the order of readiness."""

    unused: frozenset[int] = frozenset()
    """Parameter indices that get no gradient in the coming backward pass."""

    is_static = True
    """Whether the same parameters were unused in all iterations so far."""

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """A forward pass whose gradients will be averaged has returned these tensors."""

    def arrived(self, index: int, gradient: Tensor | None, expected: bool) -> int:  # noqa: FBT001 - in every hook
        """A gradient has been accumulated.

        Args:
            index: Of its parameter.
            gradient: What was added. None: an undefined one passed, nothing was added.
            expected: Whether it is to be averaged.

        Returns:
            How many more gradients of this parameter are to come; negative: that was one too many.
        """
        return 0

    def launched_all(self) -> None:
        """All buckets are on their way: the moment to exchange what ranks must know of each other."""

    def untouched(self) -> frozenset[int]:
        """Parameter indices whose gradient must stay as it is, because no rank had one."""
        return frozenset()

    def finished(self) -> None:
        """A synchronised backward pass is over."""


class UsedParameterMap:
    """How many ranks used each of `parameters`, added up over `group` (torch: `local_used_map`)."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self.tensor = torch.zeros(len(parameters), dtype=torch.int32, device=parameters[0].device)
        """Ranks that used each parameter, int32, as of the last exchange."""
        self._group = group
        self._used: set[int] = set()
        self._work: dist.Work | None = None

    def add(self, index: int) -> None:
        """This rank used a parameter."""
        self._used.add(index)

    def exchange(self) -> None:
        """Start to add up; every rank must, in the same order among its collectives.

        A gradient that was dropped after it had been accumulated under no_sync counts as never made.
        """
        self._used = {index for index in self._used if self._parameters[index].grad is not None}
        used = torch.zeros(len(self.tensor), dtype=torch.int32)
        used[sorted(self._used)] = 1
        self.tensor.copy_(used)
        self._work = dist.all_reduce(self.tensor, group=self._group, async_op=True)

    def unused(self) -> frozenset[int]:
        """Parameters that no rank used. Waits for the exchange only if that can be any."""
        if len(self._used) == len(self.tensor):
            return frozenset()
        self.wait()
        return frozenset(torch.nonzero(self.tensor == 0).flatten().tolist())

    def wait(self) -> None:
        """Wait for the exchange."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def clear(self) -> None:
        """Forget this rank's uses."""
        self._used.clear()


class UnusedFoundInGraph(AllParametersUsed):
    """Searches the graph behind forward's outputs for parameters that it leaves out.

    Args:
        accumulators: The autograd node that accumulates each parameter's gradient, by parameter index.
        used: A map of as many parameters.
    """

    needs_sink = True

    def __init__(self, accumulators: Sequence[Node], used: UsedParameterMap) -> None:
        self._indices = {node: index for index, node in enumerate(accumulators)}
        self.used = used
        self._searched = False

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """Find out which parameters the graph leaves out."""
        unused = frozenset(range(len(self._indices))) - reachable(outputs, self._indices)
        self.is_static = self.is_static and (not self._searched or unused == self.unused)
        self.unused, self._searched = unused, True

    def arrived(self, index: int, gradient: Tensor | None, expected: bool) -> int:  # noqa: FBT001
        """Note the use, also under no_sync: what accumulates there will be averaged, used or not in the end."""
        if gradient is not None:
            self.used.add(index)
        return 0

    def launched_all(self) -> None:
        """Exchange the ranks' uses."""
        self.used.exchange()

    def untouched(self) -> frozenset[int]:
        """Parameters that no rank used since the last synchronised backward pass."""
        return self.used.unused()

    def finished(self) -> None:
        """Forget this iteration's uses."""
        self.used.wait()
        self.used.clear()


class StaticGraph(AllParametersUsed):
    """Counts in the first iteration how many gradients each parameter gets, and expects as many in all others.

    So a parameter that several checkpoints share is ready when its last gradient is, and nothing is ever
    searched. The first iteration launches everything at its end.
    """

    needs_sink = True
    launches_during_backward = False
    iterations_without_order = 1

    def __init__(self, used: UsedParameterMap) -> None:
        self.used = used
        self._times: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._exchanged = False
        self._untouched: frozenset[int] | None = None

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """Expect as many gradients as in the first iteration."""
        self._left = Counter(self._times)

    def arrived(self, index: int, gradient: Tensor | None, expected: bool) -> int:  # noqa: FBT001
        """Count in the first iteration, count down in the others."""
        if not self.launches_during_backward:
            if gradient is not None:
                self.used.add(index)
            if expected:
                self._times[index] += 1
            return 1  # all are launched at the end
        if expected:
            self._left[index] -= 1
        return self._left[index]

    def launched_all(self) -> None:
        """Exchange the ranks' uses, once: in the first iteration of whoever has inputs first."""
        if not self._exchanged:
            self._exchanged = True
            self.used.exchange()

    def untouched(self) -> frozenset[int]:
        """Parameters that no rank used in the first iteration, and so none ever."""
        if self._untouched is None:
            self._untouched = self.used.unused()
        return self._untouched

    def finished(self) -> None:
        """After this rank's first iteration: what it left out is unused for good, the sink is not needed any more."""
        self.used.wait()
        if self._times and not self.launches_during_backward:
            self.unused = frozenset(range(len(self.used.tensor))) - frozenset(self._times)
            self.launches_during_backward, self.needs_sink = True, False


def reachable(outputs: Iterable[Tensor], indices: dict[Node, int]) -> frozenset[int]:
    """Indices of the accumulating nodes that a backward pass from `outputs` can reach."""
    found = set()
    seen: set[Node] = set()
    waiting = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    with torch.autograd.profiler.record_function("search_unused_parameters"):  # torch's name
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in indices:
                found.add(indices[node])
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return frozenset(found)


def make_tracker(
    features: Features, parameters: Sequence[nn.Parameter], accumulators: Sequence[Node], group: dist.ProcessGroup
) -> AllParametersUsed:
    """The rule that the features ask for; a static graph needs no search."""
    if features.static_graph:
        return StaticGraph(UsedParameterMap(parameters, group))
    if features.find_unused_parameters:
        return UnusedFoundInGraph(accumulators, UsedParameterMap(parameters, group))
    return AllParametersUsed()


Change = Callable[[Tensor], Tensor]


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor in lists, tuples, named tuples, dicts, dataclasses and registered pytree nodes, to any depth."""
    if isinstance(output, Tensor):
        yield output
    else:
        for part in _parts(output):
            yield from tensors_in(part)


def map_tensors(change: Change, output: Any) -> Any:
    """The same structure with every tensor replaced by `change(tensor)`; what holds none is kept as it is."""
    if isinstance(output, Tensor):
        return change(output)
    if not any(True for _ in tensors_in(output)):
        return output
    if isinstance(output, dict):
        changed = copy.copy(output)  # keeps the class, and whatever else it holds
        for key, part in output.items():
            changed[key] = map_tensors(change, part)
        return changed
    if isinstance(output, list):
        return type(output)(map_tensors(change, part) for part in output)
    if isinstance(output, tuple):
        parts = [map_tensors(change, part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if not dataclasses.is_dataclass(output):  # a registered pytree node
        return tree_map(lambda part: change(part) if isinstance(part, Tensor) else part, output)
    twin: Any = copy.copy(output)
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


def through_sink(output: Any, on_backward: Callable[[], None], *, clone: bool = True) -> Any:
    """`output` with all of its differentiable tensors passed through one autograd node, the *sink*.

    The sink is the first node of the backward pass, so `on_backward` is called in the outermost one, before
    any re-entrant pass that checkpointing starts. And as the sink hands on a gradient, perhaps undefined, for
    *every* tensor, also the parameters behind an output that the loss ignores hear of the backward pass.

    Args:
        output: What forward returned.
        on_backward: Called when the backward pass begins.
        clone: Whether the caller may change the tensors in place. (torch: `_set_ddp_sink_clone`)
    """
    inputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    if not inputs:
        return output
    passed = iter(_Sink.apply(on_backward, clone, *inputs))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: tensor if tensor.grad_fn is None else next(passed), output)


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
