"""The operations of built-in models in the file equal a new count, and reading them needs no torch."""

import pytest
import torch

from ddplab.models import BUILT_IN
from ddplab.simulator.workload.roofline import Operations, built_in_operations, counted_models
from validation.count_built_in_models import count
from validation.larger_models import COUNTED

from ..test_architecture import modules_after


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("model", "autocast"), [("resnet50-224", None), ("bert-large", "bfloat16")])
def test_the_file_equals_a_new_count(model, autocast):
    """One code counts all models, which takes minutes; `validation.count_built_in_models` does."""
    known = built_in_operations(model, autocast)
    if known.torch_version != torch.__version__:
        pytest.skip(f"counted with torch {known.torch_version}; other versions may run other operations")
    assert known == Operations.model_validate(count(model, autocast), strict=False)


def test_the_file_has_all_built_in_and_larger_models_and_no_others():
    assert counted_models() == [*BUILT_IN, *COUNTED]
    assert built_in_operations("my_models:small") is None
    assert built_in_operations("resnet50", "float64") is None


@pytest.mark.parametrize("multiple", [0.25, 1.0, 3.0])
def test_a_multiple_of_the_batch_computes_that_many_times_as_much(multiple):
    one = built_in_operations("resnet50-224")
    many = one.with_batch(multiple)
    assert many.batch == 64 * multiple
    assert sum(o.flops for o in many.backward) == pytest.approx(multiple * sum(o.flops for o in one.backward))
    assert many.step == one.step
    assert [len(g.operations) for g in many.gradients] == [len(g.operations) for g in one.gradients]


def test_a_plan_from_two_names_loads_nothing_slow():
    asked = "['plan', 'resnet50', 'aws-p4d', '--world-size', '8,16']"
    loaded = modules_after(f"from ddplab.cli.main import app; app({asked}, standalone_mode=False)")
    assert loaded.isdisjoint({"torch", "pandas", "matplotlib", "scipy", "joblib"})
