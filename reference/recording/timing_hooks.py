"""Instrumentation: hooks that read a clock during training, and the conversion of their readings to a trace.

1. `Timestamps` collects the readings of one rank, iteration by iteration, and converts them to nanoseconds.
2. The functions `watch_*` attach hooks that take the readings. An `ExitStack` of the caller removes the hooks.
3. `rank_trace` converts the nanoseconds to the `RankTrace` that is written to a file.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..autograd_hooks import call_at_backward, tensors_in
from ..data_parallel import DistributedDataParallel
from ..parameters import trainable_parameters
from ..trace import BucketLayout, BucketTimes, Iteration, RankTrace
from .device_clock import Clock, HostClock, Reading, nanoseconds
from .reducer_observer import Future, Observer, RecordingHook

TorchDDP = nn.parallel.DistributedDataParallel
_engine: Any = torch.autograd.Variable._execution_engine
Launched = Callable[[int], Callable[[Future], None] | None]
"""Called with the number of elements of an all-reduce; returns what to call with its future, or None."""
R = TypeVar("R")
"""`Reading` while the training runs; int, in nanoseconds, once the readings are converted."""


# 1. Readings


@dataclass(slots=True)
class BucketTimestamps(Generic[R]):
    """Readings of one bucket in one iteration."""

    ready: R | None  #: when its last gradient was ready; None: not observed, and that of its last gradient counts
    launched: R  #: when its all-reduce was issued
    done: R | None = None  #: when the completion callback of the all-reduce ran
    waited: R | None = None  #: when the reducer returned from waiting for the all-reduce
    copied_out: R | None = None  #: when the averages had been copied into the gradients


@dataclass(slots=True)
class IterationTimestamps(Generic[R]):
    """Readings of one iteration; None: not yet taken."""

    forward_start: R
    ready: list[R | None]  #: by parameter index, when the gradient was accumulated
    in_backward: bool = False  #: whether a backward pass is running
    synchronized: bool = False  #: whether gradients are averaged
    layout: BucketLayout | None = None  #: bucket layout of a synchronised iteration
    forward_end: R | None = None
    backward_start: R | None = None
    backward_end: R | None = None
    optimizer_start: R | None = None
    optimizer_end: R | None = None
    end: R | None = None
    """When the next iteration began. None: there is none, and this one ends with its last optimiser step or backward
    pass."""
    buckets: list[BucketTimestamps[R]] = field(default_factory=list)  #: in launch order


class Timestamps:
    """Readings of one rank.

    An iteration begins with the first forward pass after a backward pass and ends when the next iteration begins.
    `now` takes a reading, `zero` is when the recording began, and `iterations` has the complete ones.
    """

    def __init__(self, parameter_count: int, clock: Clock | None = None) -> None:
        self._parameter_count = parameter_count
        self._clock = clock or HostClock()
        self.now: Callable[[], Reading] = self._clock.now
        self.when_done = self._clock.when_done
        self.zero = self.now()
        self.iterations: list[IterationTimestamps[Reading]] = []
        self.current = self._blank(self.zero)

    def _blank(self, now: Reading) -> IterationTimestamps[Reading]:
        return IterationTimestamps(now, [None] * self._parameter_count)

    def forward_started(self) -> None:
        """A forward pass begins."""
        now = self.now()
        if self.current.backward_end is not None:
            self.finish_iteration(now)
        if self.current.forward_end is None or self.current.in_backward:  # the latter: autograd raised an error
            self.current = self._blank(now)
        self._clock.settle()

    def forward_ended(self, *, synchronized: bool, layout: BucketLayout | None) -> None:
        """A forward pass has ended; `synchronized`: its gradients will be averaged, in the buckets of `layout`."""
        self.current.forward_end = self.now()
        self.current.synchronized = synchronized
        self.current.layout = layout if synchronized else None

    def backward_started(self) -> None:
        """A backward pass begins; several in one iteration count as one, from the first start to the last end."""
        self.current.in_backward = True
        if self.current.backward_start is None:
            self.current.backward_start = self.now()

    def backward_ended(self) -> None:
        """A backward pass has ended."""
        self.current.in_backward = False
        self.current.backward_end = self.now()

    def finish_iteration(self, now: Reading | None = None) -> None:
        """Keep the current iteration if it is complete; `now` is when the next one begins, None: there is none."""
        if self.current.forward_end is not None and self.current.backward_end is not None:
            self.current.end = now
            self.iterations.append(self.current)
        self.current = self._blank(self.now() if now is None else now)

    def in_ns(self, offset_ns: int, uncertainty_ns: int) -> "NsTimestamps":
        """All complete iterations in nanoseconds; waits until a device has reached the last reading.

        `offset_ns` is that of the host's clock, to rank 0's, with its uncertainty.
        """
        self._clock.settle(wait=True)
        zero, uncertainty_ns = _since(0, self.zero), uncertainty_ns + self._clock.uncertainty_ns
        return NsTimestamps(zero, offset_ns, uncertainty_ns, _since(zero, self.iterations), self._clock.on_device)


class NsTimestamps(NamedTuple):
    """Readings of one rank in nanoseconds: when the recording began, and the complete iterations since then.

    Add the offset to get rank 0's clock. `on_device` is whether the readings are moments of a device.
    """

    zero: int
    offset_ns: int
    uncertainty_ns: int
    iterations: list[IterationTimestamps[int]]
    on_device: bool


def _since(zero: int, value: Any) -> Any:
    """Copy readings, and what contains them, with nanoseconds since `zero` in place of the readings."""
    if isinstance(value, list):
        return [_since(zero, reading) for reading in value]
    if isinstance(value, BucketTimestamps | IterationTimestamps):
        return replace(value, **{field.name: _since(zero, getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, bool) or not isinstance(value, Reading):
        return value
    ns = nanoseconds(value)
    assert ns is not None  # the clock has settled it
    return ns - zero


# 2. Hooks


def watch_passes(hooks: ExitStack, module: nn.Module, timestamps: Timestamps) -> None:
    """Take the times at which forward passes start and end and backward passes start."""
    read_layout = _layout_reader(module)
    in_backward = partial(_in_backward, timestamps)

    def before_forward(_module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            timestamps.forward_started()

    def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            synchronized = bool(getattr(module, "require_backward_grad_sync", False))
            timestamps.forward_ended(synchronized=synchronized, layout=read_layout())
            for handle in call_at_backward(tensors_in(output), in_backward):
                hooks.callback(handle.remove)

    hooks.callback(module.register_forward_pre_hook(RecordingHook(before_forward), prepend=True).remove)
    hooks.callback(module.register_forward_hook(RecordingHook(after_forward)).remove)


def _in_backward(timestamps: Timestamps) -> None:
    """Called from autograd hooks; the first call in a backward pass records its start and queues a final callback."""
    if not timestamps.current.in_backward:
        timestamps.backward_started()
        # A callback queued from a callback runs after all callbacks that reducers have queued in the meantime.
        _engine.queue_callback(lambda: _engine.queue_callback(timestamps.backward_ended))


def _layout_reader(module: nn.Module) -> Callable[[], BucketLayout | None]:
    """A function that reads the bucket layout; torch's layouts once before and once after the rebuild."""
    if isinstance(module, DistributedDataParallel):
        return lambda: module.reducer.buckets.assignment
    if not isinstance(module, TorchDDP):
        return lambda: None
    index = {id(parameter): number for number, parameter in enumerate(trainable_parameters(module.module).values())}

    @cache
    def read(_rebuilt: bool) -> BucketLayout:  # noqa: FBT001 - the key
        buckets = module.reducer._get_zeros_like_grad_buckets()
        return tuple(tuple(index[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets)

    return lambda: read(module._has_rebuilt_buckets)


def watch_optimizers(hooks: ExitStack, parameters: Sequence[nn.Parameter], timestamps: Timestamps) -> None:
    """Take the times of the steps of every optimiser that updates one of `parameters`."""
    watched = set(map(id, parameters))
    updates: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def updates_watched(optimizer: Optimizer) -> bool:
        if optimizer not in updates:
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            updates[optimizer] = any(id(parameter) in watched for parameter in held)
        return updates[optimizer]

    def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if updates_watched(optimizer) and timestamps.current.optimizer_start is None:
            timestamps.current.optimizer_start = timestamps.now()

    def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if updates_watched(optimizer):
            timestamps.current.optimizer_end = timestamps.now()

    hooks.callback(register_optimizer_step_pre_hook(before_step).remove)
    hooks.callback(register_optimizer_step_post_hook(after_step).remove)


def watch_gradients(hooks: ExitStack, parameters: Sequence[nn.Parameter], timestamps: Timestamps) -> None:
    """Take the time at which each gradient has been accumulated, without our reducer."""

    def ready(index: int, _parameter: Tensor) -> None:
        _in_backward(timestamps)
        timestamps.current.ready[index] = timestamps.now()

    for index, parameter in enumerate(parameters):
        hooks.callback(parameter.register_post_accumulate_grad_hook(partial(ready, index)).remove)


def watch_our_buckets(hooks: ExitStack, ddp: DistributedDataParallel, timestamps: Timestamps) -> None:
    """Take the times of gradients and buckets from our reducer."""
    observer = _BucketObserver(timestamps)
    ddp.reducer.observers.append(observer)
    hooks.callback(ddp.reducer.observers.remove, observer)


class _BucketObserver(Observer):
    watches_parameters = True

    def __init__(self, timestamps: Timestamps) -> None:
        self._timestamps = timestamps
        self._now = timestamps.now
        self._ready: dict[int, Reading] = {}
        self._sent: dict[int, BucketTimestamps[Reading]] = {}  # by bucket index; buckets may be skipped

    def parameter_ready(self, index: int) -> None:
        _in_backward(self._timestamps)
        self._timestamps.current.ready[index] = self._now()

    def bucket_ready(self, bucket: int) -> None:
        self._ready[bucket] = self._now()

    def bucket_launching(self, bucket: int) -> None:
        self._sent[bucket] = BucketTimestamps(self._ready[bucket], self._now())
        self._timestamps.current.buckets.append(self._sent[bucket])

    def bucket_launched(self, bucket: int, future: Future) -> None:
        self._timestamps.when_done(future, partial(setattr, self._sent[bucket], "done"))

    def bucket_done(self, bucket: int) -> None:
        self._sent[bucket].waited = self._now()

    def bucket_copied_out(self, bucket: int) -> None:
        self._sent[bucket].copied_out = self._now()


def watch_torch_buckets(hooks: ExitStack, parameters: Sequence[nn.Parameter], timestamps: Timestamps) -> None:
    """Take the times of the all-reduces that torch's reducer launches.

    Torch's reducer is written in C++ and calls no Python, but every collective passes through torch's dispatcher,
    where a kernel can read the clock. A comm hook would change the arithmetic and could not be removed.
    """
    sizes = [parameter.numel() for parameter in parameters]

    def launched(numel: int) -> Callable[[Future], None] | None:
        iteration = timestamps.current
        number = len(iteration.buckets)
        if iteration.backward_start is None or iteration.layout is None or number == len(iteration.layout):
            return None
        if numel != sum(sizes[index] for index in iteration.layout[number]):
            return None
        bucket = BucketTimestamps(None, timestamps.now())
        iteration.buckets.append(bucket)
        return lambda future: timestamps.when_done(future, partial(setattr, bucket, "done"))

    hooks.enter_context(_all_reduces.watched_by(launched))


class _AllReduceKernel:
    """A kernel for c10d::allreduce_ that reads the clock and then calls the kernel of the tensors' device.

    There is one for all recordings of the process. If each recording registered its own, torch would warn that one
    overrides the other, and only the last one registered would be called.
    """

    def __init__(self) -> None:
        self._watchers: list[Launched] = []
        self._library: Any = None

    @contextmanager
    def watched_by(self, launched: Launched) -> Iterator[None]:
        """Call `launched` for every all-reduce."""
        if not self._watchers:
            self._library = torch.library.Library("c10d", "IMPL")
            self._library.impl("allreduce_", self._all_reduce, "ADInplaceOrView", with_keyset=True)
        self._watchers.append(launched)
        try:
            yield
        finally:
            self._watchers.remove(launched)
            if not self._watchers:
                self._library._destroy()

    def _all_reduce(self, keys: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        launched = [watcher(tensors[0].numel()) for watcher in self._watchers]
        all_reduce = torch.ops.c10d.allreduce_.default
        result = all_reduce.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, tensors, *args, **kwargs)
        for watch in filter(None, launched):
            watch(dist.Work.unbox(result[1]).get_future())
        return result


_all_reduces = _AllReduceKernel()


# 3. Conversion


def rank_trace(rank: int, timestamps: NsTimestamps, *, zero: int, layouts: dict[BucketLayout, int]) -> RankTrace:
    """Convert the readings of one rank.

    `zero` is when rank 0's recording began, on its own clock. New bucket layouts are added to `layouts`, which maps
    each to its index. Raises RuntimeError if there is no complete iteration.
    """
    if not timestamps.iterations:
        raise RuntimeError(
            "nothing was recorded: expected at least one forward pass of the recorded module and its backward "
            "pass inside the `with record(...)` block, with gradients enabled"
        )
    return RankTrace(
        rank=rank,
        clock_offset_ns=timestamps.offset_ns + timestamps.zero - zero,  # a rank's times count from its own zero
        clock_uncertainty_ns=timestamps.uncertainty_ns,
        iterations=tuple(_iteration(one, layouts, on_device=timestamps.on_device) for one in timestamps.iterations),
    )


def _iteration(times: IterationTimestamps[int], layouts: dict[BucketLayout, int], *, on_device: bool) -> Iteration:
    start, end = times.backward_start, times.backward_end
    assert start is not None
    assert end is not None
    assert times.forward_end is not None
    # Hooks of outputs run in graph order, so a gradient may be ready shortly before the hook records the start.
    start = min([start, *(ready for ready in times.ready if ready is not None)])
    # A comm hook may launch any collectives. Without exactly one all-reduce per bucket, bucket times are unknown.
    layout = times.layout if times.layout is not None and len(times.layout) == len(times.buckets) else None
    optimizer_start, optimizer_end = times.optimizer_start, times.optimizer_end
    last = max(optimizer_end or end, end) if times.end is None else times.end
    if optimizer_end is not None and optimizer_end > end:
        begun = optimizer_start is not None and optimizer_start < optimizer_end
        # A step whose closure runs forward and backward began before this iteration; it updates after the closure.
        optimizer_start = max(optimizer_start, end) if begun and optimizer_start is not None else end
    else:  # steps within the backward pass, or between two, are part of it
        optimizer_start = optimizer_end = None
    buckets: list[BucketTimes] = []
    if layout is not None:
        ready = [[times.ready[index] for index in indices] for indices in layout]
        buckets = [_bucket(*bucket, end) for bucket in zip(times.buckets, ready, strict=True)]
    if on_device and buckets:
        buckets, end = _copies_after_backward(buckets, times.ready, end)
    return Iteration(
        forward_start_ns=times.forward_start,
        forward_end_ns=min(times.forward_end, start),
        backward_start_ns=start,
        backward_end_ns=end,
        optimizer_start_ns=optimizer_start,
        optimizer_end_ns=optimizer_end,
        end_ns=last,
        synchronized=times.synchronized,
        layout=None if layout is None else layouts.setdefault(layout, len(layouts)),
        ready_ns=tuple(times.ready),
        buckets=tuple(buckets),
    )


def _copies_after_backward(
    buckets: list[BucketTimes], ready: Sequence[int | None], backward_end: int
) -> tuple[list[BucketTimes], int]:
    """On a device the backward pass ends with its last all-reduce or gradient, as in files of torch's profiler.

    The host launches the copies out of the buckets after the last bucket, so they belong to the time after the pass.
    torch's reducer reports none of them; the last one is over where the recorded pass ends.
    """
    if buckets[-1].copied_out_ns is None:
        buckets = [*buckets[:-1], buckets[-1].model_copy(update={"copied_out_ns": backward_end})]
    computed = [moment for moment in ready if moment is not None]
    return buckets, max([*computed, *(bucket.done_ns for bucket in buckets)])


def _bucket(times: BucketTimestamps[int], ready: Sequence[int | None], backward_end: int) -> BucketTimes:
    # The completion callback needs the interpreter lock, and may get it later than the waiting thread.
    seen = [moment for moment in (times.done, times.waited, backward_end) if moment is not None]
    last = times.ready
    if last is None:  # a further backward pass may have produced some of these gradients again
        last = min(max((moment for moment in ready if moment is not None), default=backward_end), times.launched)
    return BucketTimes(ready_ns=last, launched_ns=times.launched, done_ns=min(seen), copied_out_ns=times.copied_out)
