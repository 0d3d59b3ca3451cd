"""Rank bodies of test_like_torch.py."""

import warnings

from ..scenarios import CASES, Wrap, on_both_classes


@on_both_classes
def run_scenario(wrap: Wrap, rank: int, case: str) -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CASES[case](wrap, rank)
