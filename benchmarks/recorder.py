"""Overhead of the recorder: paired iteration times with and without recording."""

import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab import DistributedDataParallel, record, run_ranks

from .ddp import trainer
from .pairs import Pairs, arguments, parse, save, time_once

BLOCK = 4  # iterations that are timed in each recording

PLAIN = "module"
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    PLAIN: nn.Sequential,  # a plain module: no communication
    "ours": DistributedDataParallel,
    "torch": TorchDDP,
}


def compare(_rank: int, _world_size: int, model: str, wrapper: str, blocks: int) -> Pairs:
    """Seconds of an iteration of one wrapped model, with and without recording."""
    wrapped: list[nn.Module] = []

    def wrap(module: nn.Module) -> nn.Module:
        wrapped.append(WRAPPERS[wrapper](module))
        return wrapped[0]

    iterate = trainer(model, wrap)

    def block() -> list[float]:
        iterate()
        return [time_once(iterate) for _ in range(BLOCK)]

    block()
    pairs: Pairs = []
    for number in range(blocks):
        before = block() if number % 2 else []
        with record(wrapped[0], process_group=dist.group.WORLD):
            recorded = block()
        pairs.extend(zip(recorded, before or block(), strict=True))
    return pairs


def main() -> None:
    """Print one line for each model and wrapper."""
    parser = arguments(__doc__, "resnet50")
    parser.add_argument("--blocks", type=int, default=6)
    options = parse(parser)
    times: dict[str, Pairs] = {}
    print(__doc__)
    print(
        f"{'model':12} {'wrapper':8} {'it/s recorded':>14} {'it/s without':>14} {'time ratio':>11} {'quartiles':>13}"
    )
    for model in options.models:
        for wrapper in WRAPPERS:
            pairs = run_ranks(
                *(compare, options.world_size, model, wrapper, options.blocks), backend=options.backend
            )[0]
            times[f"{model}, {wrapper}"] = pairs
            save(options.json, {"times": times})
            recorded, without = (1 / statistics.median(side) for side in zip(*pairs, strict=True))
            low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
            print(
                f"{model:12} {wrapper:8} {recorded:14.2f} {without:14.2f} {middle:11.3f} {low:6.3f}-{high:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
