"""Trial: the quick kit, a comparison of schedules and the plain test, on the source tree of the working directory.

    python -m tests.mutants.trial FOLDER PART ...

Parts are `kit`, `--baseline`, `plain` and tests of this repository. Prints a JSON object for each part when it ends.
`FOLDER` has what the parts need of the tree without a fault. The ranks are forked from a server that has imported
everything, because most faults show in the first second.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ddplab.conformance.all_checks import CHECKS
from ddplab.conformance.check_outcomes import Expectation
from ddplab.conformance.check_runner import FULL, bench_on, run_checks
from ddplab.conformance.class_under_test import Subject
from ddplab.reference.errors import RankError
from ddplab.reference.launch import RankPool
from ddplab.reference.ranks.fork_server import start_server

from . import plain
from .run import last_error

NAME = "ddplab.reference.data_parallel:DistributedDataParallel"
WORLD_SIZE, PLAIN_WORLD_SIZE = 3, 2
PLAIN_TIMEOUT_S = 20.0
IMPORTED_ONCE = ("ddplab.conformance.random_programs", "ddplab.reference.data_parallel", "tests.mutants.plain")
PASSED, SCHEDULES = "passed.json", "schedules.json"
"""Files in `FOLDER`: the checks that pass without a fault, and the schedules."""

Caught = tuple[str, str]
"""The name of the check that caught the fault, and its message; empty texts if none did."""


def kit(folder: Path) -> Caught:
    """Run the quick checks up to the first that fails, or that does not apply but passes without the fault."""
    path = folder / PASSED
    must_pass = json.loads(path.read_text()) if path.exists() else ()
    try:
        with RankPool(WORLD_SIZE) as ranks, bench_on(ranks, NAME, FULL) as bench:
            results, expected = [], dict[str, Expectation].fromkeys(must_pass, "must-pass")
            for result in run_checks(bench, CHECKS.items(), expected):
                results.append(result)
                if result.problem:
                    break
    except RankError as error:
        return "start", str(error)
    if not path.exists():
        path.write_text(json.dumps([result.check for result in results if result.outcome == "passed"]))
    check, _, message = next((result.problem for result in results if result.problem), "").partition(": ")
    return check, message


def baseline(folder: Path) -> Caught:
    """Compare the schedules in virtual time with those without a fault."""
    from ddplab.conformance.timing_and_overlap import compare, load, save, schedules_of

    schedules = list(schedules_of(Subject(NAME)))
    path = folder / SCHEDULES
    if not path.exists():
        save(path, NAME, schedules)
    slower = compare(schedules, load(path))
    return ("overlap --baseline", slower[0]) if slower else ("", "")


def plain_test(_folder: Path) -> Caught:
    """Run the plain test."""
    with RankPool(PLAIN_WORLD_SIZE) as pool:
        try:
            pool.run(plain.gradients_are_close, timeout_s=PLAIN_TIMEOUT_S)
        except RankError as error:
            return "plain test", str(error)
    return "", ""


def repository_test(test: str) -> Caught:
    """Run a test of this repository."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "", "-p", "no:cacheprovider", *test.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    return (test, [*errors, last_error(done.stdout)][0]) if done.returncode else ("", "")


PARTS: dict[str, Callable[[Path], Caught]] = {"kit": kit, "--baseline": baseline, "plain": plain_test}


def main(folder: str, *parts: str) -> None:
    """Run the parts, one after the other."""
    start_server(*IMPORTED_ONCE)
    for part in parts:
        start = time.monotonic()
        caught_by, message = PARTS[part](Path(folder)) if part in PARTS else repository_test(part)
        row = {"part": part, "caught_by": caught_by, "message": message, "seconds": time.monotonic() - start}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
