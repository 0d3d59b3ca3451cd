"""Averages of matrices as products of two thin ones, which are all that travels.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019 (arXiv 1905.13727), section 3, Algorithm 1.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from .allreduce import average
from .low_rank import orthogonalize


class LowRankAverage:
    """Replaces `matrices` by a low-rank approximation of their average over the ranks, and `rest` by its average.

    Making it starts the first of two collectives, `send_qs` the second; each rank must start all of its collectives
    in the same order. Nothing that is passed may be changed before `done`.

    Args:
        matrices: Each of shape [rows, columns].
        qs: For each matrix the Q of the last time, or a random one; shape [columns, rank]. All ranks have the same.
        rest: Tensors that are averaged as they are.
        stacks: Which matrices to multiply together.
        group: The ranks. None: all.
        epsilon: See `orthogonalize`.

    Attributes:
        done: Gets all tensors that were replaced, or an error, when everything is in place.
        qs: Then for each matrix the Q of this time.
        elements_sent: Elements that this rank gives to the two collectives.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        qs: Sequence[Tensor],
        rest: Sequence[Tensor],
        *,
        stacks: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None,
        epsilon: float,
    ) -> None:
        self._matrices, self._rest, self._stacks = matrices, rest, stacks
        self._group, self._epsilon = group, epsilon
        self._ms = [_stacked([matrices[i] for i in stack]) for stack in stacks]
        unit_qs = [torch.nn.functional.normalize(_stacked([qs[i] for i in stack]), dim=1) for stack in stacks]
        p_shapes = [(*m.shape[:2], q.shape[2]) for m, q in zip(self._ms, unit_qs, strict=True)]
        self._q_shapes = [q.shape for q in unit_qs]
        self._q_stacks: list[Tensor] = []
        self._first, pieces = _flat([*(tensor.shape for tensor in rest), *p_shapes], like=(*matrices, *rest)[0])
        self._averaged_rest, self._ps = pieces[: len(rest)], pieces[len(rest) :]
        if rest:
            torch._foreach_copy_(self._averaged_rest, list(rest))
        for m, q, p in zip(self._ms, unit_qs, self._ps, strict=True):
            torch.bmm(m, q, out=p)  # P <- M Q; only the span of Q matters, and with unit columns P stays in range
        self._first_sent = average(self._first, group)  # P <- all-reduce mean (P)
        self.elements_sent = self._first.numel() + sum(shape.numel() for shape in self._q_shapes)
        devices: list[int | str | torch.device] = [] if self._first.is_cpu else [self._first.device]
        self.done: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)

    def send_qs(self) -> None:
        """Wait for the first collective and start the second."""
        if not self._stacks:
            self._first_sent.add_done_callback(self._finish)
            return
        self._first_sent.wait()
        self._ps = [orthogonalize(p, self._epsilon) for p in self._ps]  # P^ <- orthogonalize(P)
        second, self._q_stacks = _flat(self._q_shapes, like=self._first)
        for m, p, q in zip(self._ms, self._ps, self._q_stacks, strict=True):
            torch.bmm(m.mH, p, out=q)  # Q <- M^T P^
        average(second, self._group).add_done_callback(self._finish)  # Q <- all-reduce mean (Q)

    def _finish(self, sent: torch.futures.Future[Tensor]) -> None:
        """In a thread of the process group."""
        try:
            sent.value()
            used_on_this_stream(*self._ms, *self._ps, *self._averaged_rest)
            self.qs = [torch.empty(0)] * len(self._matrices)
            for stack, m, p, qs in zip(self._stacks, self._ms, self._ps, self._q_stacks, strict=True):
                torch.bmm(p, qs.mH, out=m)  # M' <- P^ Q^T
                for i, product, q in zip(stack, m, qs, strict=True):
                    self.qs[i] = q
                    if len(stack) > 1:
                        self._matrices[i].copy_(product)
            if self._rest:
                torch._foreach_copy_(list(self._rest), self._averaged_rest)
            self.done.set_result([*self._matrices, *self._rest])  # on CUDA a future waits for what it holds
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            self.done.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong


def used_on_this_stream(*tensors: Tensor) -> None:
    """On CUDA: keep the memory of tensors that another stream allocated until this one is done with it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _stacked(matrices: list[Tensor]) -> Tensor:
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)


def _flat(shapes: Sequence[Sequence[int]], *, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor, and consecutive pieces of it that have these shapes."""
    ends = [0, *accumulate(torch.Size(shape).numel() for shape in shapes)]
    flat = like.new_empty(ends[-1])
    return flat, [flat[a:b].view(tuple(shape)) for (a, b), shape in zip(pairwise(ends), shapes, strict=True)]
