"""Tables: the score as rows of words, for the terminal and for Markdown."""

from collections.abc import Sequence

from .rows import LIMITS, TITLES, ScoreRow, Verdict, WinnerTally, grouped, mean_error
from .runs import Run

Table = list[dict[str, str]]
SMALL, LARGE = "256 KiB-16 MiB", "above"
BORDER_BYTES = 16 * 2**20


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """One line a part."""
    return [
        {
            "name": f"({verdict.part}) {TITLES[verdict.part]}",
            "must be at most": f"{LIMITS[verdict.part]:.0%}",
            "within": f"{verdict.within} of {verdict.figures}",
            "mean": f"{verdict.mean:.1%}",
            "worst": f"{verdict.worst:+.1%}",
            "yardsticks, mean": ", ".join(f"{name} {error:.1%}" for name, error in verdict.yardsticks.items()),
            "winners right": _winners(verdict),
            "met": "yes" if verdict.is_met else "no",
        }
        for verdict in verdicts
    ]


def _winners(verdict: Verdict) -> str:
    if not verdict.contests:
        return ""
    told = verdict.contests - verdict.ties
    others = ", ".join(f"{name} {told - wrong}" for name, wrong in verdict.wrong_yardsticks.items())
    return f"{told - verdict.wrong} of {told} ({others})"


def all_reduce_table(rows: Sequence[ScoreRow]) -> Table:
    """One line a question and number of GPUs: means of absolute errors over the sizes that count."""
    table = []
    for (case, group), members in grouped(rows).items():
        shown = [row for row in members if row.counts] or members
        small = [row for row in shown if _size(row) <= BORDER_BYTES]
        large = [row for row in shown if _size(row) > BORDER_BYTES]
        table.append(
            {
                "name": f"{case}: {group}" + ("" if members[-1].counts else " *"),
                "from": shown[0].calibrated,
                "error": f"{mean_error([row.error for row in shown]):.1%}",
                SMALL: _mean(small),
                LARGE: _mean(large),
                "worst": f"{max((row.error for row in shown), key=abs):+.0%}",
                "ring factor": f"{mean_error([row.yardstick_error('ring factor') for row in shown]):.1%}",
                "extrapolate": f"{mean_error([row.yardstick_error('extrapolate') for row in shown]):.1%}",
            }
        )
    return table


def _size(row: ScoreRow) -> int:
    return int(row.what.split()[0])


def _mean(rows: Sequence[ScoreRow]) -> str:
    return f"{mean_error([row.error for row in rows]):.1%}" if rows else ""


def iteration_table(rows: Sequence[ScoreRow]) -> Table:
    """One line a cell; parts (b), (c) and (d)."""
    return [
        {
            "name": f"{row.case}: {row.group}, {row.what}",
            "from": row.calibrated,
            "measured": f"{row.measured_ns / 1e6:.1f} ms",
            "predicted": f"{row.predicted_ns / 1e6:.1f} ms",
            "error": f"{row.error:+.1%}",
            **{name: f"{row.yardstick_error(name):+.0%}" for name in row.yardsticks_ns},
        }
        for row in rows
    ]


def contest_table(contests: Sequence[WinnerTally]) -> Table:
    """One line a contest."""
    return [
        {
            "name": f"{contest.case}: {contest.what}",
            "measured": contest.measured,
            "lead": f"{contest.lead:.1%}",
            "predicted": contest.predicted,
            "right": "tie" if contest.is_tie else "yes" if contest.is_right else "no",
            **{f"by {name}": who for name, who in contest.yardsticks.items()},
        }
        for contest in contests
    ]


def run_table(runs: Sequence[Run]) -> Table:
    """One line a committed run."""
    return [
        {
            "name": run.name,
            "from": run.source,
            "error": f"{run.now.mape:.1%}",
            "worst": f"{run.now.worst_error:+.1%}",
            "drift": f"{run.now.drift:+.0%}",
            "paired": f"{run.now.paired_mape:.1%}",
            "said before": f"{run.reported.mape:.1%}, paired {run.reported.paired_mape:.1%}",
            "ranked wrongly": f"{run.now.sign_errors} of {run.now.pairs_apart}",
            "iterations inside the interval": f"{run.now.coverage:.0%}",
        }
        for run in runs
    ]


def markdown(table: Table) -> str:
    """As a Markdown table: the first column to the left, the others to the right; at least one row."""
    names = list(dict.fromkeys(name for row in table for name in row))
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *([row.get(name, "") for name in names] for row in table)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
