"""Rank bodies of test_delayed_all_reduce.py."""

import pickle
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from reference.data_parallel import DistributedDataParallel
from reference.parameters import trainable_parameters

from ..scenarios import batch, gradients
from .drop_in_bodies import Tower


def _train_tower(
    wrap: type[nn.Module],
    rank: int,
    layers: int,
    names: list[str] | None,
    trigger: str,
    options: dict,
    accumulate: int,
    set_to_none: bool,
) -> list:
    module = Tower(layers)
    parameters = dict(module.named_parameters())
    if names is not None:
        options = options | {
            "delay_all_reduce_named_params": [(name, parameters[name]) for name in names],
            "param_to_hook_all_reduce": parameters[trigger],
        }
    ddp = wrap(module, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        last = (step + 1) % accumulate == 0
        with nullcontext() if last else ddp.no_sync():
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
        if last:
            seen.append([g.clone() for g in gradients(ddp)])
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return [*seen, [p.detach().clone() for p in ddp.parameters()]]


def delayed(rank: int, _world_size: int, layers: int, names: list[str], *script: Any) -> tuple[list, list]:
    """Ours with delayed all-reduces, and torch's class without."""
    return _train_tower(DistributedDataParallel, rank, layers, names, *script), _train_tower(
        TorchDDP, rank, layers, None, *script
    )


def delayed_details(rank: int, _world_size: int) -> dict[str, object]:
    """The buckets, and a delayed parameter that no rank uses."""
    module = Tower(2)
    unused = nn.Parameter(torch.ones(3))
    module.register_parameter("unused", unused)
    first = module.layers[0].weight
    ddp = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("unused", unused), ("scale", module.scale)],
        param_to_hook_all_reduce=first,
    )
    ddp(batch(rank, 3, 4)).sum().backward()
    other = pickle.loads(pickle.dumps(ddp))
    other.zero_grad()
    other(batch(rank, 3, 4)).sum().backward()
    return {
        "bucketed": list(ddp._own.bucketed(trainable_parameters(ddp.module))),
        "unused": unused.grad.tolist(),
        "copy": torch.equal(other.module.scale.grad, module.scale.grad),
    }
