"""PowerSGD: average gradients as products of two thin matrices, with error feedback.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019 (arXiv 1905.13727). The hooks `power_sgd` and `batched_power_sgd` are Algorithm 2, distributed
error-feedback SGD; `LowRankAverage` is Algorithm 1, rank-r compression; warm start is section 4.2.

A bucket takes two all-reduces, one after the other. The second one is issued when the next bucket arrives, always
from the thread that calls the hook. Issued from the completion callback of the first one, in a thread of the process
group, it would run in a different order on each rank.

On CUDA the hook never waits for the device. NCCL's futures are done once their collectives are enqueued, and their
callbacks run at once, on streams that wait for the collectives. What depends on numbers, such as whether they are
finite, stays on the device.
"""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakTensorKeyDictionary

from ..message_sizes import MIN_COMPRESSION_RATE, factors, factors_of_gradient, square_side
from .allreduce import average
from .interface import used_on_this_stream


@dataclass(eq=False, repr=False)
class PowerSGDState:
    """The settings of PowerSGD, and the errors and Qs that it keeps from one iteration to the next.

    It can be saved and loaded (`torch.save`, pickle), but has no process group then; loading warns about a group that
    is not of all ranks. Errors differ between ranks, so save the state of every rank. `power_sgd` keeps an error and
    a Q for each parameter: a new process that loads them continues as if training had not stopped.
    `batched_power_sgd` keeps them for each bucket: the first iteration of a new process has one bucket of another
    size, so bucket 0 starts again from a zero error. For a parameter that no rank used, the errors are updated as if
    the average had been applied, although the reducer leaves its gradient unchanged.

    Args:
        process_group: The ranks to average over. None: all.
        matrix_approximation_rank: Columns of P and Q (the paper's r).
        start_powerSGD_iter: The number of iterations that average in full precision before compression starts. At
            least 2 with `use_error_feedback` or `warm_start`, because torch's class rebuilds its buckets after the
            first iteration.
        min_compression_rate: Compress a matrix only if it has more than this many times the elements of P and Q.
        use_error_feedback: Whether to add the error of the last compression to each gradient.
        warm_start: Whether to start from the last Q instead of a random one.
        orthogonalization_epsilon: See `orthogonalize`.
        random_seed: Seed of the random Qs, the same on all ranks.
        batch_tensors_with_same_shape: Whether to multiply matrices of one shape together: fewer, larger operations.

    Attributes:
        iter: Iterations so far.
        waiting: The average whose second collective has not been issued yet.

    Raises:
        ValueError: `start_powerSGD_iter` is too small.
    """

    process_group: dist.ProcessGroup | None
    iter: int = field(default=0, init=False)
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1_000  # noqa: N815 - torch's name
    min_compression_rate: float = MIN_COMPRESSION_RATE
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    batch_tensors_with_same_shape: bool = False

    def __post_init__(self) -> None:
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter < 2:
            raise ValueError(
                f"start_powerSGD_iter: expected at least 2 with use_error_feedback or warm_start, got "
                f"{self.start_powerSGD_iter}: buckets are rebuilt after the first iteration"
            )
        self._before, self._after = 0, 0  # elements of the gradients, and elements sent instead
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}
        self._start_process()

    def _start_process(self) -> None:
        """Initialise what is not saved."""
        self._numbers = WeakTensorKeyDictionary()
        self._seen = 0
        self._iteration = 0
        self.waiting: LowRankAverage | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Clones, because these tensors are views, and a view is saved together with the whole tensor behind it.
        memory = {name: {key: t.clone() for key, t in getattr(self, name).items()} for name in ("_errors", "_qs")}
        ranks = self.process_group and _ranks(self.process_group)
        return vars(self) | memory | {"process_group": None, "_saved_ranks": ranks, "_numbers": None, "waiting": None}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        ranks = saved.pop("_saved_ranks")
        vars(self).update(saved)
        self._start_process()
        if ranks and (not dist.is_initialized() or ranks != list(range(dist.get_world_size()))):
            warnings.warn(
                f"PowerSGDState: process groups are not saved, so process_group is None now. Its ranks were {ranks}; "
                "set process_group again before training.",
                stacklevel=2,
            )

    def compression_stats(self) -> tuple[float, int, int]:
        """Compression rate, elements before and elements after compression, over all compressed iterations."""
        return (self._before / self._after if self._after else 0.0), self._before, self._after

    def name(self, parameter: Tensor) -> str:
        """Key of a parameter in the state: its position in the order in which the hook first received parameters.

        Every process that builds the same model with the same bucket caps gets the same keys.
        """
        if parameter not in self._numbers:
            self._numbers[parameter] = self._seen
            self._seen += 1
        return f"parameter {self._numbers[parameter]}"

    def compresses(self, bucket: GradBucket) -> bool:
        """Whether to compress this bucket. Also counts iterations, so call it exactly once for each bucket."""
        self._iteration = self.iter
        self.iter += bucket.is_last()
        return self._iteration >= self.start_powerSGD_iter

    def error(self, name: str, matrix: Tensor) -> Tensor:
        """The error of the last compression of this matrix, in its shape; zeros before the first compression."""
        error = self._errors.get(name)
        return torch.zeros_like(matrix) if error is None or error.shape != matrix.shape else error.to(matrix)

    def q(self, name: str, matrix: Tensor) -> Tensor:
        """The last Q of this matrix, or a random one that is the same on all ranks; shape [columns, rank]."""
        _, shape = factors(matrix.shape[0], matrix.shape[1], self.matrix_approximation_rank)
        last = self._qs.get(name, matrix.new_empty(0)).to(matrix)
        known = last.shape == shape
        if known and not self.orthogonalization_epsilon:
            return last
        fresh = random_q(*shape, f"{self.random_seed} {self._iteration} {name}", like=matrix)
        # Gradients of zeros give columns of zeros, which the Gram-Schmidt process would keep for ever.
        return torch.where(last.any(0), last, fresh) if known else fresh


