"""The sink: outputs of any class pass it, and change in nothing but their tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.autograd_hooks import tensors_in
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.features.backward_sink import map_tensors

from .. import scenarios
from ..explore import examples
from ..scenarios import assert_same


def train_with_unused_output(rank: int, _world_size: int, structure: str) -> list:
    return scenarios.output_unused_in_loss(DistributedDataParallel, rank, structure=structure)


@pytest.mark.parametrize("structure", ["dataclass", "registered node", *scenarios.CUSTOM_OUTPUTS[:4]])
def test_tensors_in_any_structure_may_be_unused_in_the_loss(two_ranks, structure):
    """Dataclasses do not pass torch's sink, registered pytree nodes are not searched by it: it raises for both."""
    expected, got = (two_ranks.run(train_with_unused_output, one) for one in ("tuple", structure))
    assert_same([steps for _, *steps in got], [steps for _, *steps in expected])


def train_with_custom_outputs(rank: int, _world_size: int, structure: str) -> list:
    return [
        scenarios.custom_outputs(DistributedDataParallel, rank, structure=structure, **options)
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True})
    ]


@pytest.mark.parametrize("structure", scenarios.CUSTOM_OUTPUTS)
def test_outputs_of_any_class_pass_the_sink(two_ranks, structure):
    """Torch's class never launches the all-reduces of a static graph behind a class that pytree does not know."""
    body = train_with_custom_outputs
    for plain, found, static in two_ranks.run(body, structure):
        assert_same(found, plain)
        assert_same(static, plain)


nested = st.recursive(
    st.integers(0, 3).map(lambda value: torch.tensor(float(value))) | st.text(max_size=2) | st.none(),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), parts, max_size=3)
        | st.lists(parts, max_size=3).map(lambda some: scenarios.Labelled(*some, label="a"))
        | st.lists(parts, max_size=3).map(lambda some: scenarios.LabelledTuple(*some, label="a"))
        | st.builds(scenarios.Pair, parts, parts)
        | st.builds(scenarios.Outputs, parts, parts)
    ),
    max_leaves=8,
)


@examples(30)
@given(nested)
def test_mapping_the_tensors_of_an_output_changes_nothing_else(output):
    """Every tensor is changed once, in order; types and all other values stay."""
    before = [tensor.item() for tensor in tensors_in(output)]
    changed = map_tensors(lambda tensor: tensor + 1, output)
    assert [tensor.item() for tensor in tensors_in(changed)] == [value + 1 for value in before]
    assert [tensor.item() for tensor in tensors_in(output)] == before
    assert_same(map_tensors(lambda tensor: tensor - 1, changed), output)
    assert type(changed) is type(output)
    assert getattr(changed, "label", None) == getattr(output, "label", None)
