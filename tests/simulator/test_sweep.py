"""Sweeps: every row is the prediction of its configuration, wherever and however it was computed."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, Straggler, Variation, predict, sweep
from ddplab.simulator.fabric import Linear, Processor, Sharing
from ddplab.simulator.schedule.comm_hook_messages import PowerSGD, named_hook
from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.sweep import AXES, COLUMNS, FIGURES

from ..explore import examples
from ..strategies import iteration, rate_fabrics, sweeps, trace_of

TRACE = trace_of([[iteration(10, (30, 20, 25), 32, 5), iteration(11, (35, 20, 26), 36, 5)]], [400, 80, 40])
STEADY = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)
FLUID = STEADY.model_copy(
    update={"concurrency": 2, "sharing": (Sharing(size_bytes=0, factor=1.7),),
            "processor": Processor(slow_down=1.3, launch_ns=3, pack=Linear(fixed_ns=1))}
)  # fmt: skip


def assert_rows_are_predictions(table, traces, fabrics, world_sizes, caps, orders, hooks, policy, **more) -> None:
    settings = {name: value for name, value in policy if name not in ("bucket_cap_mb", "order", "hook")}
    rows, predicted = table.to_dict("records"), []
    cells = product(traces.items(), fabrics.items(), world_sizes, caps, orders, hooks)
    for row, ((trace_name, trace), (fabric_name, fabric), size, cap, order, hook) in zip(rows, cells, strict=True):
        expected = predict(
            trace, fabric, world_size=size, bucket_cap_mb=cap, order=order, hook=hook, **settings, **more
        )
        for name in FIGURES:
            assert (None if pd.isna(row[name]) else row[name]) == getattr(expected, name)
        assert (row["low_ns"], row["high_ns"]) == expected.interval_ns
        assert row["buckets"] == len(expected.buckets)
        assert row["efficiency"] == expected.efficiency
        predicted.append(expected)
        named = (trace_name, fabric_name, size, cap, order, named_hook(hook).name)
        assert all(a == b or (b is None and pd.isna(a)) for a, b in zip((row[n] for n in AXES), named, strict=True))
    choices = len(caps) * len(orders) * len(hooks)
    for first in range(0, len(rows), choices):
        fastest = min(predicted[first : first + choices], key=lambda one: one.iteration_ns)
        for row, one in zip(rows[first : first + choices], predicted[first : first + choices], strict=True):
            assert row["is_tie"] == fastest.compare(one).is_tie


@examples(12)
@given(sweeps())
def test_every_row_is_the_prediction_of_its_configuration(asked):
    """On steady and on fluid fabrics, to the nanosecond, row after row in the order of the axes' product."""
    axes = {name: asked.pop(name) for name in ("world_sizes", "bucket_caps_mb", "orders", "hooks")}
    traces, fabrics, policy = (asked.pop(name) for name in ("trace", "fabric", "policy"))
    table = sweep(traces, fabrics, **axes, policy=policy, n_jobs=1, **asked)
    assert list(table.columns) == list(COLUMNS)
    assert_rows_are_predictions(table, traces, fabrics, *axes.values(), policy, **asked)


@examples(6)
@given(
    rate_fabrics(), st.sampled_from(["resampled", "fitted"]), st.booleans(), st.booleans(),
    st.sampled_from([None, "buckets"]),
)  # fmt: skip
def test_rows_of_a_fabric_with_described_links_are_its_predictions(fabrics, kind, differ, straggles, zero):
    """Whose costs, and whose uncertainty, differ between world sizes."""
    arguments = {
        "variation": Variation(kind=kind, iterations=7, device_spread=differ / 100),
        "stragglers": [Straggler(factor=1.5)] * straggles,
    }
    policy = Policy(zero=zero)
    names = {f"fabric {number}": fabric for number, fabric in enumerate(fabrics)}
    axes = ([1, 2, 8], [1e-4, float("inf")], ["ready"], ["none", "power_sgd:2"])
    table = sweep(
        *(TRACE, names),
        **dict(zip(("world_sizes", "bucket_caps_mb", "orders", "hooks"), axes, strict=True)),
        **arguments,
        policy=policy,
    )
    assert_rows_are_predictions(table, {"by hand": TRACE}, names, *axes, policy, **arguments)


def test_an_infinite_cap_is_a_single_bucket_and_none_is_torchs_default():
    table = sweep(TRACE, STEADY, world_sizes=[2], bucket_caps_mb=[1e-6, float("inf"), None])
    assert table["buckets"].tolist() == [3, 1, 1]
    assert table["bucket_cap_mb"].tolist()[:2] == [1e-6, float("inf")]
    assert np.isnan(table["bucket_cap_mb"].iloc[2])


def test_a_hook_may_be_named_or_made():
    made = PowerSGD(name="mine", matrix_approximation_rank=3, compress=Linear(fixed_ns=1000))
    table = sweep(TRACE, STEADY, world_sizes=[2], hooks=["none", made])
    assert table["hook"].tolist() == ["none", "mine"]
    assert table["iteration_ns"].iloc[1] == predict(TRACE, STEADY, world_size=2, hook=made).iteration_ns


