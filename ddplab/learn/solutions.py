"""Solutions of `ddplab learn`: seventeen classes, each of which adds one idea of a real reducer to the class before.

The first two are those of `reference/minimal.py`. A solution passes its rung and all before, and fails the next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..reference.bucketing import assign_buckets, bucket_caps, rebuild_order
from ..reference.comm_hooks.interface import GradBucket
from ..reference.minimal import FlatDataParallel, InFlight, NaiveDataParallel

Parameters = list[nn.Parameter]
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the older name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Averaging(NaiveDataParallel):
    """1. Each gradient is averaged by an all-reduce of its own."""


class Flat(FlatDataParallel):
    """2. One all-reduce averages all gradients of a dtype."""


class Asynchronous(Flat):
    """3. All all-reduces are launched before the first one is waited for."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        dtypes = dict.fromkeys(parameter.dtype for parameter in self.trainable)
        self.buckets = [[one for one in self.trainable if one.dtype == dtype] for dtype in dtypes]

    def average_gradients(self) -> None:
        """Replace every gradient by its average over the ranks."""
        for in_flight in [self.launch(bucket) for bucket in self.buckets]:
            self.finish(*in_flight)


class Hooked(Asynchronous):
    """4. Hooks launch a bucket when its last gradient arrives; the script calls nothing after the backward pass."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.backward_pass = -1  # autograd's number of the pass
        self.missing: set[Tensor] = set()
        self.waiting: list[Parameters] = []
        self.in_flight: list[InFlight] = []
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: Tensor) -> None:
        """Count an arrived gradient; the first one of a pass begins it."""
        if (this_pass := torch._C._current_graph_task_id()) != self.backward_pass:
            self.backward_pass = this_pass
            self.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self.average_gradients)
        self.missing.discard(parameter)
        self.launch_complete()

    def begin(self) -> None:
        """Forget the pass before."""
        self.missing, self.waiting, self.in_flight = set(self.trainable), list(self.buckets), []

    def launch_complete(self) -> None:
        """Launch the buckets whose gradients have all arrived."""
        for bucket in [one for one in self.waiting if self.missing.isdisjoint(one)]:
            self.in_flight.append(self.launch(bucket))
            self.waiting = [one for one in self.waiting if one is not bucket]

    def average_gradients(self) -> None:
        """Launch the buckets that lack a gradient, and finish all; a second call does nothing."""
        self.in_flight += map(self.launch, self.waiting)
        for in_flight in self.in_flight:
            self.finish(*in_flight)
        self.waiting, self.in_flight = [], []


class Ordered(Hooked):
    """5. A complete bucket waits until all buckets before it have been launched; the last layers are in the first."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.buckets.reverse()

    def launch_complete(self) -> None:
        """Launch the buckets whose turn has come."""
        while self.waiting and self.missing.isdisjoint(self.waiting[0]):
            self.in_flight.append(self.launch(self.waiting.pop(0)))


class Bucketed(Ordered):
    """6. A bucket closes when its size reaches the cap; the first one has the last layers, which are ready first."""

    def __init__(self, module: nn.Module, *, bucket_cap_mb: float | None = 25.0, **options: Any) -> None:
        super().__init__(module, **options)
        self.caps = bucket_caps(bucket_cap_mb)
        self.assign(range(len(self.trainable))[::-1])

    def assign(self, order: Sequence[int]) -> None:
        """Put the parameters into buckets in this order of their indices."""
        sizes_bytes = [parameter.nbytes for parameter in self.trainable]
        dtypes = [parameter.dtype for parameter in self.trainable]
        assignment = assign_buckets(sizes_bytes, self.caps, keys=dtypes, order=order)
        self.buckets = [[self.trainable[index] for index in bucket] for bucket in assignment]


class SmallFirst(Bucketed):
    """7. Without a cap, the first bucket closes at 1 MiB and the others at 25 MiB."""

    def __init__(self, module: nn.Module, *, bucket_cap_mb: float | None = None, **options: Any) -> None:
        super().__init__(module, bucket_cap_mb=bucket_cap_mb, **options)


