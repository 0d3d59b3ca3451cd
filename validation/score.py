"""The public score: all cases of `validation/cases` predicted and compared, offline.

Prints it, and writes it as Markdown and as a picture beside the cases.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from reference.schema import write_atomically
from simulator.cli.output import show_table, write_json

from . import all_reduce, iterations, schedules, tables
from .all_reduce_case import AllReduceCase
from .case import Case, load_case
from .picture import draw, draw_errors
from .rows import LIMITS, TITLES, Part, Scored, ScoreRow, Verdict, WinnerTally, verdict
from .runs import Run, committed_runs
from .runs import score as score_run
from .training_case import IterationsCase

FOLDER = Path(__file__).parent
SOME = Path("out/score")
"""Where a score goes that is not of all cases."""
INTRO = """\
# The score

Made by `make score`; [README.md](README.md) tells the protocol. An error is predicted / measured - 1; means are of
absolute values.

"""
NOTES: dict[Part, str] = {
    "a": "Means over messages of 256 KiB and more. *Ring factor* and *extrapolate* (the simulator's own growth) are"
    " yardsticks. *: the table of one node is another system's; held against no target.",
    "b": "*Perfect scaling* is one GPU without DDP; *no overlap* and *naive overlap* start from one GPU with DDP.",
    "c": "*Perfect scaling* is one GPU; *naive overlap* is the same ring without slow-down and copies.",
    "d": "Measured by the clock, on two shared cores whose speed changes by the minute; the yardsticks too.",
}

RUN_NOTE = (
    "*Error* is by the clock, *drift* how much longer the same work took while the runs were made than when the"
    " machine was calibrated, *paired* is the error after taking out how fast the machine was beside each turn"
    " (DESIGN.md, Noise);"
    " *said before* are the errors of the predictions that were on disk before the first target run; *ranked wrongly*"
    " counts pairs of configurations that differ by more than noise."
)
WORST = 0.08
"""What no configuration of a run should miss by more, by the target."""
STEADY = 0.03
"""The drift up to which the machine counts as one that kept its speed: as much as errors may be, by the target."""


def run_note(runs: Sequence[Run]) -> str:
    """What the table of runs means, and what comes of those during which the machine kept its speed."""
    steady = [run for run in runs if abs(run.now.drift) <= STEADY]
    if not steady:
        return RUN_NOTE
    errors = [abs(row.error) for run in steady for row in run.now.rows]
    within = sum(error <= WORST for error in errors)
    return (
        f"{RUN_NOTE} In {len(steady)} of the {len(runs)} runs the drift is at most {STEADY:.0%}: there the error by"
        f" the clock is {fmean(run.now.mape for run in steady):.1%} on average, and at most {WORST:.0%} for {within}"
        f" of {len(errors)} configurations."
    )


@dataclass(frozen=True)
class Score:
    """Everything that is shown."""

    rows: tuple[ScoreRow, ...]
    contests: tuple[WinnerTally, ...]
    verdicts: tuple[Verdict, ...]
    runs: tuple[Run, ...]

    def part(self, part: Part) -> list[ScoreRow]:
        """The rows of a part."""
        return [row for row in self.rows if row.part == part]

    def to_json(self) -> dict[str, Any]:
        """For programs; errors as fractions."""
        return {
            "parts": {
                verdict.part: {
                    "title": TITLES[verdict.part],
                    "limit": LIMITS[verdict.part],
                    "figures": verdict.figures,
                    "within": verdict.within,
                    "mean_absolute_error": verdict.mean,
                    "worst_error": verdict.worst,
                    "yardsticks_mean_absolute_error": dict(verdict.yardsticks),
                    "contests": verdict.contests,
                    "ties": verdict.ties,
                    "wrong_winners_by_yardstick": dict(verdict.wrong_yardsticks),
                    "wrong_winners": verdict.wrong,
                    "met": verdict.is_met,
                }
                for verdict in self.verdicts
            },
            "rows": [row.to_json() for row in self.rows],
            "contests": [contest.to_json() for contest in self.contests],
            "runs": {run.name: run.now.to_json() for run in self.runs},
        }


def score_case(case: Case) -> Scored:
    """Predict and compare one case."""
    if isinstance(case, AllReduceCase):
        return all_reduce.score(case)
    if isinstance(case, IterationsCase):
        return iterations.score(case)
    return schedules.score(case)


def compute(paths: Sequence[Path], runs: Sequence[Run]) -> Score:
    """The score of these case files and committed runs.

    Raises:
        ValueError: A file that is no case, or a case that cannot be predicted; one line, which names it.
    """
    rows: list[ScoreRow] = []
    contests: list[WinnerTally] = []
    for path in paths:
        case = load_case(path)
        try:
            scored = score_case(case)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        rows += scored.rows
        contests += scored.contests
    for run in runs:
        scored = score_run(run)
        rows += scored.rows
        contests += scored.contests
    present = [part for part in TITLES if any(row.part == part and row.counts for row in rows)]
    verdicts = [verdict(part, rows, contests) for part in present]
    return Score(tuple(rows), tuple(contests), tuple(verdicts), tuple(runs))


def sections(score: Score) -> list[tuple[str, str, tables.Table]]:
    """Title, note and table of everything that is shown."""
    shown: list[tuple[str, str, tables.Table]] = [("Score", "", tables.verdict_table(score.verdicts))]
    for part, title in TITLES.items():
        rows = score.part(part)
        if not rows:
            continue
        table = tables.all_reduce_table(rows) if part == "a" else tables.iteration_table(rows)
        shown.append((f"({part}) {title}", NOTES[part], table))
        if contests := [contest for contest in score.contests if contest.part == part]:
            shown.append((f"({part}) which is fastest", "", tables.contest_table(contests)))
    if score.runs:
        shown.append(("(d) run by run", run_note(score.runs), tables.run_table(score.runs)))
    return shown


def as_markdown(score: Score) -> str:
    """The whole score as a page."""
    pages = [
        f"## {title}\n\n" + (f"{note}\n\n" if note else "") + tables.markdown(table)
        for title, note, table in sections(score)
    ]
    return INTRO + "![Predicted against measured times of all rows](score.png)\n\n" + "\n".join(pages)


def as_picture(score: Score) -> bytes:
    """PNG; equal scores give equal bytes."""
    figure = Figure(figsize=(7, 8), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    draw(score.rows, top)
    draw_errors(score.rows, bottom)
    data = BytesIO()
    figure.savefig(data, format="png", dpi=120, metadata={"Software": None})
    return data.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute, print and write the score; a broken file ends it with one line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("cases", nargs="*", type=Path, help="case files; none: all of validation/cases")
    options.add_argument("--out", type=Path, help="folder for score.md and score.png; of some cases out/score")
    options.add_argument("--json", type=Path, help="also write everything as JSON")
    told = options.parse_args(arguments)
    out: Path = told.out or (SOME if told.cases else FOLDER)
    try:
        runs = [] if told.cases else committed_runs()
        score = compute(told.cases or sorted((FOLDER / "cases").glob("*.toml")), runs)
        for title, note, table in sections(score)[::-1]:
            show_table(table, f"\n{title}" + (f"\n{note}" if note else ""))
        write_atomically(out / "score.md", as_markdown(score).encode())
        write_atomically(out / "score.png", as_picture(score))
        write_json(told.json, score.to_json())
    except (ValueError, OSError) as error:
        sys.exit(f"score: {error}")
    print(f"\nwritten: {out / 'score.md'}, {out / 'score.png'}")


if __name__ == "__main__":
    main()
