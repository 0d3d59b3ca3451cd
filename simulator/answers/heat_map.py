"""Heat map of a sweep: shows two axes, and in each cell the fastest configuration along all other axes."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

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
    table: pd.DataFrame,
    ax: Axes,
    *,
    rows: str = "bucket_cap_mb",
    columns: str = "world_size",
    value: str = "efficiency",
) -> Axes:
    """Draw the table of a sweep.

    Each cell shows the configuration with the least `iteration_ns`, or the first of several with the same. A cell
    without configurations stays empty.

    Args:
        table: The table that `simulator.sweep` returned, or some of its rows.
        ax: The axes to draw on; returned.
        rows: Axis of the sweep for the rows of the map.
        columns: Axis of the sweep for the columns of the map.
        value: The column of the table to show; columns of nanoseconds are shown in milliseconds.

    Raises:
        ValueError: `rows` or `columns` is not an axis of a sweep, both are the same, `value` is not a column of the
            table, or the table has no rows.
    """
    _check(table, rows, columns, value)
    is_time = value.endswith("_ns")
    cells, row_labels, column_labels = _fastest(table, rows, columns, value)
    cells = cells / 1e6 if is_time else cells
    image = ax.imshow(cells, aspect="auto", cmap="viridis_r" if is_time else "viridis")
    _write_cells(ax, cells, shows_share=value == "efficiency", dark_is_high=is_time)
    ax.set_xticks(range(len(column_labels)), [_label(columns, label) for label in column_labels], fontsize=8)
    ax.set_yticks(range(len(row_labels)), [_label(rows, label) for label in row_labels], fontsize=8)
    ax.set_xlabel(NAMES[columns])
    ax.set_ylabel(NAMES[rows])
    shown = f"{value.removesuffix('_ns').replace('_', ' ')}, ms" if is_time else value
    ax.set_title(f"{shown}: of the fastest configuration in each cell", loc="left", fontsize=10)
    ax.figure.colorbar(image, ax=ax, fraction=0.04)
    return ax


def _check(table: pd.DataFrame, rows: str, columns: str, value: str) -> None:
    axes, values = list(NAMES), [name for name in table.columns if name not in NAMES]
    others = [name for name in axes if name != rows]
    for argument, name, names in (("rows", rows, axes), ("columns", columns, others), ("value", value, values)):
        if name not in names:
            raise ValueError(f"{argument}: expected one of {', '.join(names)}; got {name!r}")
    if table.empty:
        raise ValueError("table: expected at least one row to draw, got none")


def _fastest(
    table: pd.DataFrame, rows: str, columns: str, value: str
) -> tuple[NDArray[np.float64], pd.Index, pd.Index]:
    """Return the value of each cell (NaN if empty), and the labels of rows and columns in the order of the table."""
    row_of, row_labels = pd.factorize(pd.Index(table[rows]), use_na_sentinel=False)
    column_of, column_labels = pd.factorize(pd.Index(table[columns]), use_na_sentinel=False)
    cells = np.full((len(row_labels), len(column_labels)), np.nan)
    by_time = table.reset_index(drop=True).sort_values("iteration_ns", kind="stable")
    first = by_time.drop_duplicates([rows, columns])
    cells[row_of[first.index], column_of[first.index]] = first[value]
    return cells, row_labels, column_labels


def _write_cells(ax: Axes, cells: NDArray[np.float64], *, shows_share: bool, dark_is_high: bool) -> None:
    """Write the value of each cell in black or white, whichever contrasts with the cell's colour."""
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for (row, column), cell in np.ndenumerate(cells):
        if not np.isnan(cell):
            is_dark = (cell > middle) == dark_is_high
            text = f"{cell:.0%}" if shows_share else f"{cell:.4g}"
            color = "white" if is_dark else "black"
            ax.text(column, row, text, ha="center", va="center", fontsize=7, color=color)


def _label(axis: str, value: object) -> str:
    if axis != "bucket_cap_mb" or isinstance(value, str):
        return str(value)
    cap = float(str(value))
    return "default" if math.isnan(cap) else cap_name(cap)
