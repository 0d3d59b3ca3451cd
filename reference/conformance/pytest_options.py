"""Options of `pytest --pyargs reference.conformance --ddp MODULE:CLASS`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the conformance tests."""
    group = parser.getgroup("ddplab", "conformance of a data-parallel class (ddplab)")
    group.addoption("--ddp", metavar="MODULE:CLASS", help="the data-parallel class under test")
    group.addoption("--ddp-against", metavar="MODULE:CLASS", help="a class whose results must be equal")
    group.addoption("--ddp-full", action="store_true", help="try more programs, for minutes instead of seconds")
    group.addoption("--ddp-world-size", type=int, default=3, metavar="N", help="number of ranks (default: 3)")
