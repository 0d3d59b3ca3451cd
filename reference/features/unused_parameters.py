"""Unused parameters: trackers of which parameters get a gradient in a backward pass.

By default the reducer calls `reducer.AllParametersUsed`, which has the same methods.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..constructor_arguments import Options
from ..message_sizes import USED_MAP_BYTES
from ..parameters import INTEGERS, reachable
from ..reducer import AllParametersUsed


def make_tracker(
    options: Options, parameters: Sequence[nn.Parameter], accumulators: Sequence[Node], group: dist.ProcessGroup
) -> AllParametersUsed:
    """The tracker that the options require; a static graph needs no search."""
    if options.static_graph:
        return StaticGraph(parameters, accumulators, group)
    if options.find_unused_parameters:
        return UnusedFoundInGraph(parameters, accumulators, group)
    return AllParametersUsed()


class UnusedFoundInGraph(AllParametersUsed):
    """Searches the graph behind forward's outputs for parameters that it leaves out (`find_unused_parameters`)."""

    counts_gradients = True
    needs_sink = True

    def __init__(self, parameters: Sequence[nn.Parameter], nodes: Sequence[Node], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group
        self._indices = {node: index for index, node in enumerate(nodes)}
        device = parameters[0].device if parameters else None  # none: the all-reduce of each one is delayed
        #: Number of ranks that used each parameter, as of the last exchange (torch: `local_used_map`).
        self.used = torch.zeros(len(parameters), dtype=INTEGERS[USED_MAP_BYTES], device=device)
        self._used_here: set[int] = set()
        self._exchange: dist.Work | None = None
        self._searched = False
        self._newly_unused: frozenset[int] = frozenset()
        self._turn = 0

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """Search the graph behind the outputs for unused parameters."""
        unused = frozenset(range(len(self._indices))) - reachable(outputs, self._indices)
        self.is_static = self.is_static and (not self._searched or unused == self.unused)
        self._newly_unused = unused - self.unused
        self._turn = (self._turn + 1) % len(self._indices)
        self.unused, self._searched = unused, True

    def seldom_unused(self) -> Iterable[int]:
        """Those that were used in the last iteration, and one of the others in turn."""
        return sorted(self._newly_unused | ({self._turn} & self.unused))

    def gradient_arrived(self, index: int, *, defined: bool, expected: bool) -> int:
        """Note the use, also under `no_sync`: the next synchronised backward pass averages that gradient."""
        if defined:
            self._used_here.add(index)
        return 0

    def launched_all(self) -> None:
        """Start to add up which parameters each rank used.

        A gradient that was accumulated under `no_sync` and then set to None does not count as a use.
        """
        self._wait()  # an exchange that an exception has left still uses the tensor
        self._used_here = {index for index in self._used_here if self._parameters[index].grad is not None}
        used = torch.zeros(len(self.used), dtype=self.used.dtype, device="cpu", pin_memory=self.used.is_cuda)
        used[sorted(self._used_here)] = 1
        self.used.copy_(used, non_blocking=True)  # on CUDA from pinned memory, as in torch: the host does not wait
        self._exchange = dist.all_reduce(self.used, group=self._group, async_op=True)

    def untouched(self) -> frozenset[int]:
        """Parameters that no rank used. As in torch, the host waits for the exchange unless this rank used all."""
        if len(self._used_here) == len(self.used):
            return frozenset()
        self._wait()
        return frozenset(index for index, count in enumerate(self.used.tolist()) if not count)

    def finished(self) -> None:
        """Forget which parameters were used in this iteration."""
        self._wait()
        self._used_here.clear()

    def _wait(self) -> None:
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None


class StaticGraph(UnusedFoundInGraph):
    """Counts each parameter's gradients in the first iteration and expects as many in all others (`static_graph`).

    A parameter that several activation checkpoints share is therefore ready when its last gradient has arrived. The
    first iteration launches all buckets at its end. Its graph alone is searched, for the parameters to wait for.
    """

    launches_during_backward = False
    iterations_without_ready_order = 1

    def __init__(self, parameters: Sequence[nn.Parameter], nodes: Sequence[Node], group: dist.ProcessGroup) -> None:
        super().__init__(parameters, nodes, group)
        self._awaited: frozenset[int] = frozenset()  # parameters whose gradients the first iteration waits for
        self._arrived: set[int] = set()  # parameters whose gradients, undefined or not, have arrived in it
        self._expected: Counter[int] = Counter()  # gradients per parameter in it, without undefined ones
        self._remaining: Counter[int] = Counter()
        self._exchanged = False
        self._untouched: frozenset[int] | None = None

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """Expect as many gradients of each parameter as in the first iteration; search the first one's graph."""
        self.abandoned()
        if not self.launches_during_backward:
            through_the_sink = [output for output in outputs if output.grad_fn is not None]
            all_indices = frozenset(self._indices.values())  # outputs that are in an iterator, say, are not found
            self._awaited = reachable(through_the_sink, self._indices) if through_the_sink else all_indices

    def gradient_arrived(self, index: int, *, defined: bool, expected: bool) -> int:
        """Count up in the first iteration, count down in the others.

        An undefined gradient is of an output that the loss ignores. Later iterations have no sink, so none comes.
        """
        if not self.launches_during_backward:
            if defined:
                self._used_here.add(index)
            if expected:
                self._arrived.add(index)
                self._expected[index] += defined
            return 1  # all buckets are launched at the end
        if not defined and self._remaining[index] <= 0:  # of a function that has brought the gradient itself
            return 1
        if expected:
            self._remaining[index] -= 1
        return self._remaining[index]

    def all_arrived(self) -> bool:
        """Whether the first iteration's gradients have arrived, in one backward pass or several.

        `autograd.grad` and a pass through a module whose parameters are all frozen reach the outputs but bring none.
        """
        trainable = any(node.variable.requires_grad for node in self._indices)  # type: ignore[attr-defined]  # of C++
        return trainable and self._awaited <= self._arrived

    def launched_all(self) -> None:
        """Exchange which parameters each rank used, in the first iteration only."""
        if not self._exchanged:
            self._exchanged = True
            super().launched_all()

    def untouched(self) -> frozenset[int]:
        """Parameters that no rank used in the first iteration, and therefore uses in no iteration."""
        if self._untouched is None:
            self._untouched = super().untouched()
        return self._untouched

    def finished(self) -> None:
        """After this rank's first iteration: fix the set of unused parameters; the sink is no longer needed."""
        self._wait()
        if self._arrived and not self.launches_during_backward:
            self.unused = frozenset(range(len(self.used))) - frozenset(+self._expected)
            self.launches_during_backward, self.needs_sink = True, False

    def abandoned(self) -> None:
        """Count from the start again."""
        self._remaining = Counter(self._expected)
        if not self.launches_during_backward:
            self._arrived.clear()
            self._expected.clear()
