"""Rank bodies of test_join.py: ranks with different numbers of inputs."""

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference.comm_hooks.powersgd import PowerSGDState, power_sgd
from reference.data_parallel import DistributedDataParallel
from reference.join import Join, Joinable

from .. import scenarios
from ..hook_bodies import OURS, WRAPPERS
from ..scenarios import Branches, batch, gradients, linears, mlp
from ..scripts.count_inputs import Counter


def model(kind: str) -> nn.Module:
    if kind == "branches":
        return Branches()
    return nn.Sequential(*linears(4, 6), *[nn.BatchNorm1d(6)] * (kind == "buffers"), nn.ReLU(), nn.Linear(6, 2))


def train(
    rank: int,
    _world_size: int,
    wrapper: str,
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
        rank: This rank.
        wrapper: Whose class.
        inputs: How many each rank has.
        kind: Of model.
        hook: Name of a comm hook of ours.
        accumulate: Steps whose backward pass is under no_sync.
        order: A counter joins, "before" the model in each iteration or "after" it.
        options: Of the class.
        join: Of Join.
    """
    ddp = WRAPPERS[wrapper](model(kind), **(options or {}))
    if hook is not None:
        function, make_state = OURS[hook]
        ddp.register_comm_hook(make_state(), function)
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


def on_both_classes(rank: int, world_size: int, inputs: tuple[int, ...], arguments: dict[str, Any]) -> list:
    return [train(rank, world_size, wrapper, inputs, **arguments) for wrapper in WRAPPERS]


def with_sharded_optimizer(rank: int, _world_size: int, wrapper: str, inputs: tuple[int, ...]) -> list[Tensor]:
    """Parameters at the end, of a model that joins with torch's ZeroRedundancyOptimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations, on import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ddp = WRAPPERS[wrapper](model("plain"))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    with Join([ddp, optimizer]):
        for step in range(inputs[rank]):
            optimizer.zero_grad(set_to_none=False)
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def raise_inside(rank: int, _world_size: int, failing: int) -> None:
    """One rank raises at its third input; the others have more."""
    ddp = WRAPPERS["ours"](model("plain"))
    with Join([ddp]):
        for step in range(6):
            if rank == failing and step == 2:
                raise ArithmeticError("the third input is bad")
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()


def with_what_torch_does_not_shadow(rank: int, _world_size: int, inputs: tuple[int, ...]) -> list:
    """A buffer hook after forward, with collectives and their futures, and forward passes without gradients."""
    ddp = WRAPPERS["ours"](model("buffers"), bucket_cap_mb=1e-6)

    def hook(_state: Any, named: dict[str, Tensor]) -> list:
        return [
            dist.all_reduce(buffer.div_(2), async_op=True).get_future()
            for name, buffer in named.items()
            if "running" in name
        ]

    ddp._register_buffer_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(inputs[rank]):
            with torch.no_grad():
                ddp(batch(rank, 3, 4, step=step))
            optimizer.zero_grad()
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def early_termination(rank: int, world_size: int, inputs: tuple[int, ...]) -> list[str]:
    """What each class raises, or nothing, where all ranks are to stop with the first."""
    said = dict.fromkeys(WRAPPERS, "")
    for wrapper in WRAPPERS:
        try:
            train(rank, world_size, wrapper, inputs, join={"throw_on_early_termination": True})
        except RuntimeError as error:
            said[wrapper] = str(error)
    return list(said.values())


def compressed_without_inputs(rank: int, _world_size: int) -> tuple[int, int]:
    """Iterations that the state of a hook counted on this rank, which joined at once or never."""
    state = PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2)
    ddp = WRAPPERS["ours"](model("plain"), bucket_cap_mb=1e-6)
    ddp.register_comm_hook(state, power_sgd)
    with ddp.join():
        for step in range(5 * rank):
            ddp(batch(rank, 3, 4, step=step)).sum().backward()
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


def train_unevenly(rank: int, _world_size: int, options: dict, first: int) -> list:
    """Gradients of each step and the final parameters; under join, rank 0 has fewer inputs."""
    ddp = DistributedDataParallel(mlp((4, 4, 4), torch.float32, 0), bucket_cap_mb=1e-4, **options)
    with ddp.join():
        seen = scenarios.train(ddp, rank, steps=first if rank == 0 else 6)[:-1]
    return [*seen, [p.detach().clone() for p in ddp.parameters()]]


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
