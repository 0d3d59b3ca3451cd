"""Time lost with each bucket cap against the best buckets, over the whole catalogue: the mean and the worst."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes

from .drawing import Lane, draw_lanes, render, save

TITLE = "Time lost by the choice of the bucket size"
SIZE = (8.0, 4.0)
TABLE = Path(__file__).parents[1] / "validation" / "data" / "bucket_caps.csv"
NAMES = {
    "cap 5": "5 MB",
    "cap 10": "10 MB",
    "torch's default": "torch's default\n(25 MB, the first 1 MB)",
    "cap 50": "50 MB",
    "cap 100": "100 MB",
    "cap 250": "250 MB",
    "cap inf": "one bucket",
    "rule, one cap": "the rule, as one cap",
    "rule x 1": "the rule",
}
"""Columns of the table, and what they are in the figure."""
OURS, OTHERS = "tab:blue", "0.45"

Lost = Mapping[str, Sequence[float]]


def panels() -> list[Lost]:
    """Time lost in each predicted training against the best buckets there, in percent, by column."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: [100 * (float(row[name]) / float(row["best"]) - 1) for row in rows] for name in NAMES}]


def draw(data: Lost, ax: Axes) -> Axes:
    """Draw one line for each cap, from its mean to its worst loss."""
    lanes = [
        Lane(NAMES[name], fmean(lost), max(lost), OURS if name.startswith("rule") else OTHERS)
        for name, lost in data.items()
    ]
    xlabel = "how much longer an iteration takes than with the best buckets"
    return draw_lanes(lanes, ax, limits=(0.35, 900), xlabel=xlabel)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    (data,) = panels()
    mean = {name: fmean(lost) for name, lost in data.items()}
    worst = {name: max(lost) for name, lost in data.items()}
    default, rule = "torch's default", "rule x 1"
    return (
        f"No single size suits all trainings: with torch's default an iteration takes {mean[default]:.1f} % longer "
        f"than with the best buckets on average and {worst[default]:.0f} % at worst, with [a rule of three "
        f"times](../docs/bucket_size.md) {mean[rule]:.1f} % and {worst[rule]:.1f} %. {len(data[rule]):,} predicted "
        "trainings: the models and nodes of the catalogue and four slow networks, on 16, 128 and 1,024 GPUs "
        "(`python -m validation.bucket_cap_study`). The best buckets are those that `tune` finds. Predicted, not "
        "measured."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE)


if __name__ == "__main__":
    save("bucket_caps", files())