class Rebuilt(SmallFirst):
    """8. Before the second iteration, buckets are assigned again, in the ready order of rank 0."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.passes, self.is_rebuilt = 0, False
        self.ready: dict[Tensor, None] = {}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The output of the module."""
        if self.averages():
            self.prepare()
        return super().forward(*inputs, **kwargs)

    def averages(self) -> bool:
        """Whether the gradients of a forward pass at this moment will be averaged."""
        return torch.is_grad_enabled()

    def prepare(self) -> None:
        """Make all collectives of a forward pass."""
        if self.passes and not self.is_rebuilt:
            index_of: dict[Tensor, int] = {parameter: index for index, parameter in enumerate(self.trainable)}
            order = rebuild_order([index_of[one] for one in self.ready], len(self.trainable))
            from_rank_0 = torch.tensor(order, dtype=torch.int32)
            dist.broadcast(from_rank_0, group_src=0, group=self.process_group)
            self.assign(from_rank_0.tolist())
            self.is_rebuilt = True

    def begin(self) -> None:
        """Forget the pass before."""
        super().begin()
        self.passes += 1

    def gradient_ready(self, parameter: Tensor) -> None:
        """Note the ready order."""
        super().gradient_ready(parameter)
        if self.passes == 1:
            self.ready[parameter] = None


class Viewing(Rebuilt):
    """9. Gradients are views of their bucket, which saves a copy of all gradients."""

    def __init__(self, module: nn.Module, *, gradient_as_bucket_view: bool = False, **options: Any) -> None:
        super().__init__(module, **options)
        self.gradient_as_bucket_view = gradient_as_bucket_view

    def assign(self, order: Sequence[int]) -> None:
        """Put the parameters into buckets in this order of their indices."""
        super().assign(order)
        self.memory: dict[Tensor, Tensor] = {}  # flat tensors by their bucket's first parameter

    def launch(self, parameters: Parameters) -> InFlight:
        """Bring the gradients into one flat tensor and start its all-reduce."""
        flat = self.pack(parameters)
        return parameters, flat, self.send(flat, parameters)

    def pack(self, parameters: Parameters) -> Tensor:
        """Copy gradients into a flat tensor, unless they are views of it."""
        if not self.gradient_as_bucket_view:
            return torch.cat([self.gradient(parameter).flatten() for parameter in parameters])
        first, count = parameters[0], sum(parameter.numel() for parameter in parameters)
        flat = self.memory.setdefault(first, first.new_empty(0))
        if flat.numel() != count:
            flat = self.memory[first] = first.new_zeros(count)
        for parameter, part in zip(parameters, split(flat, parameters), strict=True):
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(parameter.grad)
            parameter.grad = part
        return flat

    def send(self, flat: Tensor, parameters: Parameters) -> Any:
        """Start the all-reduce of a bucket; the result has a method `wait`."""
        flat /= dist.get_world_size(self.process_group)
        return dist.all_reduce(flat, group=self.process_group, async_op=True)

    def finish(self, parameters: Parameters, flat: Tensor, work: Any) -> None:
        """Wait for an all-reduce; afterwards the gradients are the averages."""
        if self.gradient_as_bucket_view:
            work.wait()
        else:
            super().finish(parameters, flat, work)


def split(flat: Tensor, parameters: Parameters) -> list[Tensor]:
    """Return the parts of a flat tensor, each in the shape of its parameter."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for parameter, part in zip(parameters, parts, strict=True)]


class Accumulating(Viewing):
    """10. Under `no_sync`, gradients are added up and nothing is sent."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.synchronised = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average the gradients of backward passes inside; contexts may be nested."""
        before, self.synchronised = self.synchronised, False
        try:
            yield
        finally:
            self.synchronised = before

    def averages(self) -> bool:
        """Whether the gradients of a forward pass at this moment will be averaged."""
        return super().averages() and self.synchronised

    def gradient_ready(self, parameter: Tensor) -> None:
        """Count an arrived gradient, outside `no_sync`."""
        if self.synchronised:
            super().gradient_ready(parameter)


