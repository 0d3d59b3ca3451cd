"""Rank bodies of test_join.py: ranks with different numbers of inputs."""

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ddplab.reference.data_parallel import DistributedDataParallel

from ..hook_bodies import register
from ..scenarios import Branches, Wrap, batch, gradients, linears, on_both_classes, trained


class CounterHook(JoinHook):
    """Matches the all-reduces of the ranks that still count."""

    def main_hook(self) -> None:
        dist.all_reduce(torch.zeros(1))


class Counter(Joinable):
    """Counts the inputs of all ranks, by an all-reduce for each."""

    join_device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def __call__(self) -> None:
        Join.notify_join_context(self)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        self.count += ones

    def join_hook(self, **_options: Any) -> CounterHook:
        return CounterHook()

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def model(kind: str) -> nn.Module:
    if kind == "branches":
        return Branches()
    return nn.Sequential(*linears(4, 6), *[nn.BatchNorm1d(6)] * (kind == "buffers"), nn.ReLU(), nn.Linear(6, 2))


def train(
    wrap: Wrap,
    rank: int,
    inputs: tuple[int, ...],
    *,
    kind: str = "plain",
    hook: str | None = None,
    accumulate: tuple[int, ...] = (),
    order: str | None = None,
    options: dict[str, Any] | None = None,
    join: dict[str, Any] | None = None,
) -> list:
    """Gradients by step, then parameters and buffers, and what a counter counted.

    Args:
        wrap: The class.
        rank: This rank.
        inputs: How many each rank has.
        kind: Of model.
        hook: Name of a comm hook of ours.
        accumulate: Steps whose backward pass is under no_sync.
        order: A counter joins, "before" the model in each iteration or "after" it.
        options: Of the class.
        join: Of Join.
    """
    ddp = wrap(model(kind), **(options or {}))
    if hook is not None:
        register(ddp, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    counter = Counter()
    joinables: list[Joinable] = {None: [ddp], "before": [counter, ddp], "after": [ddp, counter]}[order]
    seen: list[Any] = []
    with Join(joinables, **(join or {})):
        for step in range(inputs[rank]):
            if order == "before":
                counter()
            x = batch(rank, 3, 4, step=step)
            which = ("ab", "a", "b")[(rank + step) % 3]
            with ddp.no_sync() if step in accumulate else nullcontext():
                (ddp(x, which) if kind == "branches" else ddp(x)).square().mean().backward()
            seen.append(gradients(ddp))
            if step not in accumulate:
                optimizer.step()
                optimizer.zero_grad()
            if order == "after":
                counter()
    return [*seen, [p.detach().clone() for p in ddp.parameters()], list(ddp.buffers()), counter.count]


@on_both_classes
def uneven_inputs(wrap: Wrap, rank: int, inputs: tuple[int, ...], **arguments: Any) -> list:
    return train(wrap, rank, inputs, **arguments)


@on_both_classes
def with_sharded_optimizer(wrap: Wrap, rank: int, inputs: tuple[int, ...]) -> list[Tensor]:
    """Parameters at the end, of a model that joins with torch's ZeroRedundancyOptimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations, on import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ddp = wrap(model("plain"))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    with Join([ddp, optimizer]):
        for step in range(inputs[rank]):
            optimizer.zero_grad(set_to_none=False)
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def with_a_buffer_hook(rank: int, _world_size: int, inputs: tuple[int, ...], after: bool) -> list:
    """A buffer hook with collectives and, after forward, their futures; and forward passes without gradients."""
    ddp = DistributedDataParallel(model("buffers"), bucket_cap_mb=1e-6)

    def hook(_state: Any, named: dict[str, Tensor]) -> list | None:
        running = [buffer for name, buffer in named.items() if "running" in name]
        futures = [dist.all_reduce(buffer.div_(2), async_op=True).get_future() for buffer in running]
        return futures if after else torch.futures.wait_all(futures) and None

    location = _BufferCommHookLocation.POST_FORWARD if after else _BufferCommHookLocation.PRE_FORWARD
    ddp._register_buffer_comm_hook(None, hook, location)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(inputs[rank]):
            with torch.no_grad():
                ddp(batch(rank, 3, 4, step=step))
            optimizer.zero_grad()
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


@on_both_classes
def early_termination(wrap: Wrap, rank: int, inputs: tuple[int, ...]) -> str:
    """What a class raises, or nothing, where all ranks are to stop with the first."""
    try:
        train(wrap, rank, inputs, join={"throw_on_early_termination": True})
    except RuntimeError as error:
        return str(error)
    return ""


def compressed_without_inputs(rank: int, _world_size: int) -> tuple[int, int]:
    """Iterations that the state of a hook counted on this rank, which joined at once or never; number of buckets."""
    ddp = DistributedDataParallel(model("plain"), bucket_cap_mb=1e-6)
    state = register(ddp, "power")
    with ddp.join():
        trained(ddp, rank, steps=5 * rank)
    return state.iter, len(ddp.reducer.buckets)


def sparse_gradients(
    rank: int, _world_size: int, inputs: tuple[int, ...], used: tuple[bool, ...], options: dict
) -> list:
    """Gradients of an embedding by step, dense; `used`: whether a rank's forward pass uses it."""
    embedding, linear = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)
    module = nn.ModuleList([embedding, linear])

    def forward(x: Tensor) -> Tensor:
        rows = torch.arange(1 + rank)
        return linear(x).sum() + (embedding(rows).sum() * (1 + rank) if used[rank] else 0.0)

    module.forward = forward
    ddp = DistributedDataParallel(module, **options)
    seen = []
    with ddp.join():
        for step in range(inputs[rank]):
            ddp.zero_grad()
            ddp(batch(rank, 3, 3, step=step)).backward()
            gradient = embedding.weight.grad
            seen.append(None if gradient is None else gradient.to_dense())
    return seen


def items_read_under_join(rank: int, _world_size: int) -> int:
    """How often a rank with inputs calls `Tensor.item` in a forward pass under Join."""
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    read, item = [], torch.Tensor.item
    with mock.patch.object(torch.Tensor, "item", lambda tensor: (read.append(1), item(tensor))[1]), ddp.join():
        for _ in range(3):
            before = len(read)
            output = ddp(torch.ones(1, 1))
            in_forward = len(read) - before
            output.sum().backward()
    return in_forward


def epochs(
    rank: int, world_size: int, inputs: tuple[tuple[int, ...], ...], *, skips: bool, options: dict[str, Any]
) -> list[tuple[list, list]]:
    """Averages of every step of several epochs, and what they should be.

    If a script `skips`, the first step of each epoch has no backward pass.
    """
    ddp, alone = DistributedDataParallel(model("plain"), **options), model("plain")
    alone.load_state_dict(ddp.module.state_dict())
    seen = []
    for epoch, by_rank in enumerate(inputs):
        with Join([ddp]):
            for step in range(by_rank[rank]):
                number = 10 * epoch + step
                loss = ddp(batch(rank, 3, 4, step=number)).square().mean()
                if skips and not step:
                    continue
                loss.backward()
                alone.zero_grad()
                for one in (one for one in range(world_size) if by_rank[one] > step):
                    (alone(batch(one, 3, 4, step=number)).square().mean() / world_size).backward()
                seen.append((gradients(ddp), gradients(alone)))
                ddp.zero_grad()
    return seen
