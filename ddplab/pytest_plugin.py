"""The pytest plugin: options of `pytest --pyargs ddplab --ddplab-class MODULE:CLASS`.

Every pytest in an environment with ddplab loads this module, so the plugin imports neither of our other
packages: torch takes seconds, and another project may have a package of its own that is called `reference`.
"""

from pathlib import Path

import pytest

from .name_clashes import check_own_packages


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the conformance tests; those of `ddplab conform`, with a prefix."""
    add = parser.getgroup("ddplab", "conformance of a data-parallel class (ddplab)").addoption
    add("--ddplab-class", dest="ddplab_subject", metavar="MODULE:CLASS", help="the data-parallel class under test")
    add("--ddplab-against", metavar="MODULE:CLASS", help="a class whose results must be equal")
    add("--ddplab-full", action="store_true", help="try more programs: minutes instead of about one")
    add("--ddplab-world-size", type=int, default=3, metavar="N", help="number of ranks (default: 3)")
    add("--ddplab-backend", default="gloo", metavar="NAME", help="backend of the process group (default: gloo)")
    add("--ddplab-device", metavar="NAME", help="where ranks train, cpu or cuda (default: their GPUs with nccl)")
    lists = "YAML file with the lists must-pass, expected-fail and skip of checks"
    add("--ddplab-expect", type=Path, metavar="PATH", help=lists)
    schedules = "fail if a schedule is slower than in this file of `ddplab conform --save-schedule`"
    add("--ddplab-baseline", type=Path, metavar="PATH", help=schedules)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to check a class with another package than ours under the name `reference` or `simulator`."""
    if config.getoption("ddplab_subject") is not None:
        try:
            check_own_packages()
        except ImportError as error:
            raise pytest.UsageError(f"ddplab: {error}") from None
