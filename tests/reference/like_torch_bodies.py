"""Rank bodies of test_like_torch.py."""

import warnings

from torch import nn

from reference.data_parallel import DistributedDataParallel

from .. import scenarios

TorchDDP = nn.parallel.DistributedDataParallel


def run_scenario(rank: int, _world_size: int, case: str) -> tuple[list, list]:
    """Values that a scenario collects under our class and under torch's."""
    scenario = scenarios.CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scenario(DistributedDataParallel, rank), scenario(TorchDDP, rank)
