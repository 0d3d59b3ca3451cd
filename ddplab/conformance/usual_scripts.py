"""Usual scripts: what training runs have and short programs on few forked ranks lack.

Hundreds of iterations, buckets of several MiB, hooks of the script, parameters in one piece of memory, and ranks that
are interpreters of their own.
"""

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ..reference.errors import RankError
from ..reference.launch import RankPool
from ..reference.ranks.launcher import launched_ranks
from .check_runner import VIEWS, Bench, HangError, cause_of, report
from .class_under_test import Subject, methods_of
from .local_training import FindingError
from .real_models import REAL_MODELS, Training, batch, mlp, trains
from .training_programs import SPECIAL, program_of

# Many iterations

LONG, SETTLED = 200, 50
"""Number of iterations, and of those after which memory no longer grows."""
LONG_TIMEOUT_S = 40.0


class _UnequalLayers(nn.Module):
    """Layers of different sizes side by side, which forward uses in any order; gradients come in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, size) for size in (4000, 600, 100))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return torch.stack([self.layers[index](x).square().mean() for index in order]).sum()


def _order(step: int, rank: int) -> list[int]:
    """Return the same order on all ranks for long, then one of the rank's own for long, then any."""
    order = [(index + rank * (3 * step >= LONG)) % 3 for index in range(3)]
    if 3 * step >= 2 * LONG:
        random.Random(f"{step} {rank}").shuffle(order)
    return order


def long_run(rank: int, _world_size: int, subject: Subject, *, accumulates: bool) -> str:
    """Train for long, and compare every average and the growth of memory; some passes may accumulate."""
    training = Training(subject, _UnequalLayers, bucket_cap_mb=0.01)  # three buckets

    def run(module: nn.Module, step: int, rank: int) -> None:
        passes = 1 + (accumulates and random.Random(step).random() < 0.5)
        for number in range(passes):
            is_local = module is training.wrapped and number + 1 < passes
            with training.wrapped.no_sync() if is_local else nullcontext():
                module(batch(step + LONG * number, rank), _order(step, rank)).backward()

    problem, memory, held = "", psutil.Process(), 0  # the problem is returned at the end, because other ranks go on
    for step in range(LONG):
        training.backward(run, step)
        problem = problem or training.wrong(run, step)
        training.optimizer.step()
        if step == SETTLED:
            held = memory.memory_info().rss
    grown, size = memory.memory_info().rss - held, sum(parameter.nbytes for parameter in training.module.parameters())
    if grown > size * (LONG - SETTLED) / 2:
        problem = problem or (
            f"rank {rank}: memory grew by {grown / 2**20:.0f} MiB from iteration {SETTLED} to {LONG}, by "
            f"{grown / size / (LONG - SETTLED):.1f} times the gradients in each: is every bucket kept?"
        )
    return problem


def _frozen_in_turn(module: nn.Module, step: int, rank: int) -> Tensor:
    layers: Any = getattr(module, "module", module).layers
    for number, layer in enumerate(layers):
        layer.requires_grad_(number != step % 4)
    return module(batch(step, rank), _order(LONG, rank + step))  # type: ignore[no-any-return]


FROZEN_IN_TURN: dict[str, Any] = {"make": _UnequalLayers, "run": _frozen_in_turn, "steps": 6}
"""Arguments of `trains`: layers are frozen and thawed, and ranks differ in their ready orders."""


def check_long(bench: Bench) -> None:
    """200 iterations, in which ready orders are stable, then differ between ranks; memory does not grow."""
    body = partial(long_run, accumulates="no_sync" in bench.methods)
    report(bench.run(body, bench.subject, timeout_s=LONG_TIMEOUT_S))


# Large buckets


def _steep(module: nn.Module, step: int, rank: int) -> Tensor:
    """Return a loss whose gradients exceed the range of half precision."""
    return module(batch(step, rank)).square().sum() * 1e6  # type: ignore[no-any-return]


