"""Real calibrations: what a fabric of this machine contains, and how it is shown."""

import json
from functools import partial
from unittest import mock

import numpy as np
import pytest

from ddplab.calibration.calibrate import calibrate, measure_hooks
from ddplab.calibration.slow_downs import MOST_DELAYED
from ddplab.cli.show import show_fabric
from ddplab.reference.launch import RankPool
from ddplab.simulator import Fabric
from ddplab.simulator.fabric import Linear
from ddplab.simulator.fabric.processor_costs import HookCost

TINY = "tests.models_for_cli:tiny"


@pytest.fixture(scope="module")
def calibrated(two_ranks: RankPool) -> tuple[Fabric, list[str]]:
    """A calibration with hooks, one of them asked for twice, and the words of its progress."""
    words: list[str] = []
    fabric = calibrate(
        two_ranks,
        TINY,
        hooks=["fp16", "none", "power_sgd", "fp16"],
        sizes_bytes=[65536, 4096],
        repeats=3,
        on_progress=lambda word, done, total: words.append(word),
    )
    return fabric, words


def test_a_calibration_has_all_that_a_prediction_charges(calibrated):
    fabric, words = calibrated
    for rows in (fabric.all_reduce, fabric.broadcast):
        assert [(row.world_size, row.size_bytes) for row in rows] == [(2, 4096), (2, 65536)]
        assert all(row.ns > 0 for row in rows)
    assert [row.size_bytes for row in fabric.sharing] == [4096, 65536]
    assert any(row.spread > 0 for row in fabric.all_reduce)
    assert (
        fabric.relative_errors(np.array([4096]), 2).tolist()
        == [[np.median([row.spread for row in fabric.all_reduce])]] * 2
    )
    processor = fabric.processor
    assert min(processor.launch_ns, processor.rebuild_ns, processor.search_ns_per_parameter) > 0
    assert processor.pack != Linear() != processor.copy_out
    assert 1 <= processor.slow_down <= 1 / (1 - MOST_DELAYED)
    assert processor.slow_down_error > 0
    assert TINY in fabric.source
    assert list(dict.fromkeys(words)) == [
        *("calibrating collectives", "calibrating slow-downs", "calibrating fp16", "calibrating power_sgd:1")
    ]


def test_a_single_rank_has_all_costs_but_slow_downs():
    with RankPool(1, timeout_s=60) as pool:
        fabric = calibrate(pool, TINY, hooks=["fp16"], sizes_bytes=[4096], repeats=3)
    assert [(row.world_size, row.size_bytes) for row in fabric.all_reduce] == [(1, 4096)]
    processor = fabric.processor
    assert min(processor.launch_ns, processor.rebuild_ns, processor.search_ns_per_parameter) > 0
    assert processor.pack != Linear() != processor.copy_out
    assert processor.slow_down == 1


UNMEASURED = {"stall_ns", "launch_error", "copy_error", "iteration_spread", "unexplained"}
"""Costs and errors that no calibration measures."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_not_measured_is_null_in_the_file_and_shown_as_such(calibrated, ranks, tmp_path, capsys):
    fabric, unmeasured = calibrated[0], UNMEASURED
    if ranks == 1:
        with RankPool(1, timeout_s=60) as pool:
            fabric = calibrate(pool, TINY, sizes_bytes=[4096], repeats=3)
        unmeasured = UNMEASURED | {"slow_down", "slow_down_error"}
    fabric.save(tmp_path / "fabric.json")
    written = json.loads((tmp_path / "fabric.json").read_text())["processor"]
    assert {name for name, value in written.items() if value is None} == unmeasured
    loaded = Fabric.load(tmp_path / "fabric.json")
    assert loaded.processor.model_fields_set == fabric.processor.model_fields_set
    assert loaded == fabric
    older = fabric.with_processor(**dict.fromkeys(unmeasured - {"slow_down"}, 0))  # in place of null
    for one in (loaded, older):
        shown = show_fabric(one, "tiny")
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        said = {row[0] for row in rows if row[1:3] == ["not", "measured"]}
        assert said == unmeasured
        assert {row["relative_error"] is None for row in shown["segments"]} == {ranks == 1}
        assert ["-" in row[2:3] for row in rows if row[1:2] == ["none"]] == [True] * (ranks == 1)


def test_hooks_are_measured_once_each_and_part_by_part_and_shown_with_a_row_for_each(calibrated, capsys):
    costs = {cost.name: cost for cost in calibrated[0].processor.hooks}
    assert list(costs) == ["fp16", "none", "power_sgd:1"]
    assert len(calibrated[0].processor.hooks) == 3
    assert costs["none"] == HookCost(name="none")
    nothing = Linear()
    assert costs["fp16"].compress != nothing != costs["fp16"].decompress
    assert costs["fp16"].recompress == nothing
    assert nothing not in (costs["power_sgd:1"].compress, costs["power_sgd:1"].recompress)
    assert costs["power_sgd:1"].decompress != nothing
    show_fabric(calibrated[0], "tiny")
    shown = capsys.readouterr().out
    assert [shown.count(word) for word in ("fp16", "power_sgd:1", "none")] == [2, 3, 0]
    assert "4,096" in shown


@pytest.mark.parametrize(
    "measure",
    [
        partial(calibrate, model=TINY, hooks=["zip"]),
        partial(measure_hooks, fabric=Fabric.from_table([(2, 8, 1)]), model=TINY, hooks=["zip"]),
    ],
)
def test_an_unknown_hook_is_refused_before_a_rank_is_started(measure):
    pool = mock.create_autospec(RankPool, instance=True)
    with pytest.raises(ValueError, match=r"^hook: expected one of none, noop, .*; got 'zip'$"):
        measure(pool)
    pool.run.assert_not_called()
