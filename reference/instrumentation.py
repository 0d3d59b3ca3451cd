"""Instrumentation: hooks that read the clock during training, and the trace records made of their readings."""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .data_parallel import DistributedDataParallel
from .observer import Future, Observer
from .trace import BucketLayout, BucketTimes, Iteration, RankTrace

now_ns = time.perf_counter_ns


@dataclass(slots=True)
class BucketTimestamps:
    """Readings of one bucket; `waited` is when the reducer came back from waiting for it."""

    ready: int
    launched: int
    done: int | None = None
    waited: int | None = None
    copied_out: int | None = None


@dataclass(slots=True)
class IterationTimestamps:
    """Readings of one iteration; None: has not happened. `in_backward`: autograd is at work."""

    forward_start: int
    ready: list[int | None]
    in_backward: bool = False
    synchronized: bool = False
    layout: BucketLayout | None = None
    forward_end: int | None = None
    backward_start: int | None = None
    backward_end: int | None = None
    optimizer_start: int | None = None
    optimizer_end: int | None = None
    end: int | None = None
    buckets: list[BucketTimestamps] = field(default_factory=list)


class Timestamps:
    """All iterations of one rank. Every method is called from a hook and only notes the time.

    An iteration begins with the first forward pass after a backward pass and ends where the next begins.
    """

    def __init__(self, parameter_count: int) -> None:
        self._parameter_count = parameter_count
        self.zero = now_ns()
        self.iterations: list[IterationTimestamps] = []
        self.current = self._blank(self.zero)

    def _blank(self, now: int) -> IterationTimestamps:
        return IterationTimestamps(now, [None] * self._parameter_count)

    def forward_started(self) -> None:
        """A forward pass begins."""
        now = now_ns()
        if self.current.backward_end is not None:
            self.finish_iteration(now)
        if self.current.forward_end is None or self.current.in_backward:  # the latter: autograd raised an error
            self.current = self._blank(now)

    def forward_ended(self, *, synchronized: bool, layout: BucketLayout | None) -> None:
        """A forward pass is over; whether its gradients will be averaged, and in which buckets."""
        self.current.forward_end = now_ns()
        self.current.synchronized = synchronized
        self.current.layout = layout if synchronized else None

    def backward_started(self) -> None:
        """Autograd begins; an iteration may have several backward passes, and lasts to the end of the last."""
        self.current.in_backward = True
        if self.current.backward_start is None:
            self.current.backward_start = now_ns()

    def backward_ended(self) -> None:
        """Autograd has run its last callback."""
        self.current.in_backward = False
        self.current.backward_end = now_ns()

    def finish_iteration(self, now: int | None = None) -> None:
        """Keep the current iteration if it is complete; `now` is where the next begins, None: there is none."""
        current = self.current
        if current.forward_end is not None and current.backward_end is not None:
            current.end = now or current.optimizer_end or current.backward_end
            self.iterations.append(current)
        self.current = self._blank(now_ns() if now is None else now)


def rank_trace(
    rank: int,
    offset_ns: int,
    uncertainty_ns: int,
    timestamps: Timestamps,
    *,
    zero: int,
    layouts: dict[BucketLayout, int],
) -> RankTrace:
    """The finished record of one rank.

    Args:
        rank: Its number.
        offset_ns: What takes its clock to rank 0's.
        uncertainty_ns: How far that may be off.
        timestamps: What it noted.
        zero: Rank 0's reading at the start of its recording.
        layouts: Numbers of the layouts seen so far; each new one is added.

    Raises:
        RuntimeError: No iteration was complete.
    """
    if not timestamps.iterations:
        raise RuntimeError(
            "nothing was recorded: expected at least one forward pass of the recorded module and its backward "
            "pass inside the `with record(...)` block, with gradients enabled"
        )
    iterations = tuple(_iteration(iteration, timestamps.zero, layouts) for iteration in timestamps.iterations)
    return RankTrace(
        rank=rank,
        clock_offset_ns=offset_ns + timestamps.zero - zero,  # a rank's times count from its own zero
        clock_uncertainty_ns=uncertainty_ns,
        iterations=iterations,
    )


