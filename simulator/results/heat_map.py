"""Heat map of a sweep: shows two axes, and in each cell the fastest settings of the reducer.

Trace, fabric and world size are given; no cell chooses one of them. Bucket cap, order and comm hook can be chosen, so
cells that are not on their axes name the fastest.
"""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...reference.bucketing import cap_name

NAMES = {
    "trace": "trace",
    "fabric": "fabric",
    "world_size": "ranks",
    "bucket_cap_mb": "bucket cap",
    "order": "order",
    "hook": "comm hook",
}
GIVEN = ("trace", "fabric", "world_size")
"""Axes that are not a choice: each of their values needs a map of its own, unless it is shown as rows or columns."""


def draw_heat_maps(
    table: pd.DataFrame,
    figure: Figure,
    *,
    rows: str = "bucket_cap_mb",
    columns: str = "world_size",
) -> list[Axes]:
    """Draw one map of efficiencies for each combination of trace, fabric and world size that is not on an axis.

    Each cell shows the configuration with the least `iteration_ns`, or the first of several with the same, and names
    its settings that are not on an axis and were swept. A cell without configurations stays empty.

    Args:
        table: The table that `simulator.sweep` returned, or some of its rows.
        figure: The figure to draw on, which gets the axes.
        rows: Axis of the sweep for the rows of the maps.
        columns: Axis of the sweep for the columns of the maps.

    Raises:
        ValueError: `rows` or `columns` is not an axis of a sweep, both are the same, or the table has no rows.
    """
    others = [name for name in NAMES if name != rows]
    for argument, name, names in (("rows", rows, [*NAMES]), ("columns", columns, others)):
        if name not in names:
            raise ValueError(f"{argument}: expected one of {', '.join(names)}; got {name!r}")
    if table.empty:
        raise ValueError("table: expected at least one row to draw, got none")
    hidden = [axis for axis in GIVEN if axis not in (rows, columns) and table[axis].nunique() > 1]
    parts = list(_titled(table, hidden)) if hidden else [("", table)]
    panels = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
    for ax, (title, part) in zip(panels, parts, strict=True):
        _draw(part, ax, rows, columns)
        if title:
            ax.set_title(f"{title}: {ax.get_title(loc='left')}", loc="left", fontsize=10)
    return list(panels)


def _draw(table: pd.DataFrame, ax: Axes, rows: str, columns: str) -> None:
    table = table.reset_index(drop=True)
    row_of, row_labels = pd.factorize(pd.Index(table[rows]), use_na_sentinel=False)
    column_of, column_labels = pd.factorize(pd.Index(table[columns]), use_na_sentinel=False)
    places = table.groupby([row_of, column_of])["iteration_ns"].idxmin()
    fastest = dict(zip(places.index, places, strict=True))
    cells = np.full((len(row_labels), len(column_labels)), np.nan)
    for cell, place in fastest.items():
        cells[cell] = table["efficiency"][place]
    image = ax.imshow(cells, aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0)
    chosen = [axis for axis in NAMES if axis not in (rows, columns, *GIVEN) and table[axis].map(str).nunique() > 1]
    for (row, column), place in fastest.items():
        shown = cells[row, column]
        settings = "".join(f"\n{_label(axis, table[axis][place])}" for axis in chosen)
        color = "black" if sum(image.cmap(image.norm(shown))[:3]) > 1.5 else "white"
        ax.text(column, row, f"{shown:.0%}{settings}", ha="center", va="center", fontsize=7, color=color)
    ax.set_xticks(range(len(column_labels)), [_label(columns, label) for label in column_labels], fontsize=8)
    ax.set_yticks(range(len(row_labels)), [_label(rows, label) for label in row_labels], fontsize=8)
    ax.set_xlabel(NAMES[columns])
    ax.set_ylabel(NAMES[rows])
    names = " and ".join(NAMES[axis] for axis in chosen)
    ax.set_title(f"efficiency, with the fastest {names}" if chosen else "efficiency", loc="left", fontsize=10)
    ax.figure.colorbar(image, ax=ax, fraction=0.04)


def _titled(table: pd.DataFrame, hidden: list[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Split the table by the values of hidden axes, which are the title of each part."""
    for values, part in table.groupby(hidden, sort=False):
        names = zip(hidden, values, strict=True)
        yield ", ".join(f"{value} ranks" if axis == "world_size" else str(value) for axis, value in names), part


def _label(axis: str, value: object) -> str:
    if axis != "bucket_cap_mb" or isinstance(value, str):
        return str(value)
    cap = float(str(value))
    return "default" if math.isnan(cap) else cap_name(cap)
