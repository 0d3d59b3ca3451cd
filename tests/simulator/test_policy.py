"""Settings of the reducer: `predict` and `sweep` take them as one policy or one by one, with the same result."""

import pytest
from hypothesis import given

from ddplab.simulator import Fabric, Policy, predict, sweep
from ddplab.simulator.schedule.policy import PolicySettings

from ..explore import examples
from ..strategies import any_predictions, iteration, trace_of

TRACE = trace_of([[iteration(10, (30, 20, 25), 32, 5)]], [400, 80, 40])
FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)


def test_the_docstring_of_predict_names_every_field_of_a_policy():
    assert [name for name in Policy.model_fields if name not in predict.__doc__] == []


@examples(20)
@given(any_predictions())
def test_a_policy_and_its_fields_predict_the_same(asked):
    arguments = {"variation": asked.variation, "stragglers": asked.stragglers, "inputs": asked.inputs}
    one_by_one = predict(asked.trace, asked.fabric, world_size=asked.world_size, **arguments, **dict(asked.policy))
    assert one_by_one == asked.predict()


@pytest.mark.parametrize("function", [predict, sweep])
@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"policy": Policy(), "hook": "fp16"}, ValueError, r"^policy: expected either .* got both; also given: hook"),
        ({"policy": {"sync_every": 2}}, ValueError, r"^policy: input should be an instance of Policy, got \{'sync"),
        ({"sync_every": 0}, ValueError, r"^sync_every: input should be greater than or equal to 1, got 0$"),
        ({"grouping": "module", "static_graph": True}, ValueError, r"^static_graph: expected the default with group"),
        ({"grouping": "module", "hook": "fp16"}, ValueError, r"^hook: expected the default with grouping='module'"),
        ({"reduce_dtype": "bfloat16"}, ValueError, r"^reduce_dtype: expected grouping='module', got 'buckets'"),
        ({"grouping": "module"}, ValueError, r"^grouping: expected names of parameters that show the blocks"),
        ({"bucket_cap": 25}, TypeError, r"^unexpected keyword argument 'bucket_cap'; settings are bucket_cap_mb, "),
    ],
)
def test_settings_that_make_no_sense_are_named_in_one_line(function, settings, kind, message):
    world = {"world_size": 2} if function is predict else {"world_sizes": [2]}
    with pytest.raises(kind, match=message) as raised:
        function(TRACE, FABRIC, **world, **settings)
    assert "\n" not in str(raised.value)


def test_keyword_arguments_are_typed_by_the_fields_of_the_policy():
    assert list(PolicySettings.__annotations__) == list(Policy.model_fields)
