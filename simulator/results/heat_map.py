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

from reference.bucketing import cap_name

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
    value: str = "efficiency",
) -> list[Axes]:
    """Draw one map for each combination of trace, fabric and world size that is not shown as rows or columns.

    Each cell shows the configuration with the least `iteration_ns`, or the first of several with the same, and names
    its settings that are not on an axis and were swept. A cell without configurations stays empty.

    Args:
        table: The table that `simulator.sweep` returned, or some of its rows.
        figure: The figure to draw on, which gets the axes.
        rows: Axis of the sweep for the rows of the maps.
        columns: Axis of the sweep for the columns of the maps.
        value: The column of the table to show; columns of nanoseconds are shown in milliseconds.

    Raises:
        ValueError: `rows` or `columns` is not an axis of a sweep, both are the same, `value` is not a column of the
            table, or the table has no rows.
    """
    _check(table, rows, columns, value)
    hidden = [axis for axis in GIVEN if axis not in (rows, columns) and table[axis].nunique() > 1]
    parts = list(_titled(table, hidden)) if hidden else [("", table)]
    panels = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
    for ax, (title, part) in zip(panels, parts, strict=True):
        _draw(part, ax, rows, columns, value)
        if title:
            ax.set_title(f"{title}: {ax.get_title(loc='left')}", loc="left", fontsize=10)
    return list(panels)


def _draw(table: pd.DataFrame, ax: Axes, rows: str, columns: str, value: str) -> None:
    table = table.reset_index(drop=True)
    row_of, row_labels = pd.factorize(pd.Index(table[rows]), use_na_sentinel=False)
    column_of, column_labels = pd.factorize(pd.Index(table[columns]), use_na_sentinel=False)
    places = table.groupby([row_of, column_of])["iteration_ns"].idxmin()
    fastest = dict(zip(places.index, places, strict=True))
    is_time = value.endswith("_ns")
    cells = np.full((len(row_labels), len(column_labels)), np.nan)
    values = table[value].astype("Float64").to_numpy(float, na_value=np.nan) / (1e6 if is_time else 1)
    for cell, place in fastest.items():
        cells[cell] = values[place]
    limits = (0.0, 1.0) if value == "efficiency" else (None, None)
    image = ax.imshow(
        cells, aspect="auto", cmap="viridis_r" if is_time else "viridis", vmin=limits[0], vmax=limits[1]
    )
    chosen = [axis for axis in NAMES if axis not in (rows, columns, *GIVEN) and table[axis].map(str).nunique() > 1]
    for (row, column), place in fastest.items():
        shown = cells[row, column]
        text = "unknown" if np.isnan(shown) else f"{shown:.0%}" if value == "efficiency" else f"{shown:.4g}"
        settings = "".join(f"\n{_label(axis, table[axis][place])}" for axis in chosen)
        color = "black" if np.isnan(shown) or sum(image.cmap(image.norm(shown))[:3]) > 1.5 else "white"
        ax.text(column, row, text + settings, ha="center", va="center", fontsize=7, color=color)
    ax.set_xticks(range(len(column_labels)), [_label(columns, label) for label in column_labels], fontsize=8)
    ax.set_yticks(range(len(row_labels)), [_label(rows, label) for label in row_labels], fontsize=8)
    ax.set_xlabel(NAMES[columns])
    ax.set_ylabel(NAMES[rows])
    title = f"{value.removesuffix('_ns').replace('_', ' ')}, ms" if is_time else value
    names = " and ".join(NAMES[axis] for axis in chosen)
    ax.set_title(f"{title}, with the fastest {names}" if chosen else title, loc="left", fontsize=10)
    ax.figure.colorbar(image, ax=ax, fraction=0.04)


def _check(table: pd.DataFrame, rows: str, columns: str, value: str) -> None:
    axes, values = list(NAMES), [name for name in table.columns if name not in NAMES]
    others = [name for name in axes if name != rows]
    for argument, name, names in (("rows", rows, axes), ("columns", columns, others), ("value", value, values)):
        if name not in names:
            raise ValueError(f"{argument}: expected one of {', '.join(names)}; got {name!r}")
    if table.empty:
        raise ValueError("table: expected at least one row to draw, got none")


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
