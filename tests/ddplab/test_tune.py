"""The command `tune`: the answer, what to paste, and files."""

import re
import tempfile
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

import ddplab
from ddplab.cli.tune import answer, decimals, gain_interval, plan_rows, short_caps_mb, to_paste
from ddplab.simulator import BucketPlan, Policy, predict, tune
from ddplab.simulator.schedule.schedule import buckets_of
from ddplab.simulator.workload.compute_times import recorded_model

from ..explore import examples
from ..strategies import steady_fabrics, traces


def test_tune_answers_first_and_writes_plan_and_json(answered, trace, fabric, tmp_path):
    asked = ("--world-size", 4, "--set", "hook=fp16", "--out", tmp_path / "plan.json", "--verify", "virtual")
    shown, written = answered("tune", trace, "--fabric", fabric, *asked)
    assert re.match(r"(keep torch's default: |use these \d+ buckets?: )", shown)
    plan = BucketPlan.load(tmp_path / "plan.json")
    assert tuple(map(tuple, written["buckets"])) == plan.buckets
    assert (written["gain"], written["gap"]) == (plan.gain, plan.gap)
    rows = written["verification"]
    assert [(row["class"], row["buckets"]) for row in rows[:2]] == [("ddplab", "torch's default"), ("ddplab", "plan")]
    assert all(row["emulated_ns"] == row["predicted_ns"] for row in rows)
    assert len(rows) == 4
    assert shown.count(": gain ") == 2


@examples(12)
@given(traces(), st.data())
def test_every_plan_has_an_answer_a_table_and_arguments_that_make_its_buckets(trace, data):
    fabric = data.draw(steady_fabrics(2))
    plan = tune(trace, fabric, world_size=2, assume=False)
    default, planned = (
        predict(trace, fabric, world_size=2, assume=False, **buckets)
        for buckets in ({"bucket_cap_mb": None}, {"plan": plan.buckets})
    )
    comparison = default.compare(planned)
    kept = plan.keep_default or plan.buckets == default.buckets
    low, high = gain_interval(comparison)
    if planned.iteration_ns:  # nothing saves more than the time that there is
        assert low - 1e-6 <= plan.gain <= high + 1e-6 < 1 + 1e-6
    sentence = answer(plan, comparison)
    assert sentence.startswith("keep torch's default" if kept else "use these")
    if "lies within the errors" not in sentence:  # the bound below is not under what the sentence leaves
        left = re.search(r"saves? over ([\d.]+)%", sentence)
        assert plan.gap <= (float(left[1]) / 100 + 1e-9 if left else 0)
    rows = plan_rows(plan, comparison)
    assert [row["name"].split(",")[0] for row in rows[:2]] == ["torch's default", "plan"]
    assert rows[-1]["name"] == "bound that no buckets beat"
    assert len(rows) == len(plan.baselines) + 2
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder, "p.json"))
        of_torch, by_rule, ours = to_paste(plan, recorded_model(trace), Path(folder, "p.json"))
        pasted = eval(f"dict({ours.partition(': ')[2]})", {"ddplab": ddplab})
    assert pasted == {"plan": plan.buckets}
    assert ("bucket_cap_mb_list" in of_torch) == (plan.bucket_cap_mb_list is not None)
    caps = re.fullmatch(r".*: bucket_cap_mb(?:_list=\[(.*)\]|=([^,]*)), (?:.*)", by_rule).groups()
    assert tuple(map(float, (caps[0] or caps[1]).split(", "))) == plan.rule_caps_mb
    assert by_rule.endswith("a tie with the plan" if plan.rule_ties else "longer than with the plan")


@given(traces(), st.lists(st.floats(1e-6, 1e-3), min_size=1, max_size=6))
def test_caps_with_few_decimals_close_the_same_buckets(trace, caps_mb):
    model = recorded_model(trace)
    buckets = buckets_of(Policy(bucket_cap_mb_list=tuple(caps_mb)), model)
    exact = tuple(sum(trace.sizes_bytes[index] for index in bucket) / 2**20 for bucket in buckets)
    assume(buckets_of(Policy(bucket_cap_mb_list=exact), model) == buckets)
    short = short_caps_mb(exact, buckets, model)
    assert buckets_of(Policy(bucket_cap_mb_list=tuple(short)), model) == buckets
    assert all(len(str(few)) <= len(str(all_of_them)) for few, all_of_them in zip(short, exact, strict=True))


@given(st.floats(1e-3, 1e3), st.integers(-1000, 1000))
def test_printed_digits_are_those_that_the_interval_carries(width, value):
    digits = decimals(width)
    assert 0 <= digits <= 3
    if digits < 3:
        assert 10.0**-digits <= width / 2 or digits == 0
    assert abs(float(f"{value / 7:.{digits}f}") - value / 7) <= 0.5 * 10.0**-digits + 1e-9