def _ranks(group: dist.ProcessGroup) -> list[int] | str:
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return "unknown, because the group was destroyed"


def power_sgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress each gradient that `factors_of_gradient` gives factors; average the others as they are."""
    parameters = bucket.parameters()
    names = [state.name(parameter) for parameter in parameters]
    if not state.compresses(bucket):
        return average(bucket.buffer(), state.process_group)
    pieces = bucket.buffer().split([parameter.numel() for parameter in parameters])
    limits = state.matrix_approximation_rank, state.min_compression_rate
    matrices, rest = {}, []
    for name, parameter, piece in zip(names, parameters, pieces, strict=True):
        if found := factors_of_gradient(parameter.shape, *limits, parameter.stride()):
            (rows, _), (columns, _) = found
            matrices[name] = piece.view(rows, columns)
        else:
            rest.append(piece)
    return _compress(state, bucket, matrices, rest)


def batched_power_sgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress the whole bucket as one square matrix: faster than `power_sgd`, but usually less accurate."""
    buffer = bucket.buffer()
    if not state.compresses(bucket):
        return average(buffer, state.process_group)
    matrix = square(buffer)

    def copy_back(done: torch.futures.Future[Tensor]) -> Tensor:
        done.value()
        used_on_this_stream(matrix)
        return buffer.copy_(matrix.flatten()[: buffer.numel()])

    return _compress(state, bucket, {f"bucket {bucket.index()}": matrix}, []).then(copy_back)


