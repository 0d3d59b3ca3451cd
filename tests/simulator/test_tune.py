"""The plan of `tune` is one that `predict` confirms, at least as good as every known rule, and reachable by caps."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.trace import Trace
from ddplab.simulator import BucketPlan, Fabric, Policy, predict, tune
from ddplab.simulator.catalogue import load_fabric
from ddplab.simulator.tuning.bucket_plan import GIVEN
from ddplab.simulator.tuning.tune import as_layout
from tests.explore import examples
from tests.strategies import emulations, iteration, partitions, trace_of

from .tuning_cases import WORLD_SIZE, fabrics, small_models

RESNET50 = Path(__file__).parents[2] / "benchmarks" / "resnet50.json.gz"


@examples(20)
@given(emulations(), st.sampled_from(["buckets", "fusion"]), st.sampled_from(["median", "mean", "p95", "worst_case"]))
def test_the_plan_is_predicted_and_never_slower_than_a_known_rule(asked, grouping, objective):
    policy = asked.policy.model_copy(update={"plan": None, "phase": "steady", "grouping": grouping})
    settings = {"world_size": asked.world_size, "variation": asked.variation, "stragglers": asked.stragglers}
    plan = tune(asked.trace, asked.fabric, policy=policy, objective=objective, **settings)
    assert all(plan.iteration_ns <= one.iteration_ns + 1 for one in plan.baselines)
    assert plan.lower_bound_ns <= plan.iteration_ns <= plan.best_cap_ns + 1
    planned = policy.model_copy(update={"plan": plan.buckets})
    predicted = predict(asked.trace, asked.fabric, policy=planned, **settings)
    assert predicted.buckets == plan.buckets
    if objective == "median":
        assert plan.iteration_ns == predicted.iteration_ns
    if plan.bucket_cap_mb_list is not None and policy.rebuilds:
        caps = policy.model_copy(update={"bucket_cap_mb_list": plan.bucket_cap_mb_list, "order": "ready"})
        by_caps = predict(asked.trace, asked.fabric, policy=caps, **settings)
        assert list(map(set, by_caps.buckets)) == list(map(set, plan.buckets))


@examples(10)
@given(small_models(), fabrics())
def test_contiguous_buckets_always_have_a_list_of_caps(trace, fabric):
    sizes = trace.sizes_bytes
    plan = tune(trace, fabric, world_size=WORLD_SIZE)
    if all(sizes[bucket[-1]] for bucket in plan.buckets):
        assert plan.bucket_cap_mb_list is not None


def test_a_saved_plan_is_loaded_again(tmp_path):
    plan = tune(Trace.load(RESNET50), load_fabric("aws-p4d"), world_size=8)
    plan.save(tmp_path / "plan.json")
    assert BucketPlan.load(tmp_path / "plan.json") == plan
    assert plan.default_ns >= plan.iteration_ns
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"plan.json: not a plan of buckets: model: field required"):
        BucketPlan.load(tmp_path / "plan.json")


def test_without_errors_of_the_costs_the_smallest_gain_is_a_reason_to_change():
    trace = trace_of([[iteration(0, (10, 2000), 2000, 0)]], [100, 100])
    plan = tune(trace, Fabric.from_table([(2, 100, 900), (2, 200, 1000)]), world_size=2)
    assert not plan.keep_default
    assert plan.gain > 0


@examples(20)
@given(small_models(), fabrics(), st.data())
def test_given_buckets_take_the_place_of_the_default(trace, fabric, data):
    given_ = as_layout(data.draw(partitions(len(trace.sizes_bytes))))
    found = tune(trace, fabric, world_size=WORLD_SIZE, plan=given_, assume=False)
    (rule,) = (one for one in found.baselines if one.name == GIVEN)
    now = predict(trace, fabric, world_size=WORLD_SIZE, plan=given_, assume=False)
    assert found.default_ns == rule.iteration_ns == now.iteration_ns >= found.iteration_ns


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grouping": "module"}, r"^grouping: expected 'buckets'"),
        ({"phase": "first"}, r"^phase: expected 'steady'"),
        ({"objective": "best"}, r"^objective: "),
        ({"policy": Policy(), "hook": "fp16"}, r"^policy: expected either a policy or settings"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(settings, message):
    trace = trace_of([[iteration(0, (10,), 10, 0)]], [100])
    with pytest.raises(ValueError, match=message) as refused:
        tune(trace, Fabric.from_table([(2, 1, 1)]), world_size=2, **settings)
    assert "\n" not in str(refused.value)
