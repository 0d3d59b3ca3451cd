"""Which test catches each mutant: the quick kit of `ddplab conform`, and a plain test beside it.

    python -m tests.mutants.run [--only NAME,...] [--jobs N]

Each mutant gets a copy of the source tree with its one-line fault, and processes of its own. The exit status is 1 if
a mutant survives. Outcomes are kept in `out/mutants.json`; with one for each mutant, `RESULTS.md` is written.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from .catalogue import ROOT, Mutant, catalogue, copy_tree

TIMEOUT_S = 200.0
"""Time-out of all parts of a mutant together."""
OUT = ROOT / "out" / "mutants.json"
RESULTS = Path(__file__).with_name("RESULTS.md")
MESSAGE_CHARACTERS = 200


@dataclass(frozen=True)
class Outcome:
    """What caught a mutant.

    Attributes:
        mutant: Its name.
        needs: What was run instead of the quick kit; empty: nothing.
        caught_by: The check or test that caught it; empty: it survived.
        message: The message of that check.
        plain: Whether the plain test caught it.
        seconds: Time until it was caught.
    """

    mutant: str
    needs: str
    caught_by: str
    message: str
    plain: bool
    seconds: float


def try_tree(folder: Path, needs: str, clean: Path) -> Outcome:
    """Run what should catch the mutant in this tree, and the plain test.

    Args:
        folder: A copy of the source tree.
        needs: See `Mutant`.
        clean: Folder for what the trials need of the tree without a fault.
    """
    rows: dict[str, dict[str, object]] = {}
    parts = [needs if needs == "--baseline" else "kit", "plain"]
    if needs.startswith("tests/"):
        start = time.monotonic()
        command = ["-m", "pytest", "-x", "-m", "", "-p", "no:cacheprovider", *needs.split()]
        status, output = run_python(folder, command)
        rows["kit"] = {"caught_by": needs if status else "", "message": last_error(output)}
        rows["kit"]["seconds"] = time.monotonic() - start
        parts = ["plain"]
    status, output = run_python(folder, ["-m", "tests.mutants.trial", str(clean), *parts])
    for line in output.splitlines():
        if line.startswith('{"part"'):
            row = json.loads(line)
            rows["plain" if row["part"] == "plain" else "kit"] = row
    failed = {"caught_by": "time-out" if status is None else "trial", "message": last_error(output), "seconds": 0.0}
    found, plain = rows.get("kit", failed), rows.get("plain", failed)
    message = " ".join(str(found["message"]).split())[:MESSAGE_CHARACTERS] if found["caught_by"] else ""
    return Outcome(
        "", needs, str(found["caught_by"]), message, bool(plain["caught_by"]), float(str(found["seconds"]))
    )


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


def last_error(output: str) -> str:
    """Return the last line that names an error."""
    lines = [line for line in output.splitlines() if "Error" in line or line.startswith("FAILED")]
    return lines[-1] if lines else ""


def try_mutant(mutant: Mutant, clean: Path) -> Outcome:
    """Try one mutant in a copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="ddplab-mutant-") as folder:
        copy_tree(Path(folder), mutant)
        outcome = try_tree(Path(folder), mutant.needs, clean)
    return Outcome(**asdict(outcome) | {"mutant": mutant.name})


def check_clean(needs: set[str], clean: Path) -> None:
    """Check that nothing is caught in the tree without a fault, and keep what passes there.

    Raises:
        SystemExit: Something is.
    """
    with tempfile.TemporaryDirectory(prefix="ddplab-mutant-") as folder:
        copy_tree(Path(folder))
        for one in ["", *sorted(needs - {""})]:
            outcome = try_tree(Path(folder), one, clean)
            if outcome.caught_by or outcome.plain:
                sys.exit(f"without a fault, {outcome.caught_by or 'the plain test'} fails: {outcome.message}")
            print(
                f"{outcome.seconds:6.1f} s  without a fault: nothing is caught by {one or 'the quick kit'}",
                flush=True,
            )


def summary(outcomes: list[Outcome]) -> str:
    """Return the numbers in one line."""
    quick = [one for one in outcomes if not one.needs]
    caught = sum(bool(one.caught_by) for one in quick)
    plain = sum(one.plain for one in quick)
    line = f"kit: {caught} of {len(quick)}; plain test: {plain} of {len(quick)}"
    others = [one for one in outcomes if one.needs]
    if others:
        line += f"; with what else they need: {sum(bool(one.caught_by) for one in others)} of {len(others)}"
    return line


def table(mutants: list[Mutant], outcomes: list[Outcome]) -> str:
    """Return the committed table."""
    by_name = {one.mutant: one for one in outcomes}
    counts = Counter(one.caught_by for one in outcomes if one.caught_by)
    lines = [
        "# Mutants",
        "",
        "One-line faults in `reference/`, and what catches them; made by `make mutants`. *Plain test*: whether a",
        "test that compares gradients of a small model on two ranks, on rank 0, catches the fault too (`plain.py`).",
        "",
        f"{summary(outcomes)}.",
        "",
        f"Caught by: {', '.join(f'{check} ({number})' for check, number in counts.most_common())}.",
        "",
        "| mutant | mistake | caught by | plain test |",
        "|---|---|---|---|",
    ]
    for mutant in mutants:
        outcome = by_name[mutant.name]
        plain = "yes" if outcome.plain else "no"
        lines.append(f"| {mutant.name} | {mutant.mistake} | {outcome.caught_by or '**survives**'} | {plain} |")
    return "\n".join(lines) + "\n"


def save(mutants: list[Mutant], outcomes: list[Outcome]) -> None:
    """Write the outcomes, beside former ones of other mutants, and the table if every mutant has an outcome."""
    former = [Outcome(**row) for row in json.loads(OUT.read_text())] if OUT.exists() else []
    by_name = {one.mutant: one for one in (*former, *outcomes)}
    known = [by_name[mutant.name] for mutant in mutants if mutant.name in by_name]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps([asdict(one) for one in known], indent=1) + "\n")
    if len(known) == len(mutants):
        RESULTS.write_text(table(mutants, known))


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
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="ddplab-clean-") as clean, ThreadPoolExecutor(arguments.jobs) as workers:
        check_clean({mutant.needs for mutant in chosen}, Path(clean))
        for trying in as_completed([workers.submit(try_mutant, mutant, Path(clean)) for mutant in chosen]):
            one = trying.result()
            outcomes.append(one)
            caught = f"{one.caught_by}: {one.message}" if one.caught_by else "SURVIVES"
            print(f"{one.seconds:6.1f} s  {one.mutant:42}{'plain, ' if one.plain else ''}{caught}", flush=True)
    save(mutants, outcomes)
    survivors = [one.mutant for one in outcomes if not one.caught_by]
    print(summary(outcomes) + (f"; survivors: {', '.join(survivors)}" if survivors else "; no survivors"))
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
