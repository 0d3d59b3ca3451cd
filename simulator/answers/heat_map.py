"""A sweep as a heat map: one axis of the table along each side, the best of all else in each cell."""

import math

import pandas as pd
from matplotlib.axes import Axes

from reference.bucketing import cap_name

NAMES = {
    "trace": "trace",
    "fabric": "fabric",
    "world_size": "ranks",
    "bucket_cap_mb": "bucket cap",
    "order": "order",
    "hook": "comm hook",
}


def draw_heat_map(
    table: pd.DataFrame, ax: Axes, *, x: str = "world_size", y: str = "bucket_cap_mb", value: str = "efficiency"
) -> Axes:
    """Draw a sweep's table.

    Args:
        table: What `simulator.sweep` returned.
        ax: Where; returned.
        x: The column along the horizontal axis.
        y: The column along the vertical axis.
        value: What to show; of several configurations in a cell the best: the highest efficiency, the least time.

    Raises:
        ValueError: A column that the table does not have.
    """
    for name in (x, y, value):
        if name not in table:
            raise ValueError(f"heat map: expected one of {', '.join(table.columns)}; got {name!r}")
    is_time = value.endswith("_ns")
    best = table.groupby([y, x], dropna=False, sort=False)[value].agg("min" if is_time else "max").unstack()
    cells = best.to_numpy() / (1e6 if is_time else 1)
    image = ax.imshow(cells, aspect="auto", cmap="viridis_r" if is_time else "viridis")
    ax.set_xticks(range(len(best.columns)), [_label(x, label) for label in best.columns], fontsize=8)
    ax.set_yticks(range(len(best.index)), [_label(y, label) for label in best.index], fontsize=8)
    middle = (cells.min() + cells.max()) / 2
    for row, column in [(r, c) for r in range(cells.shape[0]) for c in range(cells.shape[1])]:
        is_dark = (cells[row, column] > middle) == is_time
        text = f"{cells[row, column]:.0%}" if value == "efficiency" else f"{cells[row, column]:.4g}"
        ax.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if is_dark else "black")
    ax.set_xlabel(NAMES.get(x, x))
    ax.set_ylabel(NAMES.get(y, y))
    unit = f"{value.removesuffix('_ns').replace('_', ' ')}, ms" if is_time else value
    ax.set_title(f"{unit}: the best of all else", loc="left", fontsize=10)
    ax.figure.colorbar(image, ax=ax, fraction=0.04)
    return ax


def _label(column: str, value: object) -> str:
    if column == "bucket_cap_mb":
        cap = float(str(value))
        return "default" if math.isnan(cap) else cap_name(cap)
    return str(value)