class Buffered(Accumulating):
    """11. Before each averaged forward pass, all ranks get rank 0's buffers."""

    def __init__(self, module: nn.Module, *, broadcast_buffers: bool = True, **options: Any) -> None:
        super().__init__(module, **options)
        self.broadcast_buffers = broadcast_buffers

    def prepare(self) -> None:
        """Make all collectives of a forward pass."""
        super().prepare()
        if self.broadcast_buffers:
            self.send_from(self.source(), self.module.buffers())

    def source(self) -> int:
        """The rank whose buffers count."""
        return 0

    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        """Overwrite tensors with those of one rank."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group_src=source, group=self.process_group)


class Searching(Buffered):
    """12. A parameter that no rank has used keeps its gradient; one that some ranks left out counts there as zero."""

    def __init__(self, module: nn.Module, *, find_unused_parameters: bool = False, **options: Any) -> None:
        super().__init__(module, **options)
        self.find_unused_parameters = find_unused_parameters
        self.expected: set[Tensor] = set(self.trainable)
        self.kept: dict[nn.Parameter, Tensor | None] = {}
        self.used: set[Tensor] = set()  # since the last average, also under no_sync

    def gradient_ready(self, parameter: Tensor) -> None:
        """Note that a parameter was used."""
        self.used.add(parameter)
        super().gradient_ready(parameter)

    def begin(self) -> None:
        """Forget the pass before."""
        super().begin()
        self.missing, self.kept = set(self.expected), {}

    def is_absent(self, parameter: nn.Parameter) -> bool:
        """Whether no gradient of this pass has arrived."""
        return parameter in self.missing or parameter not in self.expected

    def pack(self, parameters: Parameters) -> Tensor:
        """Keep the gradients that this pass has not changed, and copy all into a flat tensor."""
        for parameter in filter(self.is_absent, parameters):
            self.kept[parameter] = None if parameter.grad is None else parameter.grad.clone()
        return super().pack(parameters)

    def average_gradients(self) -> None:
        """Launch the buckets that lack a gradient, and finish all; give back the gradients that no rank used."""
        self.in_flight += map(self.launch, self.waiting)
        self.waiting = []
        unused = self.unused() if self.in_flight else []
        super().average_gradients()
        for parameter in unused:
            parameter.grad = self.kept[parameter]

    def unused(self) -> Parameters:
        """Return the parameters that no rank has used; an all-reduce of one number for each parameter."""
        if not self.find_unused_parameters:
            return []
        used = torch.tensor([one in self.used for one in self.trainable], dtype=torch.int32)
        dist.all_reduce(used, group=self.process_group)
        self.used.clear()
        return [one for one, count in zip(self.trainable, used.tolist(), strict=True) if not count]


class Static(Searching):
    """13. If the graph never changes, the first pass finds the unused parameters for all passes."""

    def __init__(self, module: nn.Module, *, static_graph: bool = False, **options: Any) -> None:
        super().__init__(module, **options)
        self.static_graph = static_graph
        self.never_used: Parameters | None = None
        self.find_unused_parameters |= static_graph

    def unused(self) -> Parameters:
        """Return the parameters that no rank uses; without communication after the first pass of a static graph."""
        if self.never_used is not None:
            return self.never_used
        unused = super().unused()
        if self.static_graph:
            self.never_used = unused
            self.expected = {one for one in self.trainable if not self.is_absent(one)}
        return unused


class Hookable(Static):
    """14. A function of the user's replaces the all-reduce of a bucket."""

    comm_hook: Callable[[GradBucket], "torch.futures.Future[Tensor]"] | None = None

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], "torch.futures.Future[Tensor]"]) -> None:
        """Send buckets by `hook(state, bucket)`, which returns a future of the averages."""
        self.comm_hook = partial(hook, state)

    def send(self, flat: Tensor, parameters: Parameters) -> Any:
        """Start the all-reduce of a bucket, or the comm hook."""
        if self.comm_hook is None:
            return super().send(flat, parameters)
        index = next(number for number, one in enumerate(self.buckets) if one is parameters)
        views_of = partial(split, parameters=parameters)
        memory: Any = SimpleNamespace(buffer=flat, views=views_of(flat), views_of=views_of, parameters=parameters)
        future = self.comm_hook(GradBucket(memory, index, is_last=index == len(self.buckets) - 1))
        return SimpleNamespace(future=future, wait=lambda: flat.copy_(future.wait()))


class Joined(Hookable, Joinable):
    """15. A rank that has run out of inputs matches the collectives of the others with zeros."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        Joinable.__init__(self)
        self.has_inputs = True

    def join(self) -> Join:
        """Return a context in which ranks may have different numbers of inputs."""
        return Join([self])

    def join_hook(self, **_: Any) -> JoinHook:
        """What a rank without inputs runs."""
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the collectives of Join."""
        return self.trainable[0].device

    @property
    def join_process_group(self) -> Any:
        """The ranks that take part."""
        return self.process_group or dist.group.WORLD

    def prepare(self) -> None:
        """Announce that this rank still has inputs, and make all collectives of a forward pass."""
        if self.has_inputs:
            Join.notify_join_context(self)
        super().prepare()

    def source(self) -> int:
        """Rank 0, or under Join the highest rank with inputs."""
        return self.highest_rank(takes_part=self.has_inputs) if self._join_config.enable else super().source()

    def highest_rank(self, *, takes_part: bool) -> int:
        """Return the highest rank that takes part; call on every rank."""
        rank = torch.tensor([dist.get_rank(self.process_group) if takes_part else -1])
        dist.all_reduce(rank, dist.ReduceOp.MAX, group=self.process_group)
        return int(rank)


