"""The reducer: averages gradients over the ranks, bucket by bucket, while the backward pass still runs.

An iteration, told once:

1. Forward: `prepare_for_forward` rebuilds the buckets if that is due; `prepare_for_backward` expects gradients.
2. Backward: each gradient that autograd accumulates is put into its bucket. When bucket 0 has all of its
   gradients its all-reduce is launched, then bucket 1's, and so on: strictly in bucket order, so that all ranks
   issue the same collectives in the same order whatever order their gradients come in.
3. When the last bucket is launched, the reducer asks autograd to call it back at the end of the backward pass;
   there it waits for the buckets in order and copies the averages back into the gradients.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bucket import Bucket, SparseBucket, ViewBucket
from .bucketing import assign_buckets, check_partition, should_rebuild
from .diagnosis import Diagnosis
from .hooks.grad_bucket import GradBucket, Hook, result_of
from .observer import Future, Observer
from .order import LaunchOrder
from .parameters import accumulators, bucket_key, size_bytes
from .torch_names import ReducerNames
from .usage import EveryParameter, FoundInGraph, StaticGraph, UsedMap, reachable

_engine: Any = torch.autograd.Variable._execution_engine


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


class Reducer(ReducerNames):
    """Averages the gradients of `parameters` over `group` during every backward pass it was prepared for.

    Args:
        parameters: Trainable parameters by name; their order gives them their parameter index.
        buckets: Parameter indices by bucket, in launch order.
        rebuild_caps_bytes: Caps for the rebuild in ready order. None: `buckets` stays.
        group: Ranks to average over; each must construct its reducer with the same arguments.
        sparse: Parameter indices whose gradients are sparse tensors.
        features: See `Features`.
        wants_averages: Whether gradients that arrive now should be averaged, as far as the user's script tells.

    Attributes:
        buckets: The buckets in force, in launch order.
        iterations: Forward passes so far whose gradients are averaged.
        ready_order: Parameter indices as their gradients became ready in the current or last such iteration.
        rebuilt: Whether the buckets have been rebuilt.
        reduced_buckets: Buckets that were sent in the last such iteration.
        optimizers_in_backward: Whether the comm hook steps optimisers, and sets the gradients it has used to None.
        observers: Who watches; append at any time between iterations.
        usage: Which parameters take part in a backward pass.
        after_backward: Futures that the coming backward pass waits for at its end.
        order: Told of every launch, and asked when one fails.
        initial_sizes_bytes: Sizes of the buckets at construction.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        buckets: Sequence[Sequence[int]],
        *,
        rebuild_caps_bytes: Sequence[int] | None,
        group: dist.ProcessGroup,
        sparse: frozenset[int] = frozenset(),
        features: Features = Features(),  # noqa: B008 - frozen
        wants_averages: Callable[[], bool] = lambda: True,
    ) -> None:
        self.observers: list[Observer] = []
        self.after_backward: list[Future] = []
        self.order = LaunchOrder()
        self.features = features
        self.iterations = 0
        self.ready_order: list[int] = []
        self.rebuilt = False
        self.reduced_buckets = 0
        self.optimizers_in_backward = False
        self._parameters = list(parameters.values())
        self._group = group
        self._rebuild_caps = rebuild_caps_bytes
        self._sparse = sparse
        self._wants_averages = wants_averages
        self._diagnosis = Diagnosis(parameters, dist.get_rank(group))
        self._lock = threading.RLock()  # modules on several devices get their gradients in several threads
        self._expecting = False  # gradients that arrive are averaged
        self._forward_wanted: bool | None = None  # what the user's script said in forward; None: compared already
        self._reached: frozenset[int] | None = None
        self._warned_of_graph = False
        self._count_ranks: Callable[[], int] | None = None
        self._comm_hook: tuple[Hook, Any] | None = None
        self._adopt(buckets)
        self.initial_sizes_bytes = [bucket.size_bytes for bucket in self.buckets]
        self._accumulators = accumulators(self._parameters)
        self._reset_usage()
        handles = [
            node.register_hook(partial(_gradient_arrived, weakref.ref(self), index))
            for index, node in enumerate(self._accumulators)
        ]
        self.detach = weakref.finalize(self, lambda: [handle.remove() for handle in handles])
        """Stop listening to autograd, for good; happens by itself when the reducer is garbage."""

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """Parameter indices by bucket, in launch order, as they are in force."""
        return tuple(bucket.indices for bucket in self.buckets)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Parameters that got no gradient in the last synchronised backward pass."""
        return [self._parameters[index] for index in sorted(self.usage.unused)]

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have a hook communicate; see `DistributedDataParallel.register_comm_hook`."""
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if self.iterations > 0:
            raise RuntimeError("a comm hook should be registered before the training loop starts")
        self._comm_hook = hook, state

    def set_static_graph(self) -> None:
        """Take the graph as static from the first iteration on."""
        if self.iterations > 0:
            self._fail("static_graph should be called before training loop starts, and after the module is wrapped")
        self.features = replace(self.features, static_graph=True)
        self._reset_usage()

    # Construction and rebuild

    def _reset_usage(self) -> None:
        self.usage = EveryParameter()
        used = UsedMap(len(self._parameters), self._parameters[0].device, self._group)
        if self.features.static_graph:
            self.usage = StaticGraph(used)
        elif self.features.find_unused_parameters:
            self.usage = FoundInGraph(self._accumulators, used)

    def _adopt(self, buckets: Sequence[Sequence[int]]) -> None:
        check_partition(buckets, len(self._parameters))
        self.buckets = [self._make_bucket(indices) for indices in buckets]
        self._places = {
            index: (number, slot)
            for number, bucket in enumerate(self.buckets)
            for slot, index in enumerate(bucket.indices)
        }
        self._next_bucket = len(self.buckets)
        self._futures: list[Future | None] = []
        self._check_strides = True

    def _make_bucket(self, indices: Sequence[int]) -> Bucket:
        kind: type[Bucket] = ViewBucket if self.features.gradient_as_bucket_view else Bucket
        if self._sparse.intersection(indices):
            kind = SparseBucket
        return kind(indices, [self._parameters[i] for i in indices], batched=self.features.batched_grad_copy)

    def _rebuild(self) -> None:
        assert self._rebuild_caps is not None
        self.buckets = []  # frees the old buffers before the new ones are made
        self._adopt(
            assign_buckets(
                [size_bytes(parameter) for parameter in self._parameters],
                self._rebuild_caps,
                keys=[bucket_key(parameter) for parameter in self._parameters],
                sparse=[index in self._sparse for index in range(len(self._parameters))],
                order=self._agree_on_ready_order(),
            )
        )
        self.rebuilt = True
        for observer in self.observers:
            observer.rebuilt()

    def _agree_on_ready_order(self) -> list[int]:
        """Rank 0's ready order: every rank must assign alike, and ready orders may differ between ranks.

        What a static graph never uses comes last.
        """
        never = sorted(set(range(len(self._parameters))) - set(self.ready_order))
        order = torch.tensor(self.ready_order + never, device=self._parameters[0].device)
        dist.broadcast(order, group_src=0, group=self._group)
        return [int(index) for index in order.tolist()]

    # Forward pass

    def prepare_for_forward(self, *, averaging: bool) -> None:
        """A forward pass begins; `averaging` tells whether its gradients will be averaged.

        Raises:
            RuntimeError: The last backward pass left gradients out, so its averages never arrived.
        """
        self._check_finished()
        if averaging:
            self.iterations += 1
            for observer in self.observers:
                observer.forward_started()

    def rebuild_if_due(self) -> None:
        """Rebuild the buckets in ready order, once, as soon as that is known."""
        if should_rebuild(
            rebuilt=self.rebuilt,
            fixed=self._rebuild_caps is None or self.features.graph_may_change,
            has_ready_order=bool(self.ready_order) and not self._expecting,
        ):
            self._rebuild()

    def prepare_for_backward(self, outputs: Sequence[Tensor], count_ranks: Callable[[], int] | None = None) -> None:
        """Expect every gradient once in the coming backward pass, and average them.

        Args:
            outputs: Tensors that forward returned.
            count_ranks: How many ranks to divide by, asked when gradients arrive. None: the group's size.
        """
        for bucket in self.buckets:
            bucket.reset()
        self._next_bucket = 0
        self._futures = []
        self._expecting, self._began, self._end_queued = True, False, False
        self._forward_wanted = True
        self._count_ranks = count_ranks
        self.ready_order = []
        self.usage.forward_done(outputs)
        self._reached = self._search(outputs)

    def _search(self, outputs: Sequence[Tensor]) -> frozenset[int] | None:
        """Parameters behind the outputs, for error messages; only where it is worth the time.

        The first iteration is where a parameter shows that is never used.
        """
        if self.iterations > 1 and dist.get_debug_level() == dist.DebugLevel.OFF:
            return None
        return reachable(outputs, {node: index for index, node in enumerate(self._accumulators)})

    def expect_nothing(self) -> None:
        """Leave the gradients of the coming backward pass alone."""
        self._expecting = False
        self._forward_wanted = False

    def average_at_the_end(self) -> None:
        """At the start of a backward pass: have everything launched at its end, if it cannot be during the pass."""
        if self._expecting and not self.usage.launches_during_backward and not self._end_queued:
            self._end_queued = True
            _engine.queue_callback(self._launch_everything)

    # Backward pass

    def _arrived(self, index: int, *, defined: bool) -> None:
        with self._lock:
            if self._forward_wanted is not None:
                self._compare_wishes()
            self.usage.arrived(index, defined=defined, expected=self._expecting)
            if defined:
                for observer in self.observers:
                    observer.parameter_ready(index)
            if not self._expecting:
                return
            if not self._began:
                self._begin_backward()
            if self.usage.launches_during_backward:
                self._count_down(index)

    def _begin_backward(self) -> None:
        self._began = True
        # Multiplying beats dividing, and gives the same bits as torch, which does so too.
        ranks = dist.get_world_size(self._group) if self._count_ranks is None else self._count_ranks()
        self._scale = 1.0 if self._comm_hook else 1.0 / ranks
        for observer in self.observers:
            observer.backward_started()
        for index in sorted(self.usage.unused):
            self._mark_ready(index)

    def _count_down(self, index: int) -> None:
        to_come = self.usage.gradients_to_come(index)
        if to_come < 0:
            self._fail(self._diagnosis.graph_changed(index, self._places[index][0]))
        if to_come == 0:
            self.ready_order.append(index)
            self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        number, slot = self._places[index]
        bucket = self.buckets[number]
        if slot not in bucket.pending_slots:
            self._fail(self._diagnosis.ready_twice(index, number, unused=index in self.usage.unused))
        self._check_gradient(index, number, bucket.views[slot])
        bucket.put(slot, self._scale)
        if bucket.ready:
            for observer in self.observers:
                observer.bucket_ready(number)
            self._launch_in_order()

    def _launch_in_order(self) -> None:
        while self._next_bucket < len(self.buckets) and self.buckets[self._next_bucket].ready:
            self._launch(self._next_bucket)
            self._next_bucket += 1
        if self._next_bucket == len(self.buckets):
            self.usage.launched_all()
            _engine.queue_callback(self._finalize)

    def _launch(self, number: int) -> None:
        bucket = self.buckets[number]
        if self.features.skip_all_reduce_unused_params and self.usage.unused.issuperset(bucket.indices):
            self._futures.append(None)
            return
        for observer in self.observers:
            observer.bucket_launching(number)
        future = self.communicate(bucket, number)
        for observer in self.observers:
            observer.bucket_launched(number, future)
        self._futures.append(future)

    def communicate(self, bucket: Bucket, number: int) -> Future:
        """Send a bucket through the comm hook, or add it up over the ranks; returns at once."""
        self.order.launching(number, bucket.size_bytes)
        if self._comm_hook is not None:
            hook, state = self._comm_hook
            return hook(state, GradBucket(bucket, number, is_last=number == len(self.buckets) - 1))
        work = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)
        assert work is not None
        return work.get_future()

    def _launch_everything(self) -> None:
        with self._lock:
            if not self._began:
                self._begin_backward()
            for index in range(len(self._parameters)):
                self._mark_ready(index)

    @torch.no_grad()
    def _finalize(self) -> None:
        self._expecting = False
        for observer in self.observers:
            observer.backward_computed()
        untouched = self.usage.untouched()
        if self.optimizers_in_backward:
            untouched |= {index for index, parameter in enumerate(self._parameters) if parameter.grad is None}
        self.reduced_buckets = sum(future is not None for future in self._futures)
        first_launch = self.order.launches - self.reduced_buckets + 1
        for number, (bucket, future) in enumerate(zip(self.buckets, self._futures, strict=True)):
            if future is None:
                continue
            self._wait(future, first_launch + number)
            for observer in self.observers:
                observer.bucket_done(number)
            bucket.copy_out(result_of(future, bucket) if self._comm_hook else None, unused=untouched)
            for observer in self.observers:
                observer.bucket_copied_out(number)
        while self.after_backward:
            self.after_backward.pop(0).wait()
        self.usage.finished()
        self._check_strides = False

    # Join

    def shadow_backward(self) -> None:
        """For a rank without inputs: match the collectives of the others' backward pass, with zeros."""
        futures = [self.communicate(bucket.zeros(), number) for number, bucket in enumerate(self.buckets)]
        self.usage.launched_all()
        for future in futures:
            future.wait()
        self.usage.untouched()
        self.usage.finished()
        self.ready_order = list(range(len(self._parameters)))  # as ready for the rebuild as the others

    # Errors

    def _fail(self, message: str) -> NoReturn:
        for observer in self.observers:
            observer.failed(message)
        raise RuntimeError(message)

    def _wait(self, future: Future, launch: int) -> None:
        try:
            future.wait()
        except RuntimeError as error:
            if explanation := self.order.explain(launch):
                self._fail(f"{explanation}. {error}")
            raise

    def _check_finished(self) -> None:
        if not self._expecting or not self._began:
            return
        missing = [index for index, (number, slot) in sorted(self._places.items()) if self._is_pending(number, slot)]
        self._fail(
            self._diagnosis.unfinished(
                missing,
                reached=self._reached,
                buckets=range(self._next_bucket, len(self.buckets)),
                searched=self.features.find_unused_parameters,
                static=self.features.static_graph,
            )
        )

    def _is_pending(self, number: int, slot: int) -> bool:
        return slot in self.buckets[number].pending_slots

    def _check_gradient(self, index: int, number: int, view: Tensor) -> None:
        gradient = self._parameters[index].grad
        if gradient is None:
            return
        if gradient.dtype != view.dtype or gradient.device != view.device or gradient.is_sparse != view.is_sparse:
            self._fail(self._diagnosis.mismatch(index, number, gradient, view))
        if self._check_strides and not view.is_sparse and _dense_strides(gradient) != _dense_strides(view):
            warnings.warn(self._diagnosis.strides(index, gradient, view), stacklevel=2)
            self._check_strides = False
        if gradient.requires_grad and not self._warned_of_graph:
            warnings.warn(self._diagnosis.graph_not_averaged(index), stacklevel=2)
            self._warned_of_graph = True

    def _compare_wishes(self) -> None:
        wanted, self._forward_wanted = self._forward_wanted, None
        if wanted != self._wants_averages():
            warnings.warn(self._diagnosis.changed_mind(averaged=bool(wanted)), stacklevel=2)


def _dense_strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the others mean nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _gradient_arrived(reducer: "weakref.ref[Reducer]", index: int, _outputs: Any, gradients: Any) -> None:
    """What autograd calls; a weak reference, so that a hook does not keep a dropped reducer alive."""
    if (alive := reducer()) is not None:
        alive._arrived(index, defined=gradients[0] is not None)
