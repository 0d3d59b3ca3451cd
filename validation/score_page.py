"""The score page: its tables and notes, for the terminal and for Markdown, and its picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddplab.simulator.baseline_predictions import BASELINES
from ddplab.simulator.fabric.cost_curves import BAND
from ddplab.simulator.inputs_with_default_costs import STALL_NS
from ddplab.simulator.plot_colours import INK
from ddplab.simulator.plot_colours import SMALL as SMALL_COLOUR

from .comparison import (
    LIMITS,
    REGIMES,
    TITLES,
    Comparison,
    FastestChoice,
    Part,
    Verdict,
    grouped,
    mean_absolute,
    weighted_quantile,
)
from .part_fg_runs import CommittedRun, Ranking, interval_score, mean_interval_score, ranking
from .part_i_weak_scaling import LeftOut
from .part_j_plan import LEAST_INSIDE, Inside, count_inside
from .residual_plot import MARKS, OURS, SMALL_ERROR

Table = list[dict[str, str]]
"""Rows of cells by column title."""

INTRO = """\
# The score

`make score` writes this page; [README.md](README.md) describes the method. An error is predicted / measured - 1; a
mean error is a mean of absolute values. *Inside*, *half-width* and *interval score* of a part are explained above the
first table *within and beyond one node*.

![Errors of the predictions of each part beside the errors of simpler predictions, with a band of 10 %](score.png)

