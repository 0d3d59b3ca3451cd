"""The page `docs/bugs.md`: bugs of published reducers as mutants, and what caught each in its last run."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten

from .catalogue import ROOT, Mutant

PAGE = ROOT / "docs" / "bugs.md"
RECORD = Path(__file__).with_name("outcomes.json")
FOUND_HERE = "found here"
AREAS = (
    "the average",
    "order and hangs",
    "accumulation",
    "unused parameters",
    "views",
    "hooks and low precision",
    "start, buffers and groups",
    "exceptions and uneven inputs",
)
INTRODUCTION = """\
# Bugs of published reducers

Read this page before you review a change to a data-parallel class. Each row is a bug that somebody published, or that
this project had ("found here"), planted into our own reducer by a change of a few lines
([`mutants.toml`](../tests/mutants/mutants.toml), by the name in the row). *Caught by* is the first check of
[`ddplab conform`](conformance.md) that fails, or a file of this repository's tests. *You see* is the beginning of
the check's message, without seed, iteration and rank; a test's message is left out. A plain test, of the gradients of
a toy model on two ranks ([code](../tests/mutants/plain.py)), catches {plain} of these {bugs} bugs.

`make mutants` plants them, and {others} unpublished faults, and writes this page. Caught in their last
runs: {caught}.
"""
SEEN_CHARACTERS = 60
"""How much of a message the page shows."""
NOT_SHOWN = re.compile(
    r"^(with seed \d+ in virtual time, on \d+ ranks: |rank \d+ failed( in virtual time)?: |RuntimeError: |rank \d+: "
    r"|iteration \d+(, rank \d+)?: )+"
)
"""Beginnings of messages that the page leaves out."""
BUGS_HEAD = ["| what goes wrong | reported | caught by | you see |", "| --- | --- | --- | --- |"]


@dataclass(frozen=True)
class Outcome:
    """What caught a mutant in its last run.

    Attributes:
        caught_by: The check or test that caught it; empty: it survived.
        message: The first line of its message.
        plain: Whether the plain test caught it.
    """

    caught_by: str
    message: str
    plain: bool


def recorded() -> dict[str, Outcome]:
    """The outcomes of the last runs by mutant."""
    return {name: Outcome(**outcome) for name, outcome in json.loads(RECORD.read_text()).items()}


def record(mutants: Iterable[Mutant], outcomes: Mapping[str, Outcome]) -> None:
    """Write the outcomes of all mutants that the catalogue still has, and the page."""
    known = {mutant.name: outcomes[mutant.name] for mutant in mutants if mutant.name in outcomes}
    rows = (f"{json.dumps(name)}: {json.dumps(asdict(outcome))}" for name, outcome in known.items())
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    PAGE.write_text(page(mutants, known))


def summary(mutants: Iterable[Mutant], outcomes: Mapping[str, Outcome]) -> str:
    """The numbers of the mutants that have an outcome, in one line."""
    tried = [(mutant.needs, outcomes[mutant.name]) for mutant in mutants if mutant.name in outcomes]
    quick, others = ([one for needs, one in tried if bool(needs) == other] for other in (False, True))
    line = f"kit: {sum(bool(one.caught_by) for one in quick)} of {len(quick)}"
    line += f"; plain test: {sum(one.plain for one in quick)} of {len(quick)}"
    if others:
        line += f"; with what else they need: {sum(bool(one.caught_by) for one in others)} of {len(others)}"
    return line


def page(mutants: Collection[Mutant], outcomes: Mapping[str, Outcome]) -> str:
    """The text of the page."""
    bugs = [mutant for mutant in mutants if mutant.source]
    plain, others = sum(outcomes[bug.name].plain for bug in bugs), len(mutants) - len(bugs)
    caught = summary(mutants, outcomes)
    lines = [INTRODUCTION.format(plain=plain, bugs=len(bugs), others=others, caught=caught)]
    for area in AREAS:
        lines += [f"## {area.capitalize()}\n", *BUGS_HEAD]
        lines += [_row(bug, outcomes[bug.name]) for bug in bugs if bug.area == area] + [""]
    return "\n".join(lines)


def _row(bug: Mutant, outcome: Outcome) -> str:
    sources = ", ".join(_link(source) for source in bug.source.split(", "))
    return f"| {bug.mistake} `{bug.name}` | {sources} | {_catcher(outcome)} | {_seen(outcome)} |"


def _seen(outcome: Outcome) -> str:
    """The beginning of a check's message; empty for a test of this repository."""
    if "::" in outcome.caught_by:
        return ""
    shown = shorten(NOT_SHOWN.sub("", outcome.message), SEEN_CHARACTERS, placeholder=" ...", break_on_hyphens=False)
    return shown.replace("|", "\\|")


def _link(source: str) -> str:
    repository, hash_sign, number = source.partition("#")
    address = f"https://github.com/{repository}/issues/{number}"
    return f"[{source.rpartition('/')[2]}]({address})" if hash_sign else source


def _catcher(outcome: Outcome) -> str:
    """The check that caught a mutant; a test of this repository by its file alone."""
    return outcome.caught_by.partition("::")[0].rpartition("/")[2] or "**survives**"
