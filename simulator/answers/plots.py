"""Pictures: each function draws on the axes it is given and returns them."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reference.bucketing import cap_name

MEASURED, PREDICTED, YARDSTICK = "#1b1b1b", "#d1495b", "#8d99ae"


def validation_figure(rows: pd.DataFrame) -> Figure:
    """One panel a model, from the rows of a `Report`."""
    models = list(dict.fromkeys(rows["model"]))
    figure = Figure(figsize=(10, 3.6 * len(models)), layout="constrained")
    for position, model in enumerate(models):
        draw_validation(rows[rows["model"] == model], figure.add_subplot(len(models), 1, position + 1))
    return figure


def draw_validation(rows: pd.DataFrame, ax: Axes) -> Axes:
    """Measured (paired) and predicted iteration time of each configuration of one model, with the two yardsticks."""
    places = range(len(rows))
    measured = rows["paired_ns"] / 1e6
    low, high = zip(*rows["paired_quartiles_ns"], strict=True)
    spread = [measured - pd.Series(low, rows.index) / 1e6, pd.Series(high, rows.index) / 1e6 - measured]
    for column, label, marker in (
        ("perfect_scaling_error", "perfect scaling", "v"),
        ("no_overlap_error", "no overlap", "^"),
    ):
        ax.scatter(
            places, measured * (1 + rows[column]), marker=marker, s=26, color=YARDSTICK, label=label, zorder=1
        )  # fmt: skip
    ax.errorbar(
        places, measured, yerr=spread,
        fmt="o", color=MEASURED, capsize=3, markersize=6, label="measured, paired (quartiles)", zorder=2,
    )  # fmt: skip
    ax.scatter(
        places, rows["predicted_ns"] / 1e6,
        marker="D", s=46, facecolors="none", edgecolors=PREDICTED, linewidths=1.8, label="predicted", zorder=3,
    )  # fmt: skip
    labels = [f"{cap_name(cap)}\n{order}" for cap, order in zip(rows["cap_mb"], rows["order"], strict=True)]
    ax.set_xticks(list(places), labels, fontsize=8)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("iteration, ms")
    ax.set_title(
        f"{rows['model'].iloc[0]}: mean absolute error {rows['paired_error'].abs().mean():.1%} paired, "
        f"{rows['error'].abs().mean():.1%} by the clock",
        loc="left",
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    ax.legend(ncols=4, fontsize=8, frameon=False, loc="lower left")
    return ax