def _iteration(timestamps: IterationTimestamps, zero: int, layouts: dict[BucketLayout, int]) -> Iteration:
    def since_zero(reading: int | None) -> int | None:
        return None if reading is None else reading - zero

    start, end = timestamps.backward_start, timestamps.backward_end
    assert start is not None
    assert end is not None
    assert timestamps.forward_end is not None
    assert timestamps.end is not None
    # Hooks of the output run in the order of the graph: a gradient may be ready a moment before ours fires.
    # A comm hook may send anything: without one all-reduce a bucket, nothing was seen of the buckets.
    layout = (
        timestamps.layout
        if timestamps.layout is not None and len(timestamps.layout) == len(timestamps.buckets)
        else None
    )
    start = min([start, *(ready for ready in timestamps.ready if ready is not None)])
    return Iteration(
        forward_start_ns=timestamps.forward_start - zero,
        forward_end_ns=min(timestamps.forward_end, start) - zero,
        backward_start_ns=start - zero,
        backward_end_ns=end - zero,
        optimizer_start_ns=since_zero(timestamps.optimizer_start),
        optimizer_end_ns=since_zero(timestamps.optimizer_end),
        end_ns=timestamps.end - zero,
        synchronized=timestamps.synchronized,
        layout=None if layout is None else layouts.setdefault(layout, len(layouts)),
        ready_ns=tuple(since_zero(ready) for ready in timestamps.ready),
        buckets=() if layout is None else tuple(_bucket(bucket, end, zero) for bucket in timestamps.buckets),
    )


def _bucket(timestamps: BucketTimestamps, backward_end: int, zero: int) -> BucketTimes:
    # The completion callback needs the interpreter and may get it after whoever waited had it first.
    seen = [moment for moment in (timestamps.done, timestamps.waited, backward_end) if moment is not None]
    return BucketTimes(
        ready_ns=timestamps.ready - zero,
        launched_ns=timestamps.launched - zero,
        done_ns=min(seen) - zero,
        copied_out_ns=None if timestamps.copied_out is None else timestamps.copied_out - zero,
    )


TorchDDP = nn.parallel.DistributedDataParallel
_engine: Any = torch.autograd.Variable._execution_engine