def _compress(
    state: PowerSGDState, bucket: GradBucket, matrices: dict[str, Tensor], rest: list[Tensor]
) -> torch.futures.Future[Tensor]:
    """Algorithm 2 for one bucket: average `matrices` with error feedback, and `rest` as it is.

    Both are views of the bucket's buffer, which the returned future holds. `state` supplies errors and Qs by the
    names of the matrices, and keeps the new ones.
    """
    buffer = bucket.buffer()
    names, inputs = list(matrices), list(matrices.values())
    last_errors: list[Tensor] = []
    errors: list[Tensor] = []
    last_qs = [state.q(name, matrix) for name, matrix in matrices.items()]
    if state.use_error_feedback and inputs:
        last_errors = [state.error(name, matrix) for name, matrix in matrices.items()]
        errors = list(torch._foreach_add(inputs, last_errors))  # Delta <- g + e  (Algorithm 2)
        torch._foreach_copy_(inputs, errors)
    used_on_this_stream(*last_errors, *last_qs)
    together = stacks([tuple(m.shape) for m in inputs], batched=state.batch_tensors_with_same_shape)
    averaging = LowRankAverage(
        inputs, last_qs, rest, stacks=together, group=state.process_group, epsilon=state.orthogonalization_epsilon
    )
    # A callback updates these and not the state, which holds a process group; see `comm_hooks.interface`.
    kept_errors, kept_qs = state._errors, state._qs if state.warm_start else {}

    def remember(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        done.value()
        used_on_this_stream(*errors, *last_errors, *averaging.qs, *last_qs)
        if errors:
            torch._foreach_sub_(errors, inputs)  # e <- Delta - Delta'  (Algorithm 2)
        if averaging.finite is not None and averaging.finite.is_cpu:
            if not averaging.finite:
                return buffer
        elif averaging.finite is not None:
            used_on_this_stream(averaging.finite)
            keep_where(averaging.finite, errors, last_errors)
            keep_where(averaging.finite, averaging.qs, last_qs)
        kept_errors.update(zip(names, errors, strict=False))
        kept_qs.update(zip(names, averaging.qs, strict=True))
        return buffer

    result = averaging.done.then(remember)
    # An average that is still waiting at bucket 0 is left over from an iteration that failed.
    if state.waiting is not None and bucket.index() > 0:
        state.waiting.send_qs(state.process_group)
    state.waiting = averaging
    if bucket.is_last():
        averaging.send_qs(state.process_group)
        state.waiting = None
    state._before += buffer.numel()
    state._after += averaging.elements_sent
    return result


def keep_where(finite: Tensor, new: Sequence[Tensor], last: Sequence[Tensor]) -> None:
    """Overwrite `new` by `last` unless `finite`, a tensor of one bool, is True; the host does not read it.

    A gradient scaler skips an iteration with infinite gradients, but an error of NaN would stay in later gradients.
    """
    for one, other in zip(new, last, strict=True):
        torch.where(finite, one, other, out=one)


class LowRankAverage:
    """Algorithm 1: replaces matrices by a low-rank approximation of their average over the ranks.

    The constructor issues the first of two collectives and `send_qs` the second. All ranks must issue theirs in the
    same order. No argument may be changed before `done` has its result. Callbacks of futures hold this object, so it
    does not hold the group; see `comm_hooks.interface`.

    Args:
        matrices: Matrices M of shape [rows, columns]; overwritten.
        qs: For each matrix the last Q, or a random one, of shape [columns, rank]; the same on all ranks.
        rest: Tensors to replace by their averages, uncompressed.
        stacks: Indices of the matrices to multiply together.
        group: The ranks. None: all.
        epsilon: See `orthogonalize`.

    Attributes:
        done: Future of `matrices` and `rest`, which holds an error if a collective fails.
        qs: The new Q of each matrix, once `done` has its result.
        finite: Whether all elements of all new Qs are finite, a tensor on their device, once `done` has its result.
            None: there are no matrices.
        elements_sent: Number of elements that this rank passes to the two collectives.
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
        self._epsilon = epsilon
        self._ms = [_stacked([matrices[i] for i in stack]) for stack in stacks]
        unit_qs = [torch.nn.functional.normalize(_stacked([qs[i] for i in stack]), dim=1) for stack in stacks]
        p_shapes = [(*m.shape[:2], q.shape[2]) for m, q in zip(self._ms, unit_qs, strict=True)]
        self._q_shapes = [q.shape for q in unit_qs]
        self._q_stacks: list[Tensor] = []
        self.finite: Tensor | None = None
        self._first, pieces = _flat([*(tensor.shape for tensor in rest), *p_shapes], like=(*matrices, *rest)[0])
        self._averaged_rest, self._ps = pieces[: len(rest)], pieces[len(rest) :]
        if rest:
            torch._foreach_copy_(self._averaged_rest, list(rest))
        for m, q, p in zip(self._ms, unit_qs, self._ps, strict=True):
            torch.bmm(m, q, out=p)  # P <- M Q; only the span of Q matters, and with unit columns P stays in range
        self._first_sent = average(self._first, group)  # P <- all-reduce mean (P)
        self.elements_sent = self._first.numel() + sum(shape.numel() for shape in self._q_shapes)
        devices: list[int | str | torch.device] = [self._first.device] if self._first.is_cuda else []
        self.done: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)

    def send_qs(self, group: dist.ProcessGroup | None) -> None:
        """Issue the second collective, which depends on the first, to the ranks of the constructor's `group`."""
        if not self._stacks:
            self._first_sent.add_done_callback(self._finish)
            return
        # On CUDA a future that is done may belong to a collective that still runs. To wait for it would make the
        # current stream wait, on which the backward pass goes on. The callback runs at once, on a stream of its own.
        if self._first.is_cpu or not self._first_sent.done():
            self._first_sent.wait()
        self._first_sent.add_done_callback(partial(self._send_qs, group))  # never waits, so never holds the group

    def _send_qs(self, group: dist.ProcessGroup | None, sent: torch.futures.Future[Tensor]) -> None:
        """Called by `send_qs`, in the thread that calls the hook."""
        try:
            sent.value()
            used_on_this_stream(*self._ms)
            self._ps = [orthogonalize(p, self._epsilon) for p in self._ps]  # P^ <- orthogonalize(P)
            second, self._q_stacks = _flat(self._q_shapes, like=self._first)
            for m, p, q in zip(self._ms, self._ps, self._q_stacks, strict=True):
                torch.bmm(m.mH, p, out=q)  # Q <- M^T P^
            average(second, group).add_done_callback(self._finish)  # Q <- all-reduce mean (Q)
        except Exception as error:  # noqa: BLE001 - raised where `done` is waited for
            self.done.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

    def _finish(self, sent: torch.futures.Future[Tensor]) -> None:
        """Replace the tensors; runs in a thread of the process group, or with NCCL at once on a stream of its own."""
        try:
            averaged = sent.value()
            used_on_this_stream(*self._ms, *self._ps, *self._averaged_rest)
            if self._stacks:
                self.finite = averaged.isfinite().all()
            self.qs = [torch.empty(0)] * len(self._matrices)
            for stack, m, p, qs in zip(self._stacks, self._ms, self._ps, self._q_stacks, strict=True):
                torch.bmm(p, qs.mH, out=m)  # M' <- P^ Q^T
                for i, product, q in zip(stack, m, qs, strict=True):
                    self.qs[i] = q
                    if len(stack) > 1:
                        self._matrices[i].copy_(product)
            if self._rest:
                torch._foreach_copy_(list(self._rest), self._averaged_rest)
            self.done.set_result([*self._matrices, *self._rest])  # on CUDA it waits for the tensors in its result
        except Exception as error:  # noqa: BLE001 - raised where `done` is waited for
            self.done.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong


def _stacked(matrices: list[Tensor]) -> Tensor:
    """The matrices as one tensor of shape [count, rows, columns]; a view if there is only one."""
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)


