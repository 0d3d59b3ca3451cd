"""Probes: context managers that attach hooks to a training run, note times in `Marks`, and detach again."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .data_parallel import DistributedDataParallel
from .marks import BucketMarks, IterationMarks, Marks, now_ns
from .observer import Future, Observer
from .trace import Layout

TorchDDP = nn.parallel.DistributedDataParallel
_engine: Any = torch.autograd.Variable._execution_engine


@contextmanager
def watch_passes(module: nn.Module, marks: Marks) -> Iterator[None]:
    """Note where forward and backward passes begin and end."""
    layout_of = _LayoutReader(module)

    def before_forward(_module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            marks.forward_started()

    def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            synchronized = bool(getattr(module, "require_backward_grad_sync", False))
            marks.forward_ended(synchronized=synchronized, layout=layout_of())
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _gradient: _in_backward(marks))

    handles = [
        module.register_forward_pre_hook(before_forward, prepend=True),
        module.register_forward_hook(after_forward),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_backward(marks: Marks) -> None:
    """Autograd is at work: note the start of its run, and have it tell its end."""
    if not marks.current.in_backward:
        marks.backward_started()
        # A callback that is queued from a callback runs after all those that reducers queued meanwhile.
        _engine.queue_callback(lambda: _engine.queue_callback(marks.backward_ended))


@contextmanager
def watch_gradients(parameters: Sequence[nn.Parameter], marks: Marks) -> Iterator[None]:
    """Note when each gradient has been accumulated; for modules that our reducer does not serve."""

    def ready(index: int, _parameter: Tensor) -> None:
        _in_backward(marks)
        marks.current.ready[index] = now_ns()

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
def watch_optimizers(parameters: Sequence[nn.Parameter], marks: Marks) -> Iterator[None]:
    """Note the steps of every optimiser that updates one of `parameters`."""
    ours = set(map(id, parameters))
    concerned: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def concerns(optimizer: Optimizer) -> bool:
        if optimizer not in concerned:
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            concerned[optimizer] = any(id(parameter) in ours for parameter in held)
        return concerned[optimizer]

    def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if concerns(optimizer) and marks.current.optimizer_start is None:
            marks.current.optimizer_start = now_ns()

    def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if concerns(optimizer):
            marks.current.optimizer_end = now_ns()

    handles = [register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_our_buckets(ddp: DistributedDataParallel, marks: Marks) -> Iterator[None]:
    """Note what our reducer does, gradients included."""
    observer = _BucketObserver(marks)
    ddp.reducer.observers.append(observer)
    try:
        yield
    finally:
        ddp.reducer.observers.remove(observer)


class _BucketObserver(Observer):
    watches_parameters = True

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._ready: dict[int, int] = {}

    def parameter_ready(self, index: int) -> None:
        _in_backward(self._marks)
        self._marks.current.ready[index] = now_ns()

    def bucket_ready(self, bucket: int) -> None:
        self._ready[bucket] = now_ns()

    def bucket_launching(self, bucket: int) -> None:
        self._marks.current.buckets.append(BucketMarks(self._ready[bucket], now_ns()))

    def bucket_launched(self, bucket: int, future: Future) -> None:
        times = self._marks.current.buckets[bucket]
        future.add_done_callback(lambda _future: setattr(times, "done", now_ns()))

    def bucket_done(self, bucket: int) -> None:
        self._marks.current.buckets[bucket].waited = now_ns()

    def bucket_copied_out(self, bucket: int) -> None:
        self._marks.current.buckets[bucket].copied_out = now_ns()


@contextmanager
def watch_torch_buckets(parameters: Sequence[nn.Parameter], marks: Marks) -> Iterator[None]:
    """Note the all-reduces that torch's reducer launches.

    Its reducer is C++ and calls no Python. But every collective passes torch's dispatcher, where a kernel of
    ours can note the time and pass the call on: no comm hook is needed, which would change the arithmetic.
    """
    all_reduce = torch.ops.c10d.allreduce_.default
    sizes = [parameter.numel() for parameter in parameters]

    def kernel(keys: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        bucket = _launched_bucket(marks.current, tensors[0].numel(), sizes)
        result = all_reduce.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, tensors, *args, **kwargs)
        if bucket is not None:
            marks.current.buckets.append(bucket)
            work = dist.Work.unbox(result[1])
            work.get_future().add_done_callback(lambda _future: setattr(bucket, "done", now_ns()))
        return result

    library = torch.library.Library("c10d", "IMPL")
    try:
        library.impl("allreduce_", kernel, "ADInplaceOrView", with_keyset=True)
        yield
    finally:
        library._destroy()


def _launched_bucket(iteration: IterationMarks, numel: int, sizes: Sequence[int]) -> BucketMarks | None:
    """The bucket that an all-reduce of `numel` elements belongs to; None for any other collective."""
    number = len(iteration.buckets)
    if iteration.backward_start is None or iteration.layout is None or number == len(iteration.layout):
        return None
    indices = iteration.layout[number]
    if numel != sum(sizes[index] for index in indices):
        return None
    now = now_ns()
    return BucketMarks(max((iteration.ready[index] or now for index in indices), default=now), now)


class _LayoutReader:
    """Tells a data-parallel module's bucket layout; of torch's class it is read again only after a rebuild."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._torch_layouts: dict[bool, Layout] = {}

    def __call__(self) -> Layout | None:
        if isinstance(self._module, DistributedDataParallel):
            return self._module.reducer.layout.indices
        if not isinstance(self._module, TorchDDP):
            return None
        rebuilt = self._module._has_rebuilt_buckets
        if rebuilt not in self._torch_layouts:
            self._torch_layouts[rebuilt] = self._read(self._module)
        return self._torch_layouts[rebuilt]

    @staticmethod
    def _read(ddp: TorchDDP) -> Layout:
        trainable = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        index = {id(parameter): number for number, parameter in enumerate(trainable)}
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        return tuple(tuple(index[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets)