class Shadow(JoinHook):
    """Iterations of a rank without inputs."""

    def __init__(self, ddp: Joined) -> None:
        super().__init__()
        self.ddp = ddp

    def main_hook(self) -> None:
        """Make the collectives of one iteration, in the order of a real one, with gradients of zeros."""
        ddp = self.ddp
        ddp.has_inputs = False
        ddp.prepare()
        ddp.module.zero_grad()
        ddp.begin()
        ddp.average_gradients()
        ddp.has_inputs = True

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 - torch's signature
        """Give all ranks the model of a rank that had inputs to the end."""
        last = self.ddp.highest_rank(takes_part=is_last_joiner)
        self.ddp.send_from(last, iter([*self.ddp.module.parameters(), *self.ddp.module.buffers()]))


class Sharded(Joined):
    """16. Each rank updates its share of the parameters, and keeps the optimiser's state of this share only."""

    def shard_optimizer(self, optimizer_class: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
        """Return the optimiser of this rank's share; after each of its steps, every rank has all parameters."""
        ranks = dist.get_world_size(self.process_group)
        shares: list[Parameters] = [[] for _ in range(ranks)]
        for parameter in sorted(self.trainable, key=Tensor.numel, reverse=True):
            min(shares, key=lambda share: sum(one.numel() for one in share)).append(parameter)
        mine = shares[dist.get_rank(self.process_group)]

        def share_parameters(*_: Any) -> None:
            for rank, share in enumerate(shares):
                self.send_from(rank, iter(share))

        optimizer = optimizer_class([{"params": mine}], **settings)
        optimizer.register_step_post_hook(share_parameters)
        return optimizer


class Scattered(Sharded):
    """17. Each rank gets, steps and sends its part of each bucket: a reduce-scatter, a step, an all-gather."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # This rank's part of each bucket, by the bucket's first parameter.
        self.parts: dict[Tensor, nn.Parameter] = {}

    def shard_optimizer(self, optimizer_class: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
        """Return the optimiser of this rank's parts; its state belongs to them, so buckets are not rebuilt."""
        self.is_rebuilt, rank = True, dist.get_rank(self.process_group)
        for bucket in self.buckets:
            part = self.in_equal_parts([parameter.detach() for parameter in bucket])[rank]
            self.parts[bucket[0]] = nn.Parameter(part.clone())
        optimizer = optimizer_class(self.parts.values(), **settings)
        optimizer.register_step_post_hook(self.gather)
        return optimizer

    def in_equal_parts(self, tensors: list[Tensor]) -> Tensor:
        """Copy tensors into one, padded with zeros; shape [ranks, elements of a part]."""
        flat, ranks = torch.cat([tensor.flatten() for tensor in tensors]), dist.get_world_size(self.process_group)
        return nn.functional.pad(flat, (0, -len(flat) % ranks)).view(ranks, -1)

    def launch(self, parameters: Parameters) -> InFlight:
        """Start the reduce-scatter of a bucket, which has taken the gradients."""
        if not self.parts:
            return super().launch(parameters)
        flat = self.in_equal_parts([self.gradient(parameter) for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
        flat /= len(flat)
        part = self.parts[parameters[0]]
        part.grad = torch.empty_like(part)
        return parameters, flat, reduce_scatter(part.grad, flat.view(-1), group=self.process_group, async_op=True)

    def finish(self, parameters: Parameters, flat: Tensor, work: Any) -> None:
        """Wait for a reduce-scatter, or an all-reduce."""
        if self.parts:
            work.wait()
        else:
            super().finish(parameters, flat, work)

    def gather(self, *_: Any) -> None:
        """Give every rank the parts of all ranks."""
        for bucket in self.buckets:
            part = self.parts[bucket[0]].detach()
            whole = part.new_empty(dist.get_world_size(self.process_group) * len(part))
            all_gather(whole, part, group=self.process_group)
            for parameter, new in zip(bucket, split(whole[: sum(map(Tensor.numel, bucket))], bucket), strict=True):
                parameter.detach().copy_(new)


SOLUTIONS = (
    *(Averaging, Flat, Asynchronous, Hooked, Ordered, Bucketed, SmallFirst, Rebuilt, Viewing, Accumulating, Buffered),
    *(Searching, Static, Hookable, Joined, Sharded, Scattered),
)
"""By rung, from the first."""
