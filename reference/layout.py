"""The buckets in force: made from parameter indices, and made again, once, in the order of readiness."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .bucket import Bucket, SparseBucket, ViewBucket
from .bucketing import assign_buckets, check_partition, should_rebuild
from .parameters import bucket_key, size_bytes


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a reducer does beyond the plain case; see the arguments of `DistributedDataParallel`."""

    find_unused_parameters: bool = False
    skip_all_reduce_unused_params: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = False

    @property
    def graph_may_change(self) -> bool:
        """Whether each iteration finds its own unused parameters; then ready order says nothing of the next."""
        return self.find_unused_parameters and not self.static_graph


class Layout:
    """All buckets of a reducer, in launch order.

    Args:
        parameters: Trainable parameters in index order.
        buckets: Parameter indices by bucket, in launch order.
        rebuild_caps_bytes: Caps for the rebuild in ready order. None: `buckets` stays.
        sparse: Parameter indices whose gradients are sparse tensors.
        features: See `Features`.

    Attributes:
        buckets: The buckets, in launch order.
        places: Bucket index and slot of each parameter, by parameter index.
        rebuilt: Whether the buckets have been rebuilt.
        features: As given.
        initial_sizes_bytes: Sizes of the buckets at construction.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[int]],
        *,
        rebuild_caps_bytes: Sequence[int] | None,
        sparse: frozenset[int],
        features: Features,
    ) -> None:
        self._parameters = parameters
        self._rebuild_caps = rebuild_caps_bytes
        self._sparse = sparse
        self.features = features
        self.rebuilt = False
        self._adopt(buckets)
        self.initial_sizes_bytes = [bucket.size_bytes for bucket in self.buckets]

    @property
    def indices(self) -> tuple[tuple[int, ...], ...]:
        """Parameter indices by bucket, in launch order."""
        return tuple(bucket.indices for bucket in self.buckets)

    def _adopt(self, buckets: Sequence[Sequence[int]]) -> None:
        check_partition(buckets, len(self._parameters))
        self.buckets = [self._make_bucket(indices) for indices in buckets]
        places = {
            index: (number, slot)
            for number, bucket in enumerate(self.buckets)
            for slot, index in enumerate(bucket.indices)
        }
        self.places = [places[index] for index in range(len(places))]

    def _make_bucket(self, indices: Sequence[int]) -> Bucket:
        kind: type[Bucket] = ViewBucket if self.features.gradient_as_bucket_view else Bucket
        if self._sparse.intersection(indices):
            kind = SparseBucket
        return kind(indices, [self._parameters[i] for i in indices], batched=self.features.batched_grad_copy)

    def rebuild_if_due(self, ready_order: Sequence[int], group: dist.ProcessGroup) -> bool:
        """Rebuild in ready order, if that is known and it is the first time; returns whether it did.

        Args:
            ready_order: Parameter indices as their gradients became ready; empty: not known yet.
            group: Ranks that must rebuild alike. Rank 0's order counts, as ready orders may differ.
        """
        if not should_rebuild(
            rebuilt=self.rebuilt,
            fixed=self._rebuild_caps is None or self.features.graph_may_change,
            has_ready_order=bool(ready_order),
        ):
            return False
        assert self._rebuild_caps is not None
        never_ready = sorted(set(range(len(self._parameters))) - set(ready_order))  # what a static graph leaves out
        order = torch.tensor([*ready_order, *never_ready], device=self._parameters[0].device)
        dist.broadcast(order, group_src=0, group=group)
        self.buckets = []  # frees the old buffers before the new ones are made
        self._adopt(
            assign_buckets(
                [size_bytes(parameter) for parameter in self._parameters],
                self._rebuild_caps,
                keys=[bucket_key(parameter) for parameter in self._parameters],
                sparse=[index in self._sparse for index in range(len(self._parameters))],
                order=order.tolist(),
            )
        )
        self.rebuilt = True
        return True
