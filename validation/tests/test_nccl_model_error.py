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


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_added_to_the_model_is_that_of_the_published_logs(waits):
    found = measured(several_nodes=waits, waits=waits)
    for kib, figure, deviation in BEYOND_THE_MODEL[waits].T:
        ((size, computed),) = figures(found, [int(1024 * kib)], waits=waits).items()
        mean = computed[0] if waits else np.exp(computed[0])
        assert figure == pytest.approx(mean, abs=0.006), size
        of_systems = sum(size in of_size for of_size in found.values())
        assert deviation == (pytest.approx(computed[1], abs=0.006) if of_systems >= 4 else 0.5), size


def test_the_figures_of_several_nodes_hold_on_one_node_whose_switches_reduce():
    found = measured(several_nodes=False, waits=True)
    assert set(found) == {"AWS p5en", "AWS P6-B200"}
    for of_size in found.values():
        known = [(figure, one) for kib, figure, _ in BEYOND_THE_MODEL[True].T for one in of_size[int(1024 * kib)]]
        by_model = np.mean([abs(np.log(one.ns / one.model_ns)) for _, one in known])
        assert np.mean([abs(one.missed(figure, waits=True)) for figure, one in known]) < 0.6 * by_model


@pytest.mark.parametrize(
    ("several_nodes", "linked", "least"),
    [(False, True, 0.9), (True, True, 0.9), (False, False, 0.85), (True, False, 0.75)],
)
def test_published_times_beyond_a_table_that_was_cut_off_lie_in_the_error_band(several_nodes, linked, least):
    assert least <= covered(several_nodes=several_nodes, linked=linked) < 0.97
