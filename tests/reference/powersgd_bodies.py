"""Rank bodies of test_powersgd.py."""

import copy
import io
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ddplab.reference.comm_hooks.powersgd import power_sgd
from ddplab.reference.data_parallel import DistributedDataParallel

from ..hook_bodies import Given, Shapes, averages, given_gradients, register
from ..scenarios import Branches, batch


def elements_sent(rank: int, world_size: int, hook: str, shapes: Shapes, options: dict) -> tuple[int, Any]:
    """Elements that the hook passes to all-reduces in an iteration, and its compression statistics."""
    sent = []
    real = dist.all_reduce

    def count(tensor: Tensor, **arguments: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, **arguments)

    with mock.patch.object(dist, "all_reduce", count):
        _, before, _ = averages(rank, world_size, ("ours", hook), "ours", shapes, 0, steps=2, state_options=options)
        in_full, sent[:] = sum(sent), []
        _, state, _ = averages(rank, world_size, ("ours", hook), "ours", shapes, 0, steps=3, state_options=options)
    assert before.compression_stats() == (0.0, 0, 0)
    return sum(sent) - in_full, state.compression_stats()


def kept_errors(rank: int, world_size: int, hook: str, shapes: Shapes, seed: int, options: dict) -> float:
    """Relative difference between the given gradients and the sum of sent averages and kept errors."""
    steps = 6
    seen, state, ddp = averages(
        rank, world_size, ("ours", hook), "ours", shapes, seed, steps=steps, state_options=options
    )
    given = [given_gradients(rank, shapes, seed, step) for step in range(steps)]
    worst = 0.0
    for index, parameter in enumerate(ddp.parameters()):
        if hook == "power":
            kept = state._errors.get(state.name(parameter), torch.zeros(shapes[index])).view(shapes[index])
        else:
            (bucket,) = ddp.reducer.buckets
            flat = state._errors["bucket 0"].flatten()[: bucket.buffer.numel()]
            kept = bucket.views_of(flat)[bucket.indices.index(index)]
        everyones = sum(step[index] for step in given) - kept
        dist.all_reduce(everyones)
        sent = sum(step[index] for step in seen)
        worst = max(worst, float((everyones / world_size - sent).norm() / (1 + sent.norm())))
    return worst


def size_when_saved(rank: int, world_size: int, shapes: Shapes) -> tuple[int, int]:
    """Size of the pickle of a state, and of the tensors that it keeps, in bytes."""
    _, state, _ = averages(rank, world_size, ("ours", "power"), "ours", shapes, 0)
    remembered = sum(t.nbytes for t in [*state._errors.values(), *state._qs.values()])
    file = io.BytesIO()
    torch.save(state, file)
    assert copy.deepcopy(state)._errors.keys() == state._errors.keys()
    return file.tell(), remembered


def skips_unused_parameters(rank: int, _world_size: int) -> list[bool]:
    """Whether gradients are finite, by iteration, under PowerSGD when the last bucket is sometimes not sent."""
    ddp = DistributedDataParallel(
        Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-6
    )
    register(ddp, "power")
    finite = []
    for which in ("ab", "ab", "ab", "a", "b", "ab"):
        ddp.zero_grad()
        ddp(batch(rank, 3, 4), which).sum().backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None))
    return finite


def averages_around_a_failure(rank: int, _world_size: int, shapes: Shapes) -> list[list[Tensor]]:
    """Averages of six iterations; a further iteration fails between them, before its last bucket is sent."""
    ddp = DistributedDataParallel(Given(shapes), bucket_cap_mb=1e-6)
    state = register(ddp, "power")
    failing = False

    def fail(_parameter: Tensor) -> None:
        if failing:
            raise ArithmeticError("in the middle")

    ddp.module.weights[0].register_post_accumulate_grad_hook(fail)
    seen = []
    for step in range(6):
        if step == 4:
            failing = True
            with suppress(ArithmeticError):
                ddp(given_gradients(rank, shapes, 0, 99)).backward()
            failing = False
            ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=1e-6)
            ddp.register_comm_hook(state, power_sgd)
        ddp.zero_grad()
        ddp(given_gradients(rank, shapes, 0, step)).backward()
        seen.append([p.grad.clone() for p in ddp.parameters()])
    return seen
