"""PowerSGD: gradients travel as products of two thin matrices, and what that loses is added to the next ones.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019 (arXiv 1905.13727), section 3, Algorithms 1 (in `low_rank_average`) and 2; warm start: section 4.2.

A bucket takes two all-reduces, one after the other. The second is started when the next bucket arrives, always from
the thread that calls the hook: started from where the first one ends, in a thread of the process group, it would be
issued in another order on each rank.
"""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from .allreduce import average
from .low_rank import rows_and_columns, square, stacks, worth_compressing
from .low_rank_average import LowRankAverage, used_on_this_stream
from .powersgd_state import PowerSGDState


def power_sgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress each gradient that has rows and columns and is worth it; average the others as they are."""
    parameters = bucket.parameters()
    names = [state.name(parameter) for parameter in parameters]
    if not state.begins(bucket):
        return average(bucket.buffer(), state.process_group)
    pieces = bucket.buffer().split([parameter.numel() for parameter in parameters])
    matrices, rest = {}, []
    for name, parameter, piece in zip(names, parameters, pieces, strict=True):
        rows, columns = rows_and_columns(parameter)
        rank = min(rows, columns, state.matrix_approximation_rank)
        if parameter.dim() > 1 and worth_compressing(rows, columns, rank, state.min_compression_rate):
            matrices[name] = piece.view(rows, columns)
        else:
            rest.append(piece)
    return _compress(state, bucket, matrices, rest)


def batched_power_sgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress the whole bucket as one square matrix: faster than `power_sgd`, and mostly less accurate."""
    buffer = bucket.buffer()
    if not state.begins(bucket):
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
    """Replace all by their averages, the named matrices by approximations; returns a future of the buffer."""
    buffer = bucket.buffer()
    names, inputs = list(matrices), list(matrices.values())
    errors: list[Tensor] = []
    if state.use_error_feedback and inputs:
        kept = [state.error(name, matrix) for name, matrix in matrices.items()]
        errors = list(torch._foreach_add(inputs, kept))  # Delta <- g + e  (Algorithm 2)
        torch._foreach_copy_(inputs, errors)
    averaging = LowRankAverage(
        inputs,
        [state.q(name, matrix) for name, matrix in matrices.items()],
        rest,
        stacks=stacks([tuple(m.shape) for m in inputs], batched=state.batch_tensors_with_same_shape),
        group=state.process_group,
        epsilon=state.orthogonalization_epsilon,
    )

    def remember(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        done.value()
        used_on_this_stream(*errors, *averaging.qs)
        if errors:
            torch._foreach_sub_(errors, inputs)  # e <- Delta - Delta'  (Algorithm 2)
        state.remember(dict(zip(names, errors, strict=False)), dict(zip(names, averaging.qs, strict=True)))
        return buffer

    result = averaging.done.then(remember)
    _send_second_collectives(state, bucket, averaging)
    state.count(bucket, averaging.elements_sent)
    return result


def _send_second_collectives(state: PowerSGDState, bucket: GradBucket, averaging: LowRankAverage) -> None:
    """That of the bucket before, and of the last bucket its own."""
    if state.waiting is not None and bucket.index() > 0:  # at 0 it is of an iteration that failed
        state.waiting.send_qs()
    state.waiting = averaging
    if bucket.is_last():
        averaging.send_qs()
        state.waiting = None
