"""Code that a learner writes in a notebook, as modules that ranks can import, and its checks.

A rank is another process, which cannot import what a notebook defines. A notebook therefore writes modules to
`FOLDER` with `%%writefile`. Processes import them again after each change.
"""

import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ddplab import RankPool
from ddplab.conformance.all_checks import CHECKS
from ddplab.conformance.check_outcomes import CheckResult
from ddplab.conformance.check_runner import FULL, bench_on, run_checks
from ddplab.conformance.class_under_test import Subject

from .exercises import is_open

FOLDER = Path(__file__).parent.parent / "out" / "tutorials"
"""Folder of the learner's modules; git ignores it."""
WRITES = "%%writefile {folder}/"
"""First characters of a cell that writes a module; IPython replaces the variable `folder` by its value."""


def folder() -> Path:
    """Make the folder, let this process and later ranks import from it, and return its relative path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return Path(os.path.relpath(FOLDER))


def forget(_rank: int = 0, _world_size: int = 1) -> None:
    """Forget the learner's modules in this process, so that the next import reads the files again.

    Bytecode of a module that was written twice in one second, with as many characters, would count as that of now.
    """
    folder()
    for bytecode in FOLDER.glob("__pycache__/*.pyc"):
        bytecode.unlink(missing_ok=True)
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is not None and FOLDER in Path(path).parents:
            del sys.modules[name]


def read(name: str) -> Callable[..., Any]:
    """Return the class or function `module:name`, after reading its file again."""
    forget()
    return Subject(name).make


def answer(name: str) -> Any:
    """Return the name `module:name` as an answer to an exercise: `...` while the source contains `TO_WRITE`."""
    try:
        return ... if is_open(read(name)) else name
    except Exception:  # noqa: BLE001  # the check of the answer reports what is wrong with the module
        return name


def run(rank: int, world_size: int, name: str, *arguments: Any) -> Any:
    """Run the learner's function `module:name` on this rank."""
    return read(name)(rank, world_size, *arguments)


def check(pool: RankPool, name: str, checks: Collection[str]) -> list[CheckResult]:
    """Run checks of `ddplab conform` on the learner's class `module:name`, up to the first that fails.

    Args:
        pool: Ranks.
        name: The class.
        checks: Names of the checks; docs/conformance.md describes them.

    Raises:
        ValueError: There is no such class or no such check.
        RankError: The class cannot be constructed.
    """
    forget()
    pool.run(forget)
    with bench_on(pool, name, FULL) as bench:
        results = []
        for result in run_checks(bench, [(name, check) for name, check in CHECKS.items() if name in checks]):
            results.append(result)
            if result.problem:
                break
        return results
