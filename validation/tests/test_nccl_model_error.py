"""NCCL's own cost model: its distance from published measurements."""

import numpy as np
import pandas as pd
import pytest

from ddplab.simulator.fabric.algorithms import BEYOND_THE_MODEL
from tests.simulator.test_nccl_cost_model import cheapest_us, links
from validation.nccl_model_error import DATA, covered, figures, measured


@pytest.mark.parametrize(("gpus", "rate"), [(4, 340e9), (8, 144e9), (16, 96e9), (32, 96e9), (64, 96e9)])
def test_latencies_and_rates_agree_with_measurements_on_alps(gpus, rate):
    table = pd.read_csv(DATA).query("system == 'Alps'").query("gpus == @gpus").set_index("bytes")["us"]
    nodes = gpus // 4
    levels = links(4, nodes, network=rate)
    small, large = cheapest_us(levels, [8, 2**30]) / table.loc[[8, 2**30]].to_numpy()
    assert abs(np.log(small)) < np.log(1.35)
    assert abs(large - 1) < 0.11


@pytest.mark.parametrize("several_nodes", [False, True])
def test_what_is_added_to_the_model_is_that_of_the_published_logs(several_nodes):
    found = measured(several_nodes=several_nodes)
    for kib, figure, deviation in BEYOND_THE_MODEL[several_nodes].T:
        ((size, computed),) = figures(found, [int(1024 * kib)], several_nodes=several_nodes).items()
        mean = computed[0] if several_nodes else np.exp(computed[0])
        assert figure == pytest.approx(mean, abs=0.006), size
        of_systems = sum(size in of_size for of_size in found.values())
        assert deviation == (pytest.approx(computed[1], abs=0.006) if of_systems >= 4 else 0.5), size


@pytest.mark.parametrize(
    ("several_nodes", "linked", "least"),
    [(False, True, 0.9), (True, True, 0.9), (False, False, 0.85), (True, False, 0.75)],
)
def test_published_times_beyond_a_table_that_was_cut_off_lie_in_the_error_band(several_nodes, linked, least):
    assert least <= covered(several_nodes=several_nodes, linked=linked) < 0.97
