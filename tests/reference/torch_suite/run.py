"""Run torch's own DDP tests on two Gloo ranks and compare every outcome with `expected.csv`.

    python -m tests.reference.torch_suite.run [--wrapper ours|torch|MODULE:CLASS] [TEST ...]

Each test gets two new processes, forked from a server that has imported torch already. The table has a row for each
test: its outcome with torch's class and with ours, and the reason for an outcome other than "passed". Any other
outcome is a failure, including skips and passes. Another class is expected to have the outcomes of torch's class.

The table is that of one version of torch. With another version, tests that it lacks are skipped, and where an outcome
is not that of the table, torch's own class runs too: an outcome is expected unless that of torch's class is better.
"""

import argparse
import csv
import importlib
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from ddplab.reference.ranks.fork_server import process_context, start_server

WORLD_SIZE = 2
TIMEOUT_S = 100.0
TABLE_VERSION = "2.13."
TABLE = Path(__file__).with_name("expected.csv")
WRAPPERS = {"ours": "ddplab.reference.data_parallel", "torch": "torch.nn.parallel.distributed"}
NO_SUCH_TEST = "this version of torch has no such test"
OUTCOMES = ("failed", "skipped", "passed")  # the worst first: the outcome of a test is the worst of its ranks


class Expected(NamedTuple):
    """A row of the table."""

    test: str
    torch: str
    ours: str
    reason: str


class Outcome(NamedTuple):
    """The outcome of a test, and its reason."""

    name: str
    why: str


def table() -> dict[str, Expected]:
    """The expected outcomes, by test."""
    with TABLE.open(newline="") as file:
        return {row["test"]: Expected(**row) for row in csv.DictReader(file)}


def has_version_of_table() -> bool:
    """Whether the table is that of the installed torch."""
    return metadata.version("torch").startswith(TABLE_VERSION)


def run_one(test: str, wrapper: str) -> Outcome:
    """Run one test in new processes, and end them."""
    start_server("tests.reference.torch_suite.suite", *WRAPPERS.values())
    context = process_context()
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="ddplab-torch-suite-") as folder:
        for made in ("barrier", "test_dir"):  # torch's tests expect these two
            Path(folder, made).mkdir()
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_one_rank, args=(rank, test, wrapper, folder, theirs))
            process.start()
            theirs.close()  # so that the pipe ends when the rank exits
            pipes.append(ours)
            processes.append(process)
        try:
            return min(_collect(pipes), key=lambda outcome: OUTCOMES.index(outcome.name))
        finally:
            for process in processes:
                process.kill()
                process.join()


def expectation(test: str, wrapper: str, outcome: Outcome) -> str:
    """The outcome that a test should have; `outcome` is the one that it has."""
    row = table()[test]
    wanted = row.ours if wrapper == "ours" else row.torch
    if outcome.name == wanted or has_version_of_table():
        return wanted
    torchs = outcome if wrapper == "torch" else run_one(test, "torch")
    return max(outcome.name, torchs.name, key=OUTCOMES.index)


def _collect(pipes: list[Connection]) -> list[Outcome]:
    deadline = time.monotonic() + TIMEOUT_S
    outcomes: list[Outcome] = []
    while len(outcomes) < len(pipes):
        answered = wait(pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not answered:
            return [Outcome("failed", f"still running after {TIMEOUT_S:g} s")]
        for pipe in answered:
            try:
                outcomes.append(pipe.recv())
            except EOFError:
                outcomes.append(Outcome("failed", "a rank exited without reporting an error"))
            if outcomes[-1].name == "failed":
                return outcomes  # the other rank may wait for the failed one for ever
    return outcomes


def _one_rank(rank: int, test: str, wrapper: str, folder: str, pipe: Connection) -> None:
    """Main function of a rank's process, which imports torch's tests; the starting process does not."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    from . import suite

    output = os.open(os.path.join(folder, f"output{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "TEMP_DIR": folder,
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # tests load pickles of their own
    }
    module, _, attribute = WRAPPERS.get(wrapper, wrapper).partition(":")
    suite.use(getattr(importlib.import_module(module), attribute or "DistributedDataParallel"))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    set_rng_seed(1234)
    try:
        if not hasattr(suite.TorchTests, test):
            raise unittest.SkipTest(NO_SUCH_TEST)
        suite.run(test, rank)
        pipe.send(Outcome("passed", ""))
    except unittest.SkipTest as skip:
        pipe.send(Outcome("skipped", str(skip)))
    except SystemExit as leaving:  # how torch's decorators skip
        pipe.send(Outcome("skipped", f"exit code {leaving.code}"))
    except BaseException:  # noqa: BLE001 - whatever a test raises
        pipe.send(Outcome("failed", traceback.format_exc()))
    pipe.recv()  # stay until the parent ends both: a rank that exits early breaks the connections of the other


def cause(why: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line for line in why.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (lines or why.splitlines() or [""])[-1][:160]


def main() -> None:
    """Run the tests that are named, or all; exit with 1 if an outcome is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="tests to run, with full tracebacks; default: all")
    parser.add_argument("--wrapper", default="ours", help="the class: ours, torch, or MODULE:CLASS")
    arguments = parser.parse_args()
    if arguments.wrapper not in WRAPPERS and ":" not in arguments.wrapper:
        parser.error(f"--wrapper: expected ours, torch or MODULE:CLASS, got {arguments.wrapper!r}")
    from . import suite

    expected = table()
    names = arguments.tests or suite.names()
    unknown = set(names) - set(expected)
    if not arguments.tests and has_version_of_table():
        unknown |= set(expected) - set(names)
    if unknown:
        sys.exit(f"{TABLE.name}: expected one row for each of torch's tests that build a DDP; see {sorted(unknown)}")
    counts = dict.fromkeys(OUTCOMES, 0)
    surprises = 0
    for name in names:
        start = time.monotonic()
        outcome = run_one(name, arguments.wrapper)
        wanted = expectation(name, arguments.wrapper, outcome)
        counts[outcome.name] += 1
        surprises += outcome.name != wanted
        note = "" if outcome.name == wanted else f"   EXPECTED {wanted}: {cause(outcome.why)}"
        print(f"{outcome.name:8}{time.monotonic() - start:6.1f} s  {name}{note}", flush=True)
        if arguments.tests and outcome.why:
            print(outcome.why)
    print(", ".join(f"{counts[name]} {name}" for name in reversed(OUTCOMES)), f"- {surprises} not as expected")
    sys.exit(surprises > 0)


if __name__ == "__main__":
    main()
