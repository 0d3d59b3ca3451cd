"""Compute the public score: predict all cases and committed runs offline, and compare them with measurements.

Prints the score, and writes it as a Markdown page and a picture.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddplab.cli.terminal_output import show_table, write_json
from ddplab.reference.files.writing import write_atomically

from . import (
    part_a_all_reduces,
    part_b_iterations,
    part_c_schedules,
    part_d_scaling,
    part_e_bucket_caps,
    part_fg_runs,
    part_h_profiles,
    part_i_weak_scaling,
    score_page,
)
from .cases import (
    AllReduceCase,
    BucketCapsCase,
    Case,
    IterationsCase,
    ScalingCase,
    SchedulesCase,
    WeakScalingCase,
    load_case,
)
from .comparison import LIMITS, TITLES, CaseScore, Comparison, FastestChoice, Verdict, verdict
from .part_fg_runs import CommittedRun, committed_runs
from .part_j_plan import count_inside

FOLDER = Path(__file__).parent
OUT_OF_SOME_CASES = Path("out/score")
"""Default folder for the score of the cases that are named on the command line."""


@dataclass(frozen=True)
class Score:
    """All rows, choices and verdicts, committed runs, and (i) by the other systems and with measured iterations."""

    rows: tuple[Comparison, ...]
    choices: tuple[FastestChoice, ...]
    verdicts: tuple[Verdict, ...]
    runs: tuple[CommittedRun, ...]
    left_out: tuple[part_i_weak_scaling.LeftOut, ...]
    anchored: tuple[tuple[Comparison, Comparison], ...]

    def sections(self) -> list[score_page.Section]:
        """The sections of the score page."""
        return score_page.sections(self.verdicts, self.rows, self.choices, self.runs, self.left_out, self.anchored)

    def to_json(self) -> dict[str, Any]:
        """All numbers, errors as fractions; keys keep their former names for existing readers."""
        return {
            "parts": {
                verdict.part: {
                    "title": TITLES[verdict.part],
                    "limits": LIMITS[verdict.part]._asdict(),
                    "figures": verdict.checked,
                    "within": verdict.within,
                    "mean_absolute_error": verdict.mean,
                    "worst_error": verdict.worst,
                    "yardsticks_mean_absolute_error": dict(verdict.baselines),
                    "contests": verdict.choices,
                    "ties": verdict.ties,
                    "wrong_winners_by_yardstick": dict(verdict.wrong_by_baseline),
                    "wrong_winners": verdict.wrong,
                    "met": verdict.is_met,
                }
                for verdict in self.verdicts
            },
            "rows": [row.to_json() for row in self.rows],
            "contests": [choice.to_json() for choice in self.choices],
            "plan": [one._asdict() for one in count_inside(self.rows)],
            "runs": {run.name: run.current.to_json() for run in self.runs},
        }


def score_case(case: Case) -> CaseScore:
    """Predict one case and compare with its truth."""
    if isinstance(case, AllReduceCase):
        return part_a_all_reduces.score(case)
    if isinstance(case, IterationsCase):
        return part_b_iterations.score(case)
    if isinstance(case, SchedulesCase):
        return part_c_schedules.score(case)
    if isinstance(case, ScalingCase):
        return part_d_scaling.score(case)
    if isinstance(case, BucketCapsCase):
        return part_e_bucket_caps.score(case)
    return part_i_weak_scaling.score(case)


def compute(paths: Sequence[Path], runs: Sequence[CommittedRun], profiles: Sequence[Path] = ()) -> Score:
    """Compute the score of case files, committed runs and files of torch's profiler.

    Raises:
        ValueError: A file is not a valid case, or a case cannot be predicted. The message is one line that starts
            with the path.
    """
    scored: list[CaseScore] = []
    cases = [load_case(path) for path in paths]
    for path, case in zip(paths, cases, strict=True):
        try:
            scored.append(score_case(case))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    scored += [part_fg_runs.score(run) for run in runs]
    scored += [part_h_profiles.score(path) for path in profiles]
    rows = tuple(row for one in scored for row in one.rows)
    choices = tuple(choice for one in scored for choice in one.choices)
    parts = [part for part in TITLES if any(row.part == part and row.counts for row in rows)]
    verdicts = tuple(verdict(part, rows, choices) for part in parts)
    weak_scaling = [case for case in cases if isinstance(case, WeakScalingCase)]
    left_out = part_i_weak_scaling.leave_one_out(weak_scaling, rows)
    of_case = {case.name: [row for row in rows if row.part == "i" and row.case == case.name] for case in weak_scaling}
    anchored = [pair for case in weak_scaling for pair in part_i_weak_scaling.anchored(case, of_case[case.name])]
    return Score(rows, choices, verdicts, tuple(runs), tuple(left_out), tuple(anchored))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute, print and write the score; exit with one line if a file is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", type=Path, help="case files; default: all of validation/cases")
    parser.add_argument(
        "--out", type=Path, help="folder for score.md and score.png; default: validation, or out/score for some cases"
    )
    parser.add_argument("--json", type=Path, help="also write all numbers as JSON to this file")
    options = parser.parse_args(arguments)
    out: Path = options.out or (OUT_OF_SOME_CASES if options.cases else FOLDER)
    try:
        if options.cases:
            score = compute(options.cases, [])
        else:
            score = compute(sorted((FOLDER / "cases").glob("*.toml")), committed_runs(), part_h_profiles.profiles())
        sections = score.sections()
        for section in reversed(sections):
            if section.table:
                show_table(section.table, f"\n{section.title}" + (f"\n{section.note}" if section.note else ""))
        write_atomically(out / "score.md", score_page.as_markdown(sections).encode())
        write_atomically(out / "score.png", score_page.as_picture(score.rows))
        write_json(options.json, score.to_json())
    except (ValueError, OSError) as error:
        sys.exit(f"score: {error}")
    print(f"\nwritten: {out / 'score.md'}, {out / 'score.png'}")


if __name__ == "__main__":
    main()
