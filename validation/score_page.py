"""The score page: its tables and notes, for the terminal and for Markdown, and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .comparison import LIMITS, TITLES, Comparison, FastestChoice, Part, Verdict, grouped, mean_absolute
from .part_d_runs import CommittedRun

Table = list[dict[str, str]]
"""Rows of cells by column title."""

INTRO = """\
# The score

`make score` writes this page; [README.md](README.md) describes the method. An error is predicted / measured - 1; a
mean error is a mean of absolute values.

"""
NOTES: dict[Part, str] = {
    "a": "Means are over messages of 256 KiB and more. *Ring factor* and *extrapolate* (the simulator's own growth)"
    " are baselines. *: the input table of one node was measured on another system; the limit does not apply.",
    "b": "*Perfect scaling* is one GPU without DDP; *no overlap* and *naive overlap* start from one GPU with DDP.",
    "c": "*Perfect scaling* is one GPU; *naive overlap* is the same ring without slow-down and copies.",
    "d": "Measured by the clock, on two shared cores whose speed changes by the minute; the baselines too.",
}
FASTEST_NOTE = (
    "*Lead* is how much longer the second fastest took. In a tie the measurements cannot separate the two, and no"
    " prediction counts as right or wrong."
)
RUN_NOTE = (
    "*Error* compares with the clock. *Drift* is how much longer the speed check took during the target runs than the"
    " calibration predicts. *Paired error* compares after the machine's speed beside each turn has been taken out"
    " (DESIGN.md, Noise). *Errors as first predicted* belong to the predictions that were on disk before the first"
    " target run. *Ranked wrongly* counts pairs of configurations that differ by more than noise."
)
WORST_OF_RUN = 0.08
"""Largest error that the target allows for a single configuration of a run."""
STEADY_DRIFT = 0.03
"""Drift up to which a machine counts as steady: the largest mean error that the target allows for a run."""
SMALL, LARGE = "256 KiB-16 MiB", "above 16 MiB"
BORDER_BYTES = 16 * 2**20

COLORS: dict[Part, str] = {"a": "#8d99ae", "b": "#2a9d8f", "c": "#d1495b", "d": "#edae49"}
BAND = 0.1
MS = 1e6


@dataclass(frozen=True)
class Section:
    """A titled table of the page, with an explanation."""

    title: str
    note: str
    table: Table


def sections(
    verdicts: Sequence[Verdict],
    rows: Sequence[Comparison],
    choices: Sequence[FastestChoice],
    runs: Sequence[CommittedRun],
) -> list[Section]:
    """All sections of the page in reading order; parts without rows are left out."""
    shown = [Section("Score", "", verdict_table(verdicts))]
    for part, title in TITLES.items():
        of_part = [row for row in rows if row.part == part]
        if not of_part:
            continue
        table = all_reduce_table(of_part) if part == "a" else iteration_table(of_part)
        shown.append(Section(f"({part}) {title}", NOTES[part], table))
        if chosen := [choice for choice in choices if choice.part == part]:
            shown.append(Section(f"({part}) which is fastest", FASTEST_NOTE, fastest_table(chosen)))
    if runs:
        shown.append(Section("(d) run by run", run_note(runs), run_table(runs)))
    return shown


def as_markdown(shown: Sequence[Section]) -> str:
    """The whole page."""
    parts = [
        f"## {section.title}\n\n" + (f"{section.note}\n\n" if section.note else "") + markdown(section.table)
        for section in shown
    ]
    return INTRO + "![Predicted against measured times of all rows](score.png)\n\n" + "\n".join(parts)


def markdown(table: Table) -> str:
    """A Markdown table of at least one row; its first column is left-aligned, the others are right-aligned."""
    names = list(dict.fromkeys(name for row in table for name in row))
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *([row.get(name, "") for name in names] for row in table)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """One row for each part."""
    return [
        {
            "name": f"({verdict.part}) {TITLES[verdict.part]}",
            "limit": f"{LIMITS[verdict.part]:.0%}",
            "within the limit": f"{verdict.within} of {verdict.checked}",
            "mean error": f"{verdict.mean:.1%}",
            "worst error": f"{verdict.worst:+.1%}",
            "baselines, mean error": ", ".join(f"{name} {error:.1%}" for name, error in verdict.baselines.items()),
            "right winner": _right_winners(verdict),
            "met": "yes" if verdict.is_met else "no",
        }
        for verdict in verdicts
    ]


def _right_winners(verdict: Verdict) -> str:
    if not verdict.choices:
        return ""
    decided = verdict.choices - verdict.ties
    baselines = ", ".join(f"{name} {decided - wrong}" for name, wrong in verdict.wrong_by_baseline.items())
    return f"{decided - verdict.wrong} of {decided} ({baselines})"


def all_reduce_table(rows: Sequence[Comparison]) -> Table:
    """One row for each question and number of GPUs: mean absolute errors over the sizes that count."""
    table = []
    for (case, group), members in grouped(rows).items():
        shown = [row for row in members if row.counts] or members
        table.append(
            {
                "name": f"{case}: {group}" + ("" if members[-1].counts else " *"),
                "calibrated from": shown[0].calibrated_from,
                "mean error": _mean_error(shown),
                SMALL: _mean_error([row for row in shown if _size_bytes(row) <= BORDER_BYTES]),
                LARGE: _mean_error([row for row in shown if _size_bytes(row) > BORDER_BYTES]),
                "worst error": f"{max((row.error for row in shown), key=abs):+.0%}",
                **{
                    name: f"{mean_absolute([row.baseline_error(name) for row in shown]):.1%}"
                    for name in ("ring factor", "extrapolate")
                },
            }
        )
    return table


def _size_bytes(row: Comparison) -> int:
    return int(row.label.split()[0])


def _mean_error(rows: Sequence[Comparison]) -> str:
    return f"{mean_absolute([row.error for row in rows]):.1%}" if rows else ""


def iteration_table(rows: Sequence[Comparison]) -> Table:
    """One row for each prediction of an iteration, in parts (b), (c) and (d)."""
    return [
        {
            "name": f"{row.case}: {row.group}, {row.label}",
            "calibrated from": row.calibrated_from,
            "measured": f"{row.measured_ns / MS:.1f} ms",
            "predicted": f"{row.predicted_ns / MS:.1f} ms",
            "error": f"{row.error:+.1%}",
            **{name: f"{row.baseline_error(name):+.0%}" for name in row.baselines_ns},
        }
        for row in rows
    ]


def fastest_table(choices: Sequence[FastestChoice]) -> Table:
    """One row for each choice of the fastest configuration."""
    return [
        {
            "name": f"{choice.case}: {choice.label}",
            "fastest": choice.measured,
            "lead": f"{choice.lead:.1%}",
            "predicted fastest": choice.predicted,
            "right": "tie" if choice.is_tie else "yes" if choice.is_right else "no",
            **{f"by {name}": predicted for name, predicted in choice.baselines.items()},
        }
        for choice in choices
    ]


def run_table(runs: Sequence[CommittedRun]) -> Table:
    """One row for each committed run."""
    return [
        {
            "name": run.name,
            "calibrated from": run.source,
            "mean error": f"{run.current.mape:.1%}",
            "worst error": f"{run.current.worst_error:+.1%}",
            "drift": f"{run.current.drift:+.0%}",
            "mean paired error": f"{run.current.paired_mape:.1%}",
            "errors as first predicted": f"{run.recorded.mape:.1%}, paired {run.recorded.paired_mape:.1%}",
            "ranked wrongly": f"{run.current.sign_errors} of {run.current.pairs_apart}",
            "iterations inside the interval": f"{run.current.coverage:.0%}",
        }
        for run in runs
    ]


def run_note(runs: Sequence[CommittedRun]) -> str:
    """Explains the columns of the table of runs, and gives the errors of the runs on a steady machine."""
    steady = [run for run in runs if run.current.drift is not None and abs(run.current.drift) <= STEADY_DRIFT]
    if not steady:
        return RUN_NOTE
    errors = [abs(row.error) for run in steady for row in run.current.rows]
    within = sum(error <= WORST_OF_RUN for error in errors)
    return (
        f"{RUN_NOTE} In {len(steady)} of the {len(runs)} runs the drift is at most {STEADY_DRIFT:.0%}. In these runs"
        f" the mean error by the clock is {fmean(run.current.mape for run in steady):.1%}, and {within} of"
        f" {len(errors)} configurations are within {WORST_OF_RUN:.0%}."
    )


def as_picture(rows: Sequence[Comparison]) -> bytes:
    """PNG of both plots; equal rows give equal bytes."""
    figure = Figure(figsize=(7, 8), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    draw(rows, top)
    draw_errors(rows, bottom)
    data = BytesIO()
    figure.savefig(data, format="png", dpi=120, metadata={"Software": None})
    return data.getvalue()


def draw(rows: Sequence[Comparison], ax: Axes) -> Axes:
    """Plot predicted over measured milliseconds on logarithmic axes: one dot for each row that counts."""
    shown = [row.measured_ns / MS for row in rows if row.counts]
    ends = [min(shown) / 2, max(shown) * 2]
    ax.plot(ends, ends, color="#1b1b1b", linewidth=0.8)
    for part, title in TITLES.items():
        members = [row for row in rows if row.part == part and row.counts]
        ax.scatter(
            [row.measured_ns / MS for row in members],
            [row.predicted_ns / MS for row in members],
            s=14,
            color=COLORS[part],
            label=f"({part}) {title}",
            alpha=0.7,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylabel("predicted, ms")
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    return _without_frame(ax)


def draw_errors(rows: Sequence[Comparison], ax: Axes) -> Axes:
    """Plot the error of each row that counts, in percent, over its measured milliseconds, with a band of 10 %."""
    ax.axhspan(-100 * BAND, 100 * BAND, color="#eeeeee")
    for part in TITLES:
        members = [row for row in rows if row.part == part and row.counts]
        times, errors = [row.measured_ns / MS for row in members], [100 * row.error for row in members]
        ax.scatter(times, errors, s=14, color=COLORS[part], alpha=0.7)
    ax.set_xscale("log")
    ax.set_xlabel("measured, ms")
    ax.set_ylabel("error, %; grey: within 10 %")
    return _without_frame(ax)


def _without_frame(ax: Axes) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    return ax
