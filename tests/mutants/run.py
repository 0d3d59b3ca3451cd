"""Which test catches each mutant: the quick kit of `ddplab conform`, and a plain test beside it.

    python -m tests.mutants.run [--only NAME,...] [--jobs N]

Each mutant gets a copy of the source tree with its fault, and processes of its own. The exit status is 1 if a mutant
survives. A run records its outcomes in `outcomes.json` and writes `docs/bugs.md`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .catalogue import Mutant, catalogue, copy_tree
from .page import Outcome, record, recorded, summary

TIMEOUT_S = 200.0
"""Time-out of all parts of a mutant together."""
MESSAGE_CHARACTERS = 200


def try_tree(folder: Path, mutant: Mutant | None, needs: str, clean: Path) -> tuple[Outcome, float]:
    """Run what should catch a mutant, and the plain test, in a copy of the tree; returns also the first's seconds.

    Args:
        folder: Where to make the copy.
        mutant: The mutant. None: the tree stays without a fault.
        needs: See `Mutant`.
        clean: Folder for what the trials need of the tree without a fault.
    """
    copy_tree(folder, mutant)
    status, output = run_python(folder, ["-m", "tests.mutants.trial", str(clean), needs or "kit", "plain"])
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"part"')]
    failed = {"caught_by": "time-out" if status is None else "trial", "message": last_error(output), "seconds": 0.0}
    found, plain = [*rows, failed, failed][:2]
    message = found["message"].strip().partition("\n")[0][:MESSAGE_CHARACTERS] if found["caught_by"] else ""
    return Outcome(found["caught_by"], message, bool(plain["caught_by"])), found["seconds"]


def run_python(folder: Path, arguments: list[str]) -> tuple[int | None, str]:
    """Run Python in a tree, whose packages come first; returns exit status (None: time-out) and output."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its ranks
        return None, process.communicate()[0]


def try_mutant(mutant: Mutant | None, needs: str, clean: Path) -> tuple[Outcome, float]:
    """Try one mutant, see `try_tree`, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ddplab-mutant-") as folder:
        return try_tree(Path(folder), mutant, needs, clean)


def last_error(output: str) -> str:
    """Return the last line that names an error."""
    lines = [line for line in output.splitlines() if "Error" in line or line.startswith("FAILED")]
    return lines[-1] if lines else ""


def check_clean(needs: set[str], clean: Path) -> None:
    """Check that nothing is caught in the tree without a fault, and keep what passes there.

    Raises:
        SystemExit: Something is.
    """
    for one in sorted(needs):
        outcome, seconds = try_mutant(None, one, clean)
        if outcome.caught_by or outcome.plain:
            sys.exit(f"without a fault, {outcome.caught_by or 'the plain test'} fails: {outcome.message}")
        print(f"{seconds:6.1f} s  without a fault: nothing is caught by {one or 'the quick kit'}", flush=True)


def main() -> None:
    """Try the mutants; exit with 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,...", help="try these mutants only")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants to try at a time (default: 2)")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {arguments.jobs}")
    mutants = catalogue()
    names = {mutant.name for mutant in mutants}
    only = set(arguments.only.split(",")) if arguments.only else names
    if unknown := sorted(only - names):
        sys.exit(f"--only: there is no mutant {unknown[0]!r} in mutants.toml")
    chosen = [mutant for mutant in mutants if mutant.name in only]
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="ddplab-clean-") as clean, ThreadPoolExecutor(arguments.jobs) as workers:
        check_clean({mutant.needs for mutant in chosen}, Path(clean))
        trials = {workers.submit(try_mutant, mutant, mutant.needs, Path(clean)): mutant.name for mutant in chosen}
        for trying in as_completed(trials):
            one, seconds = trying.result()
            outcomes[trials[trying]] = one
            caught = f"{one.caught_by}: {one.message}" if one.caught_by else "SURVIVES"
            print(f"{seconds:6.1f} s  {trials[trying]:42}{'plain, ' if one.plain else ''}{caught}", flush=True)
    record(mutants, recorded() | outcomes)
    survivors = [name for name, one in outcomes.items() if not one.caught_by]
    print(summary(chosen, outcomes) + (f"; survivors: {', '.join(survivors)}" if survivors else "; no survivors"))
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
