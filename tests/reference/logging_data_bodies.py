"""Rank bodies of test_logging_data.py."""

import torch

from ..scenarios import Wrap, mlp, on_both_classes


@on_both_classes
def logging_data(wrap: Wrap, _rank: int, options: dict) -> dict:
    ddp = wrap(mlp((4, 4, 4), torch.float32, 0), **options)
    for _ in range(6):
        ddp(torch.ones(1, 4)).sum().backward()
    return ddp._get_ddp_logging_data()