@contextmanager
def watch_passes(module: nn.Module, timestamps: Timestamps) -> Iterator[None]:
    """Note where forward and backward passes begin and end."""
    layout_of = _LayoutReader(module)

    def before_forward(_module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            timestamps.forward_started()

    def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            synchronized = bool(getattr(module, "require_backward_grad_sync", False))
            timestamps.forward_ended(synchronized=synchronized, layout=layout_of())
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _gradient: _in_backward(timestamps))

    handles = [
        module.register_forward_pre_hook(before_forward, prepend=True),
        module.register_forward_hook(after_forward),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_backward(timestamps: Timestamps) -> None:
    """Autograd is at work: note the start of its run, and have it tell its end."""
    if not timestamps.current.in_backward:
        timestamps.backward_started()
        # A callback that is queued from a callback runs after all those that reducers queued meanwhile.
        _engine.queue_callback(lambda: _engine.queue_callback(timestamps.backward_ended))


@contextmanager
def watch_gradients(parameters: Sequence[nn.Parameter], timestamps: Timestamps) -> Iterator[None]:
    """Note when each gradient has been accumulated; for modules that our reducer does not serve."""

    def ready(index: int, _parameter: Tensor) -> None:
        _in_backward(timestamps)
        timestamps.current.ready[index] = now_ns()

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(ready, index))
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_optimizers(parameters: Sequence[nn.Parameter], timestamps: Timestamps) -> Iterator[None]:
    """Note the steps of every optimiser that updates one of `parameters`."""
    ours = set(map(id, parameters))
    concerned: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def concerns(optimizer: Optimizer) -> bool:
        if optimizer not in concerned:
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            concerned[optimizer] = any(id(parameter) in ours for parameter in held)
        return concerned[optimizer]

    def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if concerns(optimizer) and timestamps.current.optimizer_start is None:
            timestamps.current.optimizer_start = now_ns()

    def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if concerns(optimizer):
            timestamps.current.optimizer_end = now_ns()

    handles = [register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_our_buckets(ddp: DistributedDataParallel, timestamps: Timestamps) -> Iterator[None]:
    """Note what our reducer does, gradients included."""
    observer = _BucketObserver(timestamps)
    ddp.reducer.observers.append(observer)
    try:
        yield
    finally:
        ddp.reducer.observers.remove(observer)


class _BucketObserver(Observer):
    watches_parameters = True

    def __init__(self, timestamps: Timestamps) -> None:
        self._timestamps = timestamps
        self._ready: dict[int, int] = {}

    def parameter_ready(self, index: int) -> None:
        _in_backward(self._timestamps)
        self._timestamps.current.ready[index] = now_ns()

    def bucket_ready(self, bucket: int) -> None:
        self._ready[bucket] = now_ns()

    def bucket_launching(self, bucket: int) -> None:
        self._timestamps.current.buckets.append(BucketTimestamps(self._ready[bucket], now_ns()))

    def bucket_launched(self, bucket: int, future: Future) -> None:
        times = self._timestamps.current.buckets[bucket]
        future.add_done_callback(lambda _future: setattr(times, "done", now_ns()))

    def bucket_done(self, bucket: int) -> None:
        self._timestamps.current.buckets[bucket].waited = now_ns()

    def bucket_copied_out(self, bucket: int) -> None:
        self._timestamps.current.buckets[bucket].copied_out = now_ns()


@contextmanager
def watch_torch_buckets(parameters: Sequence[nn.Parameter], timestamps: Timestamps) -> Iterator[None]:
    """Note the all-reduces that torch's reducer launches.

    Its reducer is C++ and calls no Python. But every collective passes torch's dispatcher, where a kernel of
    ours can note the time and pass the call on: no comm hook is needed, which would change the arithmetic.
    """
    all_reduce = torch.ops.c10d.allreduce_.default
    sizes = [parameter.numel() for parameter in parameters]

    def kernel(keys: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        bucket = _launched_bucket(timestamps.current, tensors[0].numel(), sizes)
        result = all_reduce.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, tensors, *args, **kwargs)
        if bucket is not None:
            timestamps.current.buckets.append(bucket)
            work = dist.Work.unbox(result[1])
            work.get_future().add_done_callback(lambda _future: setattr(bucket, "done", now_ns()))
        return result

    library = torch.library.Library("c10d", "IMPL")
    try:
        library.impl("allreduce_", kernel, "ADInplaceOrView", with_keyset=True)
        yield
    finally:
        library._destroy()


def _launched_bucket(iteration: IterationTimestamps, numel: int, sizes: Sequence[int]) -> BucketTimestamps | None:
    """The bucket that an all-reduce of `numel` elements belongs to; None for any other collective."""
    number = len(iteration.buckets)
    if iteration.backward_start is None or iteration.layout is None or number == len(iteration.layout):
        return None
    indices = iteration.layout[number]
    if numel != sum(sizes[index] for index in indices):
        return None
    now = now_ns()
    return BucketTimestamps(max((iteration.ready[index] or now for index in indices), default=now), now)


class _LayoutReader:
    """Tells a data-parallel module's bucket layout; of torch's class it is read again only after a rebuild."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._torch_layouts: dict[bool, BucketLayout] = {}

    def __call__(self) -> BucketLayout | None:
        if isinstance(self._module, DistributedDataParallel):
            return self._module.reducer.buckets.assignment
        if not isinstance(self._module, TorchDDP):
            return None
        rebuilt = self._module._has_rebuilt_buckets
        if rebuilt not in self._torch_layouts:
            self._torch_layouts[rebuilt] = self._read(self._module)
        return self._torch_layouts[rebuilt]

    @staticmethod
    def _read(ddp: TorchDDP) -> BucketLayout:
        trainable = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        index = {id(parameter): number for number, parameter in enumerate(trainable)}
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        return tuple(tuple(index[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets)
