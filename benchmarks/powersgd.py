"""Iteration time with our PowerSGD and with torch's, in pairs.

Both hooks run in our DistributedDataParallel, with all gradients in one bucket, because torch's hook hangs on Gloo
with several buckets.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from ddplab import DistributedDataParallel, PowerSGDState, power_sgd, run_ranks

from .ddp import trainer
from .pairs import Pairs, arguments, header, parse, row, save, time_pairs

HOOKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ours": (power_sgd, PowerSGDState),
    "torch": (torchs.powerSGD_hook, torchs.PowerSGDState),
}


def compare(model: str, rank: int, pairs: int, world_size: int, backend: str, *, batched: bool) -> Pairs:
    """Time iterations with our hook and with torch's; half of them in processes that build torch's first."""
    half = -(-pairs // 2)
    return [
        pair
        for first in HOOKS
        for pair in run_ranks(
            *(compare_in_order, world_size, model, half, first, {"batch_tensors_with_same_shape": batched}, rank),
            backend=backend,
        )[0]
    ]


def compare_in_order(
    _rank: int, _world_size: int, model: str, pairs: int, first: str, options: dict[str, Any], rank: int
) -> Pairs:
    """Time iterations with our hook and with torch's; the hook named `first` is built first."""

    def build(name: str) -> Callable[[], None]:
        hook, make_state = HOOKS[name]

        def wrap(module: nn.Module) -> nn.Module:
            ddp = DistributedDataParallel(module, bucket_cap_mb=1e4)
            state = make_state(dist.group.WORLD, rank, start_powerSGD_iter=2, **options)
            ddp.register_comm_hook(state, hook)
            return ddp

        return trainer(model, wrap)

    built = {name: build(name) for name in sorted(HOOKS, key=first.__ne__)}
    return time_pairs(pairs, built["ours"], built["torch"])


def main() -> None:
    """Print one line for each model and rank of the approximation, with and without batching."""
    parser = arguments(__doc__, "resnet50", "mlp")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4], help="ranks of the approximation")
    parser.add_argument("--pairs", type=int, default=20)
    options = parse(parser)
    times: dict[str, Pairs] = {}
    print(__doc__)
    print(header("ours", "torch"))
    for model in options.models:
        for rank in options.ranks:
            for batched in (False, True):
                name = f"{model}, rank {rank}{', batched' * batched}"
                times[name] = compare(
                    model, rank, options.pairs, options.world_size, options.backend, batched=batched
                )
                save(options.json, {"times": times})
                print(row(name, times[name]), flush=True)


if __name__ == "__main__":
    main()
