"""Heat maps of sweeps: the configuration that a cell shows, labels, and errors."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from ddplab.simulator.results.heat_map import GIVEN, draw_heat_maps
from ddplab.simulator.sweep import AXES

from ..explore import examples

CAPS = (1.0, float("inf"), float("nan"))
CHOICES = {
    "trace": ("a", "b"),
    "fabric": ("x", "y"),
    "world_size": (2, 8),
    "bucket_cap_mb": CAPS,
    "order": ("ready", "size"),
    "hook": ("none", "fp16"),
}


@st.composite
def sweeps_tables(draw) -> pd.DataFrame:
    """Rows of a sweep, some left out: trace, fabric, ..., iteration_ns, efficiency."""
    cells = draw(st.lists(st.sampled_from(list(product(*CHOICES.values()))), min_size=1, max_size=12, unique=True))
    table = pd.DataFrame(cells, columns=AXES, index=draw(st.permutations(range(len(cells)))))
    table["iteration_ns"] = [draw(st.integers(1, 9)) * 10**6 for _ in cells]
    table["efficiency"] = [draw(st.integers(1, 100)) / 100 for _ in cells]
    return table


def same(one: object, other: object) -> bool:
    return one == other or (one != one and other != other)


@examples(20)
@given(sweeps_tables(), st.permutations(AXES))
def test_a_cell_shows_the_efficiency_of_its_fastest_settings(table, axes):
    """And no cell of any map chooses a trace, a fabric or a number of ranks."""
    rows, columns = axes[:2]
    hidden = [axis for axis in GIVEN if axis not in (rows, columns)]
    parts = [part for _, part in table.groupby(hidden, sort=False)] if hidden else [table]
    maps = draw_heat_maps(table, Figure(), rows=rows, columns=columns)
    assert len(maps) == len(parts)
    for ax, part in zip(maps, parts, strict=True):
        cells = np.ma.filled(ax.images[0].get_array(), np.nan)
        down, along = (list(dict.fromkeys(map(str, part[axis]))) for axis in (rows, columns))
        assert cells.shape == (len(down), len(along))
        for (row, column), cell in np.ndenumerate(cells):
            here = part[(part[rows].map(str) == down[row]) & (part[columns].map(str) == along[column])]
            if here.empty:
                assert np.isnan(cell)
            else:
                fastest = here[here["iteration_ns"] == here["iteration_ns"].min()].iloc[0]
                assert cell == fastest["efficiency"]
        assert len(ax.texts) == np.count_nonzero(~np.isnan(cells))
        assert ax.images[0].get_clim() == (0, 1)


def table_of(rows) -> pd.DataFrame:
    """Ranks, bucket cap, duration and efficiency of each row."""
    rows = [("a", "x", ranks, cap, "ready", "none", *values) for ranks, cap, *values in rows]
    return pd.DataFrame(rows, columns=[*AXES, "iteration_ns", "efficiency"])


def test_world_sizes_that_are_not_shown_get_a_map_each_and_chosen_settings_their_name():
    table = table_of((ranks, cap, 5 + cap, 1 / ranks) for ranks in (8, 64) for cap in (1.0, 25.0))
    small, large = draw_heat_maps(table, Figure(), rows="fabric", columns="trace")
    assert [text.get_text() for ax in (small, large) for text in ax.texts] == ["12%\n1 MB", "2%\n1 MB"]
    assert large.get_title(loc="left") == "64 ranks: efficiency, with the fastest bucket cap"


def test_axes_are_labelled_as_tables_are():
    table = table_of((ranks, cap, 5, 0.5) for ranks in (2, 4) for cap in CAPS)
    (ax,) = draw_heat_maps(table, Figure())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1 MB", "single", "default"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "4"]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("bucket cap", "ranks")
    assert ax.get_title(loc="left") == "efficiency"
    planned = table[table["world_size"] == 2].assign(bucket_cap_mb="plan")
    (planned,) = draw_heat_maps(planned, Figure(), columns="hook")
    assert [label.get_text() for label in planned.get_yticklabels()] == ["plan"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": "caps"}, r"^rows: expected one of trace, fabric, .*; got 'caps'$"),
        ({"rows": "hook", "columns": "hook"}, r"^columns: expected one of trace, .*, order; got 'hook'$"),
        ({}, r"^table: expected at least one row to draw, got none$"),
    ],
)
def test_an_error_names_the_argument_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_heat_maps(pd.DataFrame(columns=[*AXES, "iteration_ns"]), Figure(), **arguments)
