"""Rank bodies of test_post_local_sgd.py."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from reference.comm_hooks.post_local_sgd import PostLocalSGDState, post_local_sgd
from reference.data_parallel import DistributedDataParallel

from ..scenarios import batch


def local_sgd(rank: int, world_size: int, period: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Parameters by step, with gradients averaged in pairs from step 2 on, and all ranks' averaged every `period`."""
    subgroup, _ = dist.new_subgroups(2)
    ddp = DistributedDataParallel(nn.Linear(4, 3))
    torch.manual_seed(1)
    for parameter in ddp.parameters():
        nn.init.normal_(parameter)
    start = [p.detach().clone() for p in ddp.parameters()]
    ddp.register_comm_hook(PostLocalSGDState(None, subgroup, 2), post_local_sgd)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=period, warmup_steps=2)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        ddp(batch(rank, 5, 4, step=step)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(ddp.parameters())
        seen.append([p.detach().clone() for p in ddp.parameters()])
    return seen, start


def local_sgd_by_hand(world_size: int, period: int, start: list[Tensor]) -> list[list[list[Tensor]]]:
    """The parameters of `local_sgd`, computed without processes; by step and rank."""
    models = []
    for _ in range(world_size):
        model = nn.Linear(4, 3)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        models.append(model)
    seen = []
    for step in range(6):
        gradients = []
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(rank, 5, 4, step=step)).square().mean().backward()
            gradients.append([p.grad for p in model.parameters()])
        for rank, model in enumerate(models):
            pair = [rank // 2 * 2, rank // 2 * 2 + 1]
            over = pair if step >= 2 else list(range(world_size))
            with torch.no_grad():
                for index, parameter in enumerate(model.parameters()):
                    parameter -= 0.1 * sum(gradients[r][index] for r in over) / len(over)
        if step >= 2 and (step - 2) % period == 0:
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p.detach().clone() for p in parameters) / world_size
                    for parameter in parameters:
                        parameter.copy_(mean)
        seen.append([[p.detach().clone() for p in model.parameters()] for model in models])
    return seen
