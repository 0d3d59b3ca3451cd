"""Rank bodies that train with comm hooks, on gradients that the tests choose."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

from ddplab.reference.comm_hooks.allreduce import allreduce, noop
from ddplab.reference.comm_hooks.compress import bf16_compress, compress, fp16_compress
from ddplab.reference.comm_hooks.powersgd import PowerSGDState, batched_power_sgd, power_sgd
from ddplab.reference.comm_hooks.quantization import quantize_per_channel, quantize_per_tensor

from .scenarios import CLASSES

Shapes = tuple[tuple[int, ...], ...]

POWER: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 1}
LOCAL: dict[str, Any] = {"subgroup": None, "start_localSGD_iter": 2, "post_local_gradient_allreduce": False}

# Name: hook, and what makes its state of options.
OURS: dict[str, tuple[Callable, Callable[..., Any]]] = {
    "allreduce": (allreduce, lambda **_: None),
    "noop": (noop, lambda **_: None),
    "fp16": (fp16_compress, lambda **_: None),
    "bf16": (bf16_compress, lambda **_: None),
    "compress(fp16)(allreduce)": (compress(torch.float16)(allreduce), lambda **_: None),
    "compress(bf16)(allreduce)": (compress(torch.bfloat16)(allreduce), lambda **_: None),
    "per tensor": (quantize_per_tensor, lambda **_: None),
    "per channel": (quantize_per_channel, lambda **_: None),
    "power": (power_sgd, lambda **options: PowerSGDState(None, **(POWER | options))),
    "batched power": (batched_power_sgd, lambda **options: PowerSGDState(None, **(POWER | options))),
    "compress(bf16)(power)": (
        compress(torch.bfloat16)(power_sgd),
        lambda **options: PowerSGDState(None, **(POWER | options)),
    ),
}
# Without those that quantise, which fail on Gloo under torch's class too, and batched PowerSGD, which fails anywhere.
TORCHS: dict[str, tuple[Callable, Callable[..., Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, lambda: None),
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "bf16": (default_hooks.bf16_compress_hook, lambda: None),
    "bf16 wrapper": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), lambda: None),
    "power": (powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(None, **POWER)),
    "local": (post_localSGD_hook.post_localSGD_hook, lambda: post_localSGD_hook.PostLocalSGDState(None, **LOCAL)),
}
HOOKS = {"ours": OURS, "torch": TORCHS}


def register(ddp: Any, hook: str, group: ProcessGroup | None = None, **options: Any) -> Any:
    """Register one of our hooks, which averages over the ranks of a group or over all; returns its state."""
    function, make_state = OURS[hook]
    state = make_state(**options)
    if state is None:
        state = group
    else:
        state.process_group = group
    ddp.register_comm_hook(state, function)
    return state


class Given(nn.Module):
    """A module whose gradients are the tensors that are passed to forward."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def given_gradients(rank: int, shapes: Shapes, seed: int, step: int, *, low_rank: int | None = None) -> list[Tensor]:
    """A random tensor for each shape. With `low_rank`, matrices of that rank, with one column space for all ranks."""
    generator = torch.Generator().manual_seed(seed * 1000 + step * 10 + rank)
    common = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        if low_rank is None or len(shape) < 2:
            made.append(torch.randn(shape, generator=generator))
        else:
            columns = torch.Size(shape[1:]).numel()
            basis = torch.randn(shape[0], low_rank, generator=common)
            made.append((basis @ torch.randn(low_rank, columns, generator=generator)).view(shape))
    return made


def mean_gradients(world_size: int, shapes: Shapes, seed: int, step: int, **options: Any) -> list[Tensor]:
    """The averages of the given gradients, computed without a hook or processes."""
    by_rank = [given_gradients(rank, shapes, seed, step, **options) for rank in range(world_size)]
    return [sum(ranks) / world_size for ranks in zip(*by_rank, strict=True)]


def averages(
    rank: int,
    _world_size: int,
    hook: tuple[str, str],
    wrapper: str,
    shapes: Shapes,
    seed: int,
    *,
    steps: int = 4,
    options: dict[str, Any] | None = None,
    state_options: dict[str, Any] | None = None,
    low_rank: int | None = None,
    same: bool = False,
    scales: dict[int, float] | None = None,
    device: str = "cpu",
) -> tuple[list[list[Tensor]], Any, nn.Module]:
    """The given gradients after averaging, by step; the hook's state; the model.

    `same`: use the same gradients in every step; `scales`: factor of the gradients by step.
    """
    function, make_state = HOOKS[hook[0]][hook[1]]
    state = make_state(**(state_options or {}))
    ddp = CLASSES[wrapper](Given(shapes).to(device), **(options or {}))
    ddp.register_comm_hook(state, function)
    seen = []
    for step in range(steps):
        ddp.zero_grad()
        given = given_gradients(rank, shapes, seed, 0 if same else step, low_rank=low_rank)
        ddp([g.to(device) * (scales or {}).get(step, 1.0) for g in given]).backward()
        seen.append([w.grad.cpu().clone() for w in ddp.module.weights])
    return seen, state, ddp


def on_classes(
    rank: int, world_size: int, hook: tuple[str, str], *rest: Any, wrappers: tuple[str, ...], **options: Any
) -> list:
    """Averages by class and step."""
    return [averages(rank, world_size, hook, wrapper, *rest, **options)[0] for wrapper in wrappers]


def train(pool, hook, shapes, seed, *, wrappers=("ours",), **options):
    """Averages by rank, class and step, from the ranks of a pool."""
    return pool.run(partial(on_classes, wrappers=wrappers, **options), hook, shapes, seed)