BOTH = {"steady": STEADY, "fluid": FLUID}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"world_sizes": []}, r"^world_size: expected at least one value to sweep over, got none$"),
        ({"bucket_caps_mb": []}, r"^bucket_cap_mb: expected at least one value to sweep over, got none$"),
        ({"world_sizes": [2, -3, 0]}, r"^world_sizes\[1\]: .* greater than or equal to 1, got -3 \(and 1 more\)$"),
        ({"hooks": ["power"]}, r"^hook: expected one of .* got 'power'$"),
        ({"stragglers": [Straggler(rank=2, factor=2)]}, r"^stragglers\[0\]\.rank: expected a rank below 2, got 2$"),
        ({"trace": "t.json"}, r"^trace: expected a Trace, or several by name, got 't.json'$"),
        ({"trace": {"a": TRACE, "b": "t.json"}}, r"^trace: expected a Trace, or several .* got 't.json' as 'b'$"),
        ({"fabric": [STEADY]}, r"^fabric: expected a Fabric, or several by name, got \[Fabric"),
        ({"world_sizes": 2}, r"^world_sizes: expected a list of values, got 2; write \[...\] around it$"),
        ({"orders": "ready"}, r"^orders: expected a list of values, got 'ready'"),
        ({"hooks": named_hook("fp16")}, r"^hooks: expected a list of values, got HalfPrecision"),
        ({"plan": ((0,), (1, 2)), "bucket_caps_mb": [1, 25]}, r"^bucket_cap_mb: expected one .* plan fixes, got 2$"),
        ({"orders": ["ready"], "order": "ready"}, r"^orders: expected either orders or order, got both"),
        ({"fabric": BOTH, "measured": {2: 100}}, r"^measured: expected one trace and one .* got several fabrics"),
        ({"bucket_cap_mb_list": (1, 2), "bucket_caps_mb": [1, 25]}, r"^bucket_cap_mb: .* bucket_cap_mb_list fixes"),
    ],
)
def test_what_cannot_be_swept_is_named_in_one_line(arguments, says):
    with pytest.raises(ValueError, match=says) as raised:
        sweep(**({"trace": TRACE, "fabric": STEADY, "world_sizes": [2]} | arguments))
    assert "\n" not in str(raised.value)


ASKED = {"world_sizes": [2, 3, 4], "bucket_caps_mb": [1e-6, 1e-4, float("inf")], "orders": ["ready", "size"]}


def test_progress_reaches_the_number_of_configurations():
    seen = []
    table = sweep(TRACE, BOTH, **ASKED, n_jobs=1, on_progress=lambda *step: seen.append(step))
    done = [number for _, number, _ in seen]
    assert done == sorted(set(done))
    assert seen[-1] == ("sweeping", len(table), len(table)) == ("sweeping", 36, 36)
    assert {total for _, _, total in seen} == {36}


def test_two_processes_give_the_same_table_as_one():
    one, two = (sweep(TRACE, BOTH, **ASKED, n_jobs=jobs) for jobs in (1, 2))
    pd.testing.assert_frame_equal(one, two)


def test_a_sweep_takes_from_the_policy_what_no_axis_gives():
    policy = Policy(bucket_cap_mb=1e-4, order="reverse", hook=named_hook("fp16"), sync_every=2)
    table = sweep(TRACE, STEADY, world_sizes=[2], policy=policy)
    pd.testing.assert_frame_equal(table, sweep(TRACE, STEADY, world_sizes=[2], **dict(policy)))
    (row,) = table.to_dict("records")
    assert (row["bucket_cap_mb"], row["order"], row["hook"]) == (1e-4, "reverse", "fp16")
    assert row["iteration_ns"] == predict(TRACE, STEADY, world_size=2, policy=policy).iteration_ns


@pytest.mark.parametrize("fabric", [STEADY, FLUID], ids=["steady", "fluid"])
def test_measured_times_of_the_policys_settings_anchor_every_configuration(fabric):
    measured, fabric = {2: 10**4, 4: 10**4}, fabric.with_processor(unexplained=0.1)
    table = sweep(TRACE, fabric, world_sizes=[8, 16], bucket_caps_mb=[0.0001, 25], measured=measured)
    on_few = {ranks: predict(TRACE, fabric, world_size=ranks) for ranks in (*measured, 8, 16)}
    for row in table.to_dict("records"):
        plain = predict(TRACE, fabric, world_size=row["world_size"], bucket_cap_mb=row["bucket_cap_mb"])
        expected = plain.anchored(row["world_size"], measured, on_few)
        assert expected.iteration_ns > plain.iteration_ns
        assert (row["iteration_ns"], row["low_ns"], row["high_ns"]) == (expected.iteration_ns, *expected.interval_ns)
