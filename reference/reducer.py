"""The reducer: averages gradients over the ranks, bucket by bucket, while the backward pass still runs.

An iteration, told once:

1. `prepare_for_forward` rebuilds the buckets if that is due; `prepare_for_backward` expects every gradient.
2. Each gradient that autograd accumulates is put into its bucket. When bucket 0 has all of its gradients its
   all-reduce is launched, then bucket 1's, and so on: strictly in bucket order, so that all ranks issue the
   same collectives in the same order whatever order their gradients come in.
3. When the last bucket is launched, the reducer asks autograd to call it back at the end of the backward
   pass; there it waits for the buckets in order and copies the averages back into the gradients.
"""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from .bucket import Bucket
from .bucketing import assign_buckets, check_partition, should_rebuild
from .parameters import bucket_key, size_bytes


class Observer:
    """What can be watched of a reducer; every method is a no-op, override what you need."""

    def parameter_ready(self, index: int) -> None:
        """The gradient of a parameter has been accumulated, whether or not it will be averaged."""

    def bucket_ready(self, bucket: int) -> None:
        """All gradients of the bucket have been put."""

    def bucket_launching(self, bucket: int) -> None:
        """It is the bucket's turn: its all-reduce is about to be issued."""

    def bucket_launched(self, bucket: int, work: dist.Work) -> None:
        """The bucket's all-reduce has been issued, and may be done already."""

    def bucket_done(self, bucket: int) -> None:
        """The reducer has come back from waiting for the bucket's all-reduce."""

    def bucket_copied_out(self, bucket: int) -> None:
        """The bucket's averages are in the gradients."""


class Reducer:
    """Averages the gradients of `parameters` over `group` during every backward pass it was prepared for.

    Args:
        parameters: Trainable parameters by name; their order gives them their parameter index.
        buckets: Parameter indices by bucket, in launch order.
        rebuild_caps_bytes: Caps for the rebuild in ready order. None: `buckets` is a plan and stays.
        group: Ranks to average over; each must construct its reducer with the same arguments.

    Attributes:
        buckets: The buckets in force, in launch order.
        observer: Who watches; assign to it at any time between iterations.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        buckets: Sequence[Sequence[int]],
        *,
        rebuild_caps_bytes: Sequence[int] | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.observer = Observer()
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._group = group
        # Multiplying beats dividing, and gives the same bits as torch, which does so too.
        self._scale = 1.0 / dist.get_world_size(group)
        self._rebuild_caps = rebuild_caps_bytes
        self._rebuilt = False
        self._has_synchronized = False
        self._expecting = False
        self._adopt(buckets)
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_gradient_accumulated, weakref.ref(self), index))
            for index, parameter in enumerate(self._parameters)
        ]
        self.detach = weakref.finalize(self, lambda: [handle.remove() for handle in handles])
        """Stop listening to autograd, for good; happens by itself when the reducer is garbage."""

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """Parameter indices by bucket, in launch order, as they are in force."""
        return tuple(bucket.indices for bucket in self.buckets)

    # Construction and rebuild

    def _adopt(self, buckets: Sequence[Sequence[int]]) -> None:
        check_partition(buckets, len(self._parameters))
        self.buckets = [Bucket(indices, [self._parameters[i] for i in indices]) for indices in buckets]
        self._places = {
            index: (number, slot)
            for number, bucket in enumerate(self.buckets)
            for slot, index in enumerate(bucket.indices)
        }
        self._ready_order: list[int] = []
        self._next_bucket = len(self.buckets)

    def _rebuild(self) -> None:
        assert self._rebuild_caps is not None
        self.buckets = []  # frees the old buffers before the new ones are made
        self._adopt(
            assign_buckets(
                [size_bytes(parameter) for parameter in self._parameters],
                self._rebuild_caps,
                keys=[bucket_key(parameter) for parameter in self._parameters],
                order=self._agree_on_ready_order(),
            )
        )
        self._rebuilt = True

    def _agree_on_ready_order(self) -> list[int]:
        """Rank 0's ready order: every rank must assign alike, and ready orders may differ between ranks."""
        order = torch.tensor(self._ready_order, device=self._parameters[0].device)
        dist.broadcast(order, group_src=0, group=self._group)
        return [int(index) for index in order.tolist()]

    # Forward pass

    def prepare_for_forward(self) -> None:
        """Rebuild if due.

        Raises:
            RuntimeError: The last backward pass left gradients out, so its averages never arrived.
        """
        self._check_finished()
        if should_rebuild(
            rebuilt=self._rebuilt,
            planned=self._rebuild_caps is None,
            has_synchronized=self._has_synchronized,
        ):
            self._rebuild()

    def prepare_for_backward(self) -> None:
        """Expect every gradient once in the coming backward pass, and average them."""
        for bucket in self.buckets:
            bucket.reset()
        self._next_bucket = 0
        self._ready_order = []
        self._expecting = True

    def expect_nothing(self) -> None:
        """Leave the gradients of the coming backward pass alone.

        Raises:
            RuntimeError: As `prepare_for_forward`.
        """
        self._check_finished()
        self._expecting = False

    # Backward pass

    def _mark_ready(self, index: int) -> None:
        self.observer.parameter_ready(index)
        if not self._expecting:
            return
        number, slot = self._places[index]
        bucket = self.buckets[number]
        if slot not in bucket.pending_slots:
            raise RuntimeError(self._ready_twice(index))
        self._ready_order.append(index)
        bucket.put(slot, self._scale)
        if bucket.ready:
            self.observer.bucket_ready(number)
            self._launch_in_order()

    def _launch_in_order(self) -> None:
        while self._next_bucket < len(self.buckets) and self.buckets[self._next_bucket].ready:
            self.observer.bucket_launching(self._next_bucket)
            work = self.buckets[self._next_bucket].launch(self._group)
            self.observer.bucket_launched(self._next_bucket, work)
            self._next_bucket += 1
        if self._next_bucket == len(self.buckets):
            torch.autograd.Variable._execution_engine.queue_callback(self._finalize)

    def _finalize(self) -> None:
        self._expecting = False
        for number, bucket in enumerate(self.buckets):
            bucket.wait()
            self.observer.bucket_done(number)
            bucket.copy_out()
            self.observer.bucket_copied_out(number)
        self._has_synchronized = True

    # Errors

    def _check_finished(self) -> None:
        if self._expecting and self._ready_order:
            raise RuntimeError(self._unfinished())

    def _unfinished(self) -> str:
        missing = sorted(set(range(len(self._parameters))) - set(self._ready_order))
        return (
            f"rank {dist.get_rank(self._group)}: the last backward pass produced no gradient for "
            f"{len(missing)} of {len(self._parameters)} parameters, so its gradients were not averaged: "
            f"{', '.join(map(self._describe, missing[:5]))}{', ...' if len(missing) > 5 else ''}. "
            "Every output of forward must take part in the loss, and every parameter in forward"
        )

    def _ready_twice(self, index: int) -> str:
        return (
            f"rank {dist.get_rank(self._group)}: {self._describe(index)} got a second gradient since the "
            "last forward pass. Run one backward pass per forward pass, or accumulate under no_sync()"
        )

    def _describe(self, index: int) -> str:
        return f"{self._names[index]} (parameter {index}, shape {tuple(self._parameters[index].shape)})"


def _gradient_accumulated(reducer: "weakref.ref[Reducer]", index: int, _parameter: nn.Parameter) -> None:
    """What autograd calls; a weak reference, so that a hook does not keep a dropped reducer alive."""
    if (alive := reducer()) is not None:
        alive._mark_ready(index)
