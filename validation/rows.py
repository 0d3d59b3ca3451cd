"""Rows: predictions beside the truth, and what they amount to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Literal

Part = Literal["a", "b", "c", "d"]
TITLES: dict[Part, str] = {
    "a": "all-reduces at numbers of GPUs that are not in the fit",
    "b": "iterations of torch's DDP, buckets of 25 MB and 1 MB",
    "c": "three schedules on three networks",
    "d": "our reducer on Gloo, committed runs of `ddplab validate`",
}
LIMITS: dict[Part, float] = {"a": 0.08, "b": 0.02, "c": 0.10, "d": 0.03}
"""Absolute errors that must not be exceeded: of (a) the mean over the sizes of a table, of (d) that over the
configurations of a run, else of each cell."""
AVERAGED: tuple[Part, ...] = ("a", "d")

RULES = ("no overlap", "naive overlap")
"""Yardsticks that predict_targets a winner."""


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One prediction; times in nanoseconds.

    Attributes:
        part: Of the score.
        case: Name of the case.
        group: Rows of one group are averaged: in (a) a question and a number of GPUs, in (d) a model.
        what: The rest that tells rows of a group apart.
        calibrated: What the prediction knows.
        predicted_ns: What the simulator says.
        measured_ns: The truth.
        yardsticks_ns: What simpler rules say, by name.
        counts: Whether the target is held against it.
    """

    part: Part
    case: str
    group: str
    what: str
    calibrated: str
    predicted_ns: float
    measured_ns: float
    yardsticks_ns: Mapping[str, float] = field(default_factory=dict)
    counts: bool = True

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_ns / self.measured_ns - 1

    def yardstick_error(self, name: str) -> float:
        """The same of a yardstick."""
        return self.yardsticks_ns[name] / self.measured_ns - 1

    def to_json(self) -> dict[str, Any]:
        """All of it, errors as fractions."""
        return {
            "part": self.part,
            "case": self.case,
            "group": self.group,
            "what": self.what,
            "calibrated_from": self.calibrated,
            "predicted_ns": round(self.predicted_ns),
            "measured_ns": round(self.measured_ns),
            "error": self.error,
            "counts": self.counts,
            "yardsticks": {
                name: {"ns": round(ns), "error": self.yardstick_error(name)}
                for name, ns in self.yardsticks_ns.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class WinnerTally:
    """Which of several was fastest, foretold and found.

    `lead` is how much longer the second takes, a fraction; a tie is where the measurements cannot tell. `yardsticks`
    says whom a simpler rule foretells, by its name.
    """

    part: Part
    case: str
    what: str
    predicted: str
    measured: str
    lead: float
    is_tie: bool
    yardsticks: Mapping[str, str]

    @property
    def is_right(self) -> bool:
        """Whether the winner is the one foretold, or there is none."""
        return self.is_tie or self.predicted == self.measured

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "part": self.part,
            "case": self.case,
            "what": self.what,
            "predicted": self.predicted,
            "measured": self.measured,
            "measured_lead": self.lead,
            "tie": self.is_tie,
            "right": self.is_right,
            "yardsticks": dict(self.yardsticks),
        }


Entrants = Mapping[str, Mapping[str, float]]
"""Times by entrant and rule; the simulator's rule is `predicted`."""


def winner(entrants: Entrants, rule: str) -> str:
    """Whose time is the shortest by a rule; the first of equals."""
    return min(entrants, key=lambda name: entrants[name][rule])


@dataclass(frozen=True)
class Scored:
    """What a case gives."""

    rows: tuple[ScoreRow, ...]
    contests: tuple[WinnerTally, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """One part of the score: how many of its figures are within the limit, and the worst of them.

    `mean` and `yardsticks` are means of absolute errors over all rows that count, in (a) each question alike, in (d)
    each run. In (d) `worst` is that of a single configuration.
    """

    part: Part
    figures: int
    within: int
    mean: float
    worst: float
    yardsticks: Mapping[str, float]
    contests: int
    ties: int
    wrong: int
    wrong_yardsticks: Mapping[str, int]

    @property
    def is_met(self) -> bool:
        """Whether every figure is within the limit and no winner is wrong."""
        return self.within == self.figures and not self.wrong


def grouped(rows: Sequence[ScoreRow]) -> dict[tuple[str, str], list[ScoreRow]]:
    """Rows by case and group, in their order."""
    groups: dict[tuple[str, str], list[ScoreRow]] = {}
    for row in rows:
        groups.setdefault((row.case, row.group), []).append(row)
    return groups


def mean_error(errors: Sequence[float]) -> float:
    """Mean of absolute values."""
    return fmean(map(abs, errors))


def figures(part: Part, rows: Sequence[ScoreRow], errors: Callable[[ScoreRow], float]) -> list[float]:
    """What a part's limit is held against: of (a) and (d) a mean over each group, else every row's error."""
    counting = [row for row in rows if row.part == part and row.counts]
    if part in AVERAGED:
        return [mean_error(list(map(errors, group))) for group in grouped(counting).values()]
    return list(map(errors, counting))


def verdict(part: Part, rows: Sequence[ScoreRow], contests: Sequence[WinnerTally]) -> Verdict:
    """Hold a part's limit against its rows; at least one counts."""
    errors = figures(part, rows, lambda row: row.error)
    names = next(row for row in rows if row.part == part).yardsticks_ns
    held = [contest for contest in contests if contest.part == part]
    return Verdict(
        part=part,
        figures=len(errors),
        within=sum(abs(error) <= LIMITS[part] for error in errors),
        mean=mean_error(errors),
        worst=max([row.error for row in rows if row.part == part and row.counts] if part == "d" else errors, key=abs),
        yardsticks={
            name: mean_error(figures(part, rows, partial(ScoreRow.yardstick_error, name=name))) for name in names
        },
        contests=len(held),
        ties=sum(contest.is_tie for contest in held),
        wrong=sum(not contest.is_right for contest in held),
        wrong_yardsticks={
            name: sum(not contest.is_tie and contest.yardsticks[name] != contest.measured for contest in held)
            for name in RULES
            if held
        },
    )
