"""Rank bodies of test_autotuning.py: modules whose settings a tuner reads, and training that the simulator tunes."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel.distributed import _MixedPrecision

from ddplab.autotuning import autotune, policy_of
from reference.autotuning import Autotune
from reference.comm_hooks.compress import compress, fp16_compress
from reference.comm_hooks.powersgd import PowerSGDState, power_sgd
from reference.data_parallel import DistributedDataParallel
from simulator import Policy

from ..scenarios import mlp
from .small_trace import FABRIC


def settings_of_modules(_rank: int, _world_size: int) -> dict[str, Policy | str]:
    """What the tuner of each module finds, or its error."""
    found: dict[str, Any] = {}

    def read(name: str, *, hook: Any = None, state: Any = None, sync_every: int = 1, given: Any = None, **options):
        def tuner(trace, ddp):
            found[name] = policy_of(ddp, trace, **(given or {}))

        ddp = DistributedDataParallel(mlp((2, 2, 1), torch.float32, 0), autotune=Autotune(tuner, 2), **options)
        if hook is not None:
            ddp.register_comm_hook(state, hook)
        for _ in range(6):
            for place in range(sync_every):
                with nullcontext() if place == sync_every - 1 else ddp.no_sync():
                    ddp(torch.ones(1, 2)).sum().backward()
        found.setdefault(name, ddp.log.autotune.get("autotune_error", ""))

    read("plain")
    read("views", gradient_as_bucket_view=True, forward_sync_buffers=False)
    read("static", static_graph=True, find_unused_parameters=True, sync_every=2)
    read("fp16", hook=fp16_compress)
    read("torch's bf16", hook=bf16_compress_hook)
    read("power_sgd", hook=power_sgd, state=PowerSGDState(None, matrix_approximation_rank=3))
    unnamed = compress(torch.bfloat16)(fp16_compress)
    read("unknown", hook=unnamed)
    read("given", hook=unnamed, given={"hook": "fp16"})
    read("mixed", mixed_precision=_MixedPrecision(reduce_dtype=torch.bfloat16))
    read("double", mixed_precision=_MixedPrecision(reduce_dtype=torch.float64))
    return found


def train_with_the_simulator(rank: int, _world_size: int, tunes: bool) -> tuple[dict[str, Any], list[Tensor]]:
    """Logging data, and gradients of the last iteration."""
    autotuning = autotune(FABRIC, iterations=3) if tunes else None
    ddp = DistributedDataParallel(mlp((16, 64, 64, 64, 1), torch.float64, 0), bucket_cap_mb=0, autotune=autotuning)
    for _ in range(7):
        ddp.zero_grad()
        ddp(torch.full((4, 16), 1.0 + rank, dtype=torch.float64)).sum().backward()
    return ddp.log.autotune, [parameter.grad for parameter in ddp.parameters()]
