"""Our DistributedDataParallel beside torch's, on two Gloo ranks."""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from reference import models
from reference.data_parallel import DistributedDataParallel
from reference.launch import run_ranks

from .pairs import Pairs, header, row, time_pairs


def compare(_rank: int, _world_size: int, model: str, pairs: int) -> Pairs:
    """Iterations under ours and under torch's."""
    return time_pairs(trainer(model, DistributedDataParallel), trainer(model, TorchDDP), pairs)


def trainer(model: str, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """One training iteration of a model of its own, wrapped."""
    torch.manual_seed(0)
    module, loss_fn = models.build(model)
    wrapped = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def iterate() -> None:
        optimizer.zero_grad()
        loss_fn(wrapped).backward()
        optimizer.step()

    return iterate


def main() -> None:
    """Print one line a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "mlp"])
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    print(__doc__)
    print(header("ours", "torch"))
    for model in arguments.models:
        print(row(model, run_ranks(compare, 2, model, arguments.pairs)[0]), flush=True)


if __name__ == "__main__":
    main()
