"""What PowerSGD remembers: errors and factors by parameter, and what is under way."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakTensorKeyDictionary

from .low_rank import random_q
from .low_rank_average import LowRankAverage
from .state import HookState

logger = logging.getLogger(__name__)


class PowerSGDState(HookState):
    """What PowerSGD remembers from one iteration to the next. Errors are each rank's own: save the state of each.

    What `power_sgd` remembers belongs to parameters, so that a new process goes on as if training had not stopped.
    What `batched_power_sgd` remembers belongs to buckets: the first one of a new process has another size, so it
    begins anew. What is sent for a parameter that no rank used counts as sent, although its gradient is left alone.

    Args:
        process_group: Ranks to average over. None: all.
        matrix_approximation_rank: Columns of P and Q (the paper's r).
        start_powerSGD_iter: Iterations before, which average in full precision. At least 2 with `use_error_feedback`
            or `warm_start`, else ValueError: torch's class rebuilds its buckets after the first.
        min_compression_rate: A matrix is compressed where its elements are more than this many times those sent.
        use_error_feedback: Whether to add to a gradient what the last compression of it lost.
        warm_start: Whether to begin with the last Q rather than with a random one.
        orthogonalization_epsilon: See `low_rank.orthogonalize`.
        random_seed: Of the random Qs; the same on all ranks.
        compression_stats_logging_frequency: Iterations from one log record of `compression_stats` to the next.
        batch_tensors_with_same_shape: Whether to multiply matrices of one shape together: fewer, larger operations.

    Attributes:
        waiting: The bucket whose second collective has not been started yet.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803 - torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        warm_start: bool = True,  # noqa: FBT001, FBT002
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(process_group)
        if (use_error_feedback or warm_start) and start_powerSGD_iter < 2:
            raise ValueError(
                f"start_powerSGD_iter: expected at least 2 with use_error_feedback or warm_start, got "
                f"{start_powerSGD_iter}: buckets are rebuilt after the first iteration"
            )
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._before, self._after = 0, 0  # elements, and those sent for them
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        self._numbers = WeakTensorKeyDictionary()
        self._seen = 0
        self._iteration = 0
        self.waiting: LowRankAverage | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Clones: the tensors are views, and a view is saved with all that it is a view of.
        memory = {name: {key: t.clone() for key, t in getattr(self, name).items()} for name in ("_errors", "_qs")}
        return super().__getstate__() | memory | {"_numbers": None, "waiting": None}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        super().__setstate__(saved)
        self._forget()

    def compression_stats(self) -> tuple[float, int, int]:
        """Elements per element sent, elements, elements sent; of all iterations that compressed."""
        return (self._before / self._after if self._after else 0.0), self._before, self._after

    def name(self, parameter: Tensor) -> str:
        """By which the parameter is remembered: its place in the order in which the hook first saw them.

        That is the same in each process that builds the same model with the same bucket caps.
        """
        if parameter not in self._numbers:
            self._numbers[parameter] = self._seen
            self._seen += 1
        return f"parameter {self._numbers[parameter]}"

    def begins(self, bucket: GradBucket) -> bool:
        """Whether this bucket is to be compressed; counts the iteration."""
        self._iteration = self.iter
        self.iter += bucket.is_last()
        return self._iteration >= self.start_powerSGD_iter

    def error(self, name: str, matrix: Tensor) -> Tensor:
        """What the last compression of the named matrix lost, zeros at first; of the matrix's shape."""
        error = self._errors.get(name)
        return torch.zeros_like(matrix) if error is None or error.shape != matrix.shape else error.to(matrix)

    def q(self, name: str, matrix: Tensor) -> Tensor:
        """Where to begin: the last Q, or a random one that is the same on all ranks; shape [columns, rank]."""
        rank = min(*matrix.shape, self.matrix_approximation_rank)
        last = self._qs.get(name, torch.empty(0)).to(matrix)
        known = last.shape == (matrix.shape[1], rank)
        if known and not self.orthogonalization_epsilon:
            return last
        fresh = random_q(matrix.shape[1], rank, f"{self.random_seed} {self._iteration} {name}", like=matrix)
        # Gram and Schmidt's method would keep columns of zeros, which gradients of zeros leave, for ever.
        return torch.where(last.any(0), last, fresh) if known else fresh

    def remember(self, errors: dict[str, Tensor], qs: dict[str, Tensor]) -> None:
        """Keep what the next iteration begins with, unless a rank's gradients were not finite.

        A gradient scaler skips such an iteration; an error that is not a number would never leave.
        """
        if qs and not torch.stack([q.isfinite().all() for q in qs.values()]).all():
            return
        if self.use_error_feedback:
            self._errors |= errors
        if self.warm_start:
            self._qs |= qs

    def count(self, bucket: GradBucket, elements_sent: int) -> None:
        """Add a bucket to the statistics, and log them when it is time."""
        self._before += bucket.buffer().numel()
        self._after += elements_sent
        if (
            bucket.is_last()
            and (self.iter - self.start_powerSGD_iter - 1) % self.compression_stats_logging_frequency == 0
        ):
            rate, before, after = self.compression_stats()
            logger.info("PowerSGD: iteration %d, %d elements as %d, rate %.1f", self.iter, before, after, rate)
