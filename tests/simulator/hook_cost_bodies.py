"""Rank bodies that listen to what a training iteration hands to the process group."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ddplab.conformance.training_programs import Net, Program, loss_of
from reference.data_parallel import DistributedDataParallel
from reference.recorder import record
from reference.trace import Trace

from ..hook_bodies import OURS, Given, Shapes, given_gradients
from ..scenarios import Branches, batch

Sent = tuple[str, int]
"""How it was sent, and bytes of this rank's part."""

Cycle = list[list[Sent]]
"""What each iteration of a cycle sends, of which only the last synchronises."""

Seen = tuple[Trace, list[Cycle]]
"""A recording of the plain module, and what the wrapped one sends."""
Loss = Callable[[nn.Module, int], torch.Tensor]
"""Of a module in a cycle."""
Options = dict[str, Any]
Hook = tuple[str, Options]
"""A name in `hook_bodies` and the options of its state."""
TRANSPORTS = {"allreduce": "all_reduce", "allgather": "all_gather", "broadcast": "broadcast"}
"""Methods of a process group; every collective of torch's and ours ends in one."""


def _sent(transport: str, mine: torch.Tensor) -> Sent:
    """Gloo gathers sparse gradients: the numbers of the rows, and the rows."""
    if mine.is_sparse:
        mine = mine.coalesce()
        return "all_gather", mine.indices().nbytes + mine.values().nbytes
    return transport, mine.nbytes


@contextmanager
def listening() -> Iterator[list[Sent]]:
    """A list to which all collectives of this rank are added, in the order in which they are issued."""
    sent: list[Sent] = []

    def heard(method: str) -> Any:
        real = getattr(dist.ProcessGroup, method)

        def hear(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
            (mine,) = arguments[method == "allgather"]  # its first argument takes what all ranks send
            sent.append(_sent(TRANSPORTS[method], mine))
            return real(group, *arguments, **named)

        return mock.patch.object(dist.ProcessGroup, method, hear)

    with ExitStack() as stack:
        for method in TRANSPORTS:
            stack.enter_context(heard(method))
        yield sent


def _iterations(
    module: nn.Module, loss: Loss, options: Options, hook: Hook | None, cycles: int, sync_every: int = 1
) -> Seen:
    with record(module) as recording:
        loss(module, 0).backward()
    module.zero_grad()
    ddp = DistributedDataParallel(module, **options)
    if hook is not None:
        name, state_options = hook
        function, make_state = OURS[name]
        ddp.register_comm_hook(make_state(**state_options), function)
    return recording.trace, [_cycle(ddp, partial(loss, ddp, cycle), sync_every) for cycle in range(cycles)]


def _cycle(ddp: DistributedDataParallel, loss: Callable[[], torch.Tensor], sync_every: int) -> Cycle:
    """Iterations of which only the last synchronises."""
    seen = []
    ddp.zero_grad()
    for number in range(sync_every):
        with listening() as sent, nullcontext() if number == sync_every - 1 else ddp.no_sync():
            loss().backward()
        seen.append(sent)
    return seen


def of_integers(rank: int, world_size: int, program: Program, options: Options, *, sync_every: int = 1) -> Seen:
    """The model of a program, each parameter with a buffer beside it."""
    net = Net(program, rank)
    for index, parameter in enumerate(list(net.parameters())):
        net.register_buffer(f"beside{index}", parameter.detach().clone())

    def loss(module: nn.Module, cycle: int) -> torch.Tensor:
        return loss_of(module, program, cycle, rank, world_size)

    return _iterations(net, loss, options, None, len(program.steps), sync_every)


def of_branches(rank: int, world_size: int, which: str, options: Options) -> Seen:
    """A model that leaves parameters unused."""

    def loss(module: nn.Module, cycle: int) -> torch.Tensor:
        return module(batch(rank, 3, 4, step=cycle), which).sum()

    return _iterations(Branches(), loss, options, None, cycles=4)


def of_hook(rank: int, world_size: int, shapes: Shapes, dtype: str, options: Options, hook: Hook) -> Seen:
    """Parameters of these shapes under a comm hook."""

    def loss(module: nn.Module, cycle: int) -> torch.Tensor:
        return module(given_gradients(rank, shapes, 0, cycle))

    return _iterations(Given(shapes, getattr(torch, dtype)), loss, options, hook, cycles=4)


def of_embeddings(rank: int, world_size: int, rows: int, touched: int, options: Options, hook: Hook) -> Seen:
    """An embedding with sparse gradients, of which each batch touches other rows, and a dense layer."""
    module = nn.Sequential(nn.Embedding(rows, 5, sparse=True), nn.Linear(5, 3))

    def loss(module: nn.Module, cycle: int) -> torch.Tensor:
        return module((torch.arange(touched).repeat(2) + rank + cycle) % rows).sum()

    return _iterations(module, loss, options, hook, cycles=3)


def under_join(
    rank: int, world_size: int, inputs: tuple[int, ...], options: Options, *, sync_every: int = 1
) -> tuple[Trace, list[Cycle], list[Sent]]:
    """As the others, while a rank has inputs; and what is sent at the end."""
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    with record(module) as recording:
        module(batch(rank, 3, 4)).sum().backward()
    ddp = DistributedDataParallel(module, **options)
    with ExitStack() as joined:
        joined.enter_context(ddp.join())
        cycles = range(inputs[rank] // sync_every)
        seen = [_cycle(ddp, lambda: ddp(batch(rank, 3, 4)).sum(), sync_every) for _ in cycles]
        with listening() as end:
            joined.close()
    return recording.trace, seen, end