def _flat(shapes: Sequence[Sequence[int]], *, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A new flat tensor, and consecutive views of it in these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = like.new_empty(sum(sizes))
    return flat, [part.view(tuple(shape)) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def orthogonalize(stack: Tensor, epsilon: float = 0.0) -> Tensor:
    """An orthonormal basis of the columns of each matrix; both of shape [count, rows, rank], with rows >= rank.

    `epsilon` is added to the length of each column before the Gram-Schmidt process divides by it. Zero: use
    Householder reflections, which turn columns of zeros into unit vectors and so need no epsilon.
    """
    precise = stack.float() if stack.dtype in (torch.float16, torch.bfloat16) else stack
    if not epsilon:
        householder: Tensor = torch.linalg.qr(precise).Q
        return householder.to(stack.dtype)
    basis = precise.clone()
    for i in range(basis.shape[2]):
        column = basis[:, :, i : i + 1]
        column /= column.norm(dim=1, keepdim=True) + epsilon
        later = basis[:, :, i + 1 :]
        later -= column @ (column.mH @ later)
    return basis.to(stack.dtype)


def square(flat: Tensor) -> Tensor:
    """The elements of `flat`, padded with zeros to the smallest square matrix that holds them."""
    side = square_side(flat.numel())
    return torch.nn.functional.pad(flat, (0, side * side - flat.numel())).view(side, side)


def stacks(shapes: Sequence[tuple[int, ...]], *, batched: bool) -> list[list[int]]:
    """Indices of the matrices to multiply together: those of one shape if `batched`, otherwise each alone."""
    found = defaultdict(list)
    for i, shape in enumerate(shapes):
        found[shape if batched else i].append(i)
    return list(found.values())


def random_q(columns: int, rank: int, seed: str, *, like: Tensor) -> Tensor:
    """Standard normal numbers that depend only on the seed; shape [columns, rank]."""
    generator = torch.Generator().manual_seed(int.from_bytes(sha256(seed.encode()).digest()[:8]))
    numbers = torch.randn(columns, rank, generator=generator)
    if like.is_cuda:
        numbers = numbers.pin_memory()  # from other memory the copy would wait for the device
    return numbers.to(like.device, like.dtype, non_blocking=True)
