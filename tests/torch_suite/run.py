"""Run torch's own DDP tests on two Gloo ranks and hold the outcomes against `expected.csv`.

    python -m tests.torch_suite.run [--wrapper ours|torch] [TEST ...]

Every test gets two fresh processes, forked from a server that has imported torch already.
"""

import argparse
import csv
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

WORLD_SIZE = 2
TIMEOUT_S = 300.0
EXPECTED = Path(__file__).with_name("expected.csv")
WRAPPERS = {"ours": "reference.data_parallel", "torch": "torch.nn.parallel.distributed"}

Outcome = tuple[str, str]
"""passed, skipped or failed, and why."""


def run_one(name: str, wrapper: str) -> Outcome:
    """The outcome of one test, run by new processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.torch_suite.suite", WRAPPERS[wrapper]])
    with tempfile.TemporaryDirectory(prefix="ddplab-torch-suite-") as folder:
        for made in ("barrier", "test_dir"):  # torch's tests expect these two
            Path(folder, made).mkdir()
        pipes, processes = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_one_rank, args=(rank, name, wrapper, folder, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _worst(_collect(pipes))
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection]) -> list[Outcome]:
    deadline = time.monotonic() + TIMEOUT_S
    outcomes: list[Outcome] = []
    waiting = list(pipes)
    while waiting:
        answered = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not answered:
            return [*outcomes, ("failed", f"still running after {TIMEOUT_S:g} s")]
        for pipe in answered:
            waiting.remove(pipe)
            try:
                outcomes.append(pipe.recv())
            except EOFError:
                outcomes.append(("failed", "a rank died without a word"))
            if outcomes[-1][0] == "failed":
                return outcomes  # its peers may wait for it for ever
    return outcomes


def _worst(outcomes: list[Outcome]) -> Outcome:
    return min(outcomes, key=lambda outcome: ["failed", "skipped", "passed"].index(outcome[0]))


def _one_rank(rank: int, name: str, wrapper: str, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    from . import suite

    torch.set_num_threads(1)
    os.environ.update(TEMP_DIR=folder, GLOO_SOCKET_IFNAME="lo", RANK=str(rank))
    output = os.open(os.path.join(folder, f"output{rank}"), os.O_WRONLY | os.O_CREAT)
    if "TORCH_SUITE_LOUD" not in os.environ:
        os.dup2(output, 1)
        os.dup2(output, 2)
    suite.use(importlib.import_module(WRAPPERS[wrapper]).DistributedDataParallel)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    set_rng_seed(1234)
    try:
        suite.run(name, rank)
        pipe.send(("passed", ""))
    except unittest.SkipTest as skip:
        pipe.send(("skipped", str(skip)))
    except SystemExit as leaving:
        pipe.send(("skipped", f"exit code {leaving.code}"))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    pipe.recv()  # stay until both ranks have answered: who leaves early breaks the other's connections


def _last(why):
    import re

    lines = [l for l in why.splitlines() if re.match(r"^[\w.]*(Error|Exception|Skip)\b", l)]
    return lines[-1][:200] if lines else (why.strip().splitlines() or [""])[-1][:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--wrapper", choices=WRAPPERS, default="ours")
    arguments = parser.parse_args()
    from . import suite

    counts = {}
    with open("/tmp/outcomes-%s.csv" % arguments.wrapper, "w") as file:
        for name in arguments.tests or suite.names():
            start = time.monotonic()
            outcome, why = run_one(name, arguments.wrapper)
            counts[outcome] = counts.get(outcome, 0) + 1
            print(f"{outcome:8} {time.monotonic() - start:6.1f} s  {name}", flush=True)
            if outcome != "passed" and (arguments.tests or True):
                print("   " + (why if arguments.tests else _last(why)), flush=True)
            csv.writer(file).writerow([name, outcome, _last(why)])
    print(counts)


if __name__ == "__main__":
    main()
