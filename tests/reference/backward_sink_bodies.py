"""Rank bodies of test_backward_sink.py: forward passes with outputs of many classes."""

from reference.data_parallel import DistributedDataParallel

from .. import scenarios


def train_with_unused_output(rank: int, _world_size: int, structure: str) -> list:
    return scenarios.output_unused_in_loss(DistributedDataParallel, rank, structure=structure)


def train_with_custom_outputs(rank: int, _world_size: int, structure: str) -> list:
    return [
        scenarios.custom_outputs(DistributedDataParallel, rank, structure=structure, **options)
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True})
    ]