"""
NOTES: dict[Part, str] = {
    "a": "Means are over messages of 256 KiB and more. *Ring factor* is a baseline: the largest input table times"
    " the ratio of 2 (n - 1) / n, or that of an endless message over the slowest link. *: no limit applies, because"
    " the input table of one node is from another system, or there is none.",
    "b": "*Perfect scaling* is one GPU without DDP; the other baselines start from one GPU with DDP.",
    "c": "*Perfect scaling* is one GPU.",
    "d": "The error is that of the ratio to one GPU, which is given.",
    "e": "Errors contain that of the iteration without communication; only rankings have a limit.",
    "f": "The reducer, its processes and their network are real; the devices sleep for recorded times.",
    "h": "Checks the import of profiles, the replay, and copies and launches on one GPU, not the costs of a network."
    " In the recommendation model, all-to-alls and parameters outside DDP take longer than the all-reduces, so all"
    " methods but *no overlap* are exact. Medians of the H200's steps do not count: one GPU sends nothing.",
    "g": "By the clock, on two shared cores whose speed changes by the minute.",
    "i": "As by the commands, from what a buyer knows: the iteration on one GPU, the model, data sheets. *Perfect"
    " scaling* is one GPU. From more GPUs, each method predicts the ratio to the known iteration.",
}
METHODS_NOTE = (
    "All rows of parts (b) to (i). *Mean error* and *worst error* are over all rows; the others are mean errors"
    " of one part, and the smallest of each is bold. Other simulators are on [the board](data/board/README.md)."
)
LEFT_OUT_NOTE = (
    "Each system predicted without its own measurements: the stall of each bucket is the least-squares fit of the"
    " other systems' errors, and intervals are stretched by the factor with which they contain nine in ten of the"
    " others' measurements. Before the arrow: as in the score."
)
ANCHORED_NOTE = (
    "Runs on three numbers of GPUs or more: the iterations on the two smallest are given as `--measured`."
    " Before the arrow: the same rows in the score."
)
SIGNS_NOTE = (
    "Rows beyond one node whose prediction is too fast or too slow. *Systems*: by the mean of their signed errors."
)
PLAN_NOTE = (
    "The rows of (d) and (i) that start from the iteration on one GPU, as `ddplab plan --step-ms` does; the limit is"
    f" {LEAST_INSIDE:.0%} of all rows."
)
FASTEST_NOTE = (
    "*Lead* is how much longer the second fastest took. In a tie the measurements cannot separate the two, and no"
    " prediction counts as right or wrong."
)
INTERVAL_NOTE = (
    "*Inside*: measurements in the predicted 90 % interval. *Half-width*: of the interval, over the prediction;"
    " median and largest. *Interval score*: as in (f). *Added later*: systems that were predicted with constants set"
    " before their measurements were known."
)
RUN_NOTE = (
    "*Noise floor*: nine in ten repeated measurements of a configuration differ by less. *Half-width* is that of the"
    " predicted 90 % interval, the median over the configurations. *Interval score*: mean width of the interval plus"
    " 20 times the distance of each iteration outside it, over the measured time (Gneiting and Raftery, 2007);"
    " *constant* is that of an interval of one width for all runs, which holds nine in ten iterations of the other"
    " runs. *First error* is that of the predictions that were on disk before the first target run."
)
SMALL, LARGE = "256 KiB-16 MiB", "above 16 MiB"
BORDER_BYTES = 16 * 2**20

SHOWN = 0.8
"""Largest error that the picture shows, as a fraction."""
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
    left_out: Sequence[LeftOut],
    anchored: Sequence[tuple[Comparison, Comparison]],
) -> list[Section]:
    """All sections of the page in reading order, by regime; parts without rows are left out."""
    shown = []
    if iterations := [row for row in rows if row.part != "a" and row.counts]:
        shown.append(Section("Every method over all iterations", METHODS_NOTE, method_table(iterations)))
    for regime, parts in REGIMES.items():
        of_regime = [verdict for verdict in verdicts if verdict.part in parts]
        if not of_regime:
            continue
        shown.append(
            Section(regime[0].upper() + regime[1:], "", [verdict_row(verdict, rows, runs) for verdict in of_regime])
        )
        for verdict in of_regime:
            shown += _part_sections(verdict.part, rows, choices, runs)
            if verdict.part == "i" and left_out:
                shown.append(Section("(i) each system by the others", LEFT_OUT_NOTE, left_out_table(left_out)))
            if verdict.part == "i" and (signs := sign_table(rows)):
                shown.append(Section("(i) signs beyond one node", SIGNS_NOTE, signs))
            if verdict.part == "i" and anchored:
                shown.append(Section("(i) with measured iterations", ANCHORED_NOTE, anchored_table(anchored)))
            if verdict.part == "i" and (planned := count_inside(rows)):
                shown.append(Section("(j) measured throughput in a plan's range", PLAN_NOTE, plan_table(planned)))
    return shown


def method_table(rows: Sequence[Comparison]) -> Table:
    """One row for each method: its errors over all rows, and its mean error in each part."""
    methods = (OURS, *BASELINES)
    errors = {method: _errors(rows, method) for method in methods}
    table = [
        {
            "name": method,
            "rows": str(len(rows)),
            "mean error": f"{mean_absolute(errors[method]):.1%}",
            "worst error": f"{max(errors[method], key=abs):+.1%}",
        }
        for method in methods
    ]
    for part in TITLES:
        if members := [row for row in rows if row.part == part]:
            means = [round(mean_absolute(_errors(members, method)), 3) for method in methods]
            for row, mean in zip(table, means, strict=True):
                row[f"({part})"] = f"**{mean:.1%}**" if mean == min(means) else f"{mean:.1%}"
    return table


def left_out_table(systems: Sequence[LeftOut]) -> Table:
    """One row for each system: its errors and intervals in the score, and with the constants of the other systems."""

    def both(system: LeftOut, of: Callable[[Sequence[Comparison]], str]) -> str:
        return f"{of(system.rows)} -> {of(system.again)}"

    return [
        {
            "name": system.rows[0].case,
            "rows": str(len(system.rows)),
            "stall": f"{STALL_NS / 1e3:.0f} -> {system.stall_ns / 1e3:.0f} us",
            "stretched by": f"{system.stretch:.2f}",
            "mean error": both(system, _mean_error),
            "inside": both(system, lambda rows: str(sum(row.is_inside for row in rows))),
            "half-width": both(system, lambda rows: f"{median(row.half_width for row in rows):.1%}"),
            "interval score": both(system, lambda rows: f"{fmean(row.interval_score for row in rows):.0%}"),
        }
        for system in systems
    ]


def sign_table(rows: Sequence[Comparison]) -> Table:
    """How many rows of (i) beyond one node have which sign: by system, of all, and systems by their means."""
    systems: dict[str, list[float]] = {}
    for row in rows:
        if row.part == "i" and row.counts and row.several_nodes:
            systems.setdefault(row.case, []).append(row.error)
    if not systems:
        return []
    systems |= {
        "all": [error for errors in systems.values() for error in errors],
        "systems": [fmean(errors) for errors in systems.values()],
    }
    return [
        {
            "name": name,
            "rows": str(len(errors)),
            "too fast": str(sum(error < 0 for error in errors)),
            "too slow": str(sum(error > 0 for error in errors)),
            "mean of signed errors": f"{fmean(errors):+.1%}",
        }
        for name, errors in systems.items()
    ]


def anchored_table(pairs: Sequence[tuple[Comparison, Comparison]]) -> Table:
    """One row for one node and one for several: errors and intervals without and with measured times."""
    table = []
    for name, several_nodes in (("one node", False), ("several nodes", True)):
        before, after = ([pair[at] for pair in pairs if pair[0].several_nodes == several_nodes] for at in (0, 1))
        if not before:
            continue
        table.append(
            {
                "name": name,
                "rows": str(len(before)),
                "mean error": f"{_mean_error(before)} -> {_mean_error(after)}",
                "too fast": " -> ".join(str(sum(row.error < 0 for row in rows)) for rows in (before, after)),
                "inside": " -> ".join(str(sum(row.is_inside for row in rows)) for rows in (before, after)),
                "half-width": " -> ".join(
                    f"{median(row.half_width for row in rows):.1%}" for rows in (before, after)
                ),
            }
        )
    return table


def plan_table(planned: Sequence[Inside]) -> Table:
    """One row for one node, one for several, and one for both, with the limit."""
    return [
        {
            "name": one.kind,
            "rows": str(one.rows),
            "inside": f"{one.inside} ({one.inside / one.rows:.0%})",
            "met": ("yes" if one.is_met else "no") if one.kind == planned[-1].kind else "",
        }
        for one in planned
    ]


def _part_sections(
    part: Part, rows: Sequence[Comparison], choices: Sequence[FastestChoice], runs: Sequence[CommittedRun]
) -> list[Section]:
    of_part = [row for row in rows if row.part == part]
    table = all_reduce_table(of_part) if part == "a" else iteration_table(of_part)
    shown = [Section(f"({part}) {TITLES[part]}", NOTES[part], table)]
    compared = _with_interval(of_part)
    if any(row.several_nodes for row in compared):
        shown.append(Section(f"({part}) within and beyond one node", INTERVAL_NOTE, interval_table(compared)))
    if chosen := [choice for choice in choices if choice.part == part]:
        shown.append(Section(f"({part}) which is fastest", FASTEST_NOTE, fastest_table(chosen)))
    if of_runs := [run for run in runs if run.part == part]:
        shown.append(Section(f"({part}) run by run", RUN_NOTE, run_table(of_runs)))
    return shown


def as_markdown(shown: Sequence[Section]) -> str:
    """The whole page."""
    parts = [
        f"{'###' if section.title.startswith('(') else '##'} {section.title}\n\n"
        + (f"{section.note}\n\n" if section.note else "")
        + markdown(section.table)
        for section in shown
    ]
    return INTRO + "\n".join(parts)


def markdown(table: Table) -> str:
    """A Markdown table; its first column is left-aligned, the others are right-aligned. Without rows: nothing."""
    if not table:
        return ""
    names = list(dict.fromkeys(name for row in table for name in row))
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *([row.get(name, "") for name in names] for row in table)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def verdict_row(verdict: Verdict, rows: Sequence[Comparison], runs: Sequence[CommittedRun]) -> dict[str, str]:
    """One row for a part."""
    of_part = [run for run in runs if run.part == verdict.part]
    compared = _with_interval([row for row in rows if row.part == verdict.part])
    limit = LIMITS[verdict.part]
    row = {
        "name": f"({verdict.part}) {TITLES[verdict.part]}",
        "mean error": f"{verdict.mean:.1%}" + _limit(limit.mean),
        "worst error": f"{verdict.worst:+.1%}" + _limit(limit.worst),
        "baselines, mean error": ", ".join(f"{name} {error:.1%}" for name, error in verdict.baselines.items()),
        "right rankings": _right_rankings(verdict, ranking(of_part)),
    }
    if of_part:
        reports = [run.current for run in of_part]
        row["inside"] = f"{fmean(report.coverage for report in reports):.0%} of the iterations"
        row["half-width"] = f"{median(report.half_width for report in reports):.1%}"
        row["interval score"] = f"{fmean(map(mean_interval_score, reports)):.0%}"
        row["noise floor"] = f"{median(report.noise or 0.0 for report in reports):.1%}"
    elif compared:
        row |= _interval_cells(compared)
    return row | {"met": "yes" if verdict.is_met else "no"}


def _limit(limit: float | None) -> str:
    return "" if limit is None else f" (limit {limit:.0%})"


def _right_rankings(verdict: Verdict, pairs: Ranking) -> str:
    """How often each method ranks rightly: pairs of committed runs, or fastest choices; "" if nearly all are ties."""
    decided, wrong, by_baseline = verdict.choices - verdict.ties, verdict.wrong, verdict.wrong_by_baseline
    if pairs.pairs:
        decided, wrong, by_baseline = pairs.pairs, pairs.wrong, pairs.wrong_by_baseline
    elif 2 * decided < verdict.choices or not decided:
        return ""
    baselines = ", ".join(f"{name} {decided - of_baseline}" for name, of_baseline in by_baseline.items())
    return f"{decided - wrong} of {decided} ({baselines})"


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
                "mean of signed errors": f"{fmean(row.error for row in shown):+.1%}",
                **_interval_cells(shown),
                **{
                    name: f"{mean_absolute([row.baseline_error(name) for row in shown]):.1%}"
                    for name in ("ring factor",)
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
            **(_interval(row) if any(one.interval_ns for one in rows) else {}),
            **{name: f"{row.baseline_error(name):+.0%}" for name in row.baselines_ns},
        }
        for row in rows
    ]


def _interval(row: Comparison) -> dict[str, str]:
    if row.interval_ns is None:
        return {"90 % interval": ""}
    low, high = (ns / MS for ns in row.interval_ns)
    return {"90 % interval": f"{low:.1f} to {high:.1f} ms" + ("" if row.is_inside else ", outside")}


def interval_table(rows: Sequence[Comparison]) -> Table:
    """One row for the GPUs of one node, one for several nodes, and one for each system."""
    groups = {
        "one node": [row for row in rows if not row.several_nodes],
        "several nodes": [row for row in rows if row.several_nodes],
        "several nodes, added later": [row for row in rows if row.several_nodes and row.added_later],
    }
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return [
        {
            "name": name,
            "rows": str(len(members)),
            "mean error": _mean_error(members),
            "mean of signed errors": f"{fmean(row.error for row in members):+.1%}",
            **_interval_cells(members),
        }
        for name, members in groups.items()
        if members
    ]


def _with_interval(rows: Sequence[Comparison]) -> list[Comparison]:
    return [row for row in rows if row.counts and row.interval_ns is not None]


def _interval_cells(rows: Sequence[Comparison]) -> dict[str, str]:
    return {
        "inside": f"{sum(row.is_inside for row in rows)} of {len(rows)}",
        "half-width": " and ".join(f"{of([row.half_width for row in rows]):.1%}" for of in (median, max)),
        "interval score": f"{fmean(row.interval_score for row in rows):.0%}",
    }


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
    table = []
    for run in runs:
        report, ranks = run.current, ranking([run])
        row = {
            "name": run.name,
            "calibrated from": run.source,
            "mean error": f"{report.mape:.1%}",
            "worst error": f"{report.worst_error:+.1%}",
            "noise floor": "" if report.noise is None else f"{report.noise:.1%}",
            "first error": f"{run.recorded.mape:.1%}",
            "ranked wrongly": f"{ranks.wrong} of {ranks.pairs}",
            "inside the interval": f"{report.coverage:.0%}",
            "half-width": f"{report.half_width:.1%}",
            "interval score": f"{mean_interval_score(report):.0%}",
            "constant": f"{constant_interval_score(run, runs):.0%}",
        }
        table.append(row)
    return table


def constant_interval_score(run: CommittedRun, runs: Sequence[CommittedRun]) -> float:
    """Return the interval score of a run for prediction +- x %, with the x that nine in ten of other iterations need.

    Each other run has the same weight. A single run gets the x of its own iterations.
    """
    others = [other for other in runs if other.name != run.name] or [run]
    distances, weights = [], []
    for other in others:
        of_run = [abs(ns / row.predicted_ns - 1) for row in other.current.rows for ns in row.times_ns]
        distances += of_run
        weights += [1 / len(of_run)] * len(of_run)
    x = weighted_quantile(distances, weights, BAND)
    rows = run.current.rows
    return fmean(interval_score(row, ((1 - x) * row.predicted_ns, (1 + x) * row.predicted_ns)) for row in rows)


def as_picture(rows: Sequence[Comparison]) -> bytes:
    """PNG of all errors; equal rows give equal bytes."""
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    draw_errors(rows, figure.subplots())
    data = BytesIO()
    figure.savefig(data, format="png", dpi=120, metadata={"Software": None})
    return data.getvalue()


def draw_errors(rows: Sequence[Comparison], ax: Axes) -> Axes:
    """Plot the errors of all rows that count, in percent: for each part a lane of ours and one of each baseline.

    To its left stands its mean absolute error, as in the tables.
    """
    ax.axvspan(-100 * SMALL_ERROR, 100 * SMALL_ERROR, color=SMALL_COLOUR, zorder=0)
    ax.axvline(0, color=INK, linewidth=0.6)
    lanes, lane = [], 0.0
    for part, title in TITLES.items():
        members = [row for row in rows if row.part == part and row.counts]
        if not members:
            continue
        ax.text(-100 * SHOWN, lane, f"({part}) {title}", fontsize=8, fontweight="bold", va="center")
        for method in (OURS, *dict.fromkeys(name for row in members for name in row.baselines_ns)):
            lane += 1
            errors = _errors(members, method)
            _draw_lane(errors, lane, *MARKS[method], ax)
            of_groups = grouped(members).values() if part == "a" else [members]
            mean = fmean(mean_absolute(_errors(of_group, method)) for of_group in of_groups)
            lanes.append((lane, f"{method}  {mean:.1%}"))
        lane += 1.4
    ax.set_yticks([place for place, _ in lanes], [name for _, name in lanes], fontsize=7.5)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(lane - 0.7, -0.8)
    ax.set_xlim(-100 * SHOWN, 100 * SHOWN)
    ax.set_xlabel("error of the prediction, %; grey: within 10 %; left: mean absolute errors")
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def _errors(rows: Sequence[Comparison], method: str) -> list[float]:
    """Errors of a method, in the rows that have it."""
    return [
        row.error if method == OURS else row.baseline_error(method)
        for row in rows
        if method == OURS or method in row.baselines_ns
    ]


def _draw_lane(errors: Sequence[float], lane: float, marker: str, colour: str, ax: Axes) -> None:
    """Dots for all errors, and an arrow for those that the axes do not show."""
    for error in errors:
        if abs(error) <= SHOWN:
            ax.plot(100 * error, lane, marker, color=colour, markersize=3.5, markeredgewidth=0.9, alpha=0.55)
    for side in (-1, 1):
        beyond = [error for error in errors if error * side > SHOWN]
        if beyond:
            text = f"{max(beyond, key=abs):+.0%}"
            ax.text(
                side * 99 * SHOWN,
                lane,
                text,
                fontsize=7,
                color=colour,
                va="center",
                ha="left" if side < 0 else "right",
            )