LARGE: dict[str, Any] = {"make": partial(nn.Linear, 6, 199_999), "run": _steep, "what": "a bucket of 5 MiB"}
"""Arguments of `trains`."""

# Hooks of the script


def _with_hooks() -> nn.Module:
    module = mlp()
    weight, bias, *_ = module.parameters()
    weight.register_hook(Tensor.sign)
    bias.register_post_accumulate_grad_hook(_to_sign)
    return module


def _to_sign(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.sign_()


def with_script_hooks(_rank: int, _world_size: int, subject: Subject, *, late: bool, **options: Any) -> str:
    """Train with hooks of the script that replace gradients by their signs, before they are averaged.

    Two hooks are registered before construction, one after it. `late`: and a post-accumulate hook after it too.
    """
    training = Training(subject, _with_hooks, **options)
    for module in (training.module, training.twin):
        *_, weight, bias = module.parameters()
        weight.register_hook(Tensor.sign)
        if late:
            bias.register_post_accumulate_grad_hook(_to_sign)
    problem = training.train()
    return problem and f"hooks of the script that replace gradients by their signs: {problem}"


def check_hooks(bench: Bench) -> str:
    """What hooks of the script make of a gradient is averaged.

    Returns what becomes of a post-accumulate hook that is registered after construction; empty if it counts too.
    """
    for options in bench.variants({}, VIEWS):
        bench.try_body(with_script_hooks, late=False, **options)
    try:
        bench.try_body(with_script_hooks, late=True)
    except FindingError:
        return "post-accumulate hooks that a script registers after construction run too late to count"
    return ""


# Parameters in one piece of memory


def _flattened() -> nn.Module:
    module = mlp()
    parameters = list(module.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return module


def in_one_memory(rank: int, _world_size: int, subject: Subject) -> str:
    """Train views of one flat tensor, as fused optimisers make them; they stay so until the script separates them."""
    training = Training(subject, _flattened)
    problem = training.train()
    pieces = {parameter.untyped_storage().data_ptr() for parameter in training.module.parameters()}
    for parameter in training.module.parameters():
        parameter.data = parameter.data.clone()
    later = training.train()
    if len(pieces) > 1:
        return f"rank {rank}: parameters that shared one piece of memory now have {len(pieces)}"
    problem = problem or later
    return problem and f"parameters that share memory, or did so at first: {problem}"


# Ranks that are interpreters of their own

WORLD_SIZE, NEW = 5, 3
"""Number of ranks, and how many of them are new interpreters, each of which takes seconds to start."""
IMPORT_TIMEOUT_S = 180.0


def check_interpreters(bench: Bench) -> None:
    """Five ranks, most with hash seeds and addresses of their own, as under torchrun: no order may be a set's."""
    if launched_ranks() is not None:  # they are interpreters of their own
        _train_separately(bench)
        return
    size = WORLD_SIZE if bench.pool.backend == "gloo" else bench.world_size
    with RankPool(
        size, backend=bench.pool.backend, device=bench.device, new_interpreters=NEW, only_data=True
    ) as pool:
        try:
            pool.run(methods_of, bench.subject, timeout_s=IMPORT_TIMEOUT_S)
            _train_separately(Bench(bench.subject, pool, bench.effort))
        except (FindingError, RankError, HangError) as fault:
            seeds = f"on {size} ranks, of which {NEW} are new interpreters, so that their sets have other orders"
            raise FindingError(f"{seeds}: {cause_of(fault)}") from fault


def _train_separately(bench: Bench) -> None:
    options = {"bucket_cap_mb": 1e-6}
    bench.try_program(program_of(SPECIAL, ["train"] * 3, bench.world_size, options=options))
    bench.try_body(trains, **options)
    dtypes = "layers of four dtypes"
    bench.try_body(trains, make=REAL_MODELS[dtypes], what=dtypes, bucket_cap_mb=25.0)
