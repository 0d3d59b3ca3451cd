"""The sink: outputs of any class pass it, and change in nothing but their tensors."""

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddplab.reference.autograd_hooks import tensors_in
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.features.backward_sink import map_tensors

from .. import scenarios
from ..explore import examples
from ..scenarios import assert_same, batch, gradients


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


@dataclasses.dataclass
class Tree:
    """A node that has its parent, and a field without a value."""

    value: Tensor
    parent: "Tree | None" = None
    children: "list[Tree]" = dataclasses.field(default_factory=list)
    label: str = dataclasses.field(init=False)


def tree(value: Tensor) -> Tree:
    root = Tree(value)
    root.children.append(Tree(value * 2, root))
    return root


def inside_itself(value: Tensor) -> dict[str, Any]:
    output: dict[str, Any] = {"value": value}
    output["all"] = [output]
    return output


def deep(value: Tensor) -> list[Any]:
    """Deeper than Python's stack."""
    output = [value]
    for _ in range(3000):
        output = [output]
    return output


def at_the_bottom(output: Any) -> Tensor:
    while isinstance(output, list):
        (output,) = output
    return output


class RaisingList(list):
    """Its own code raises; torch's class runs none of it without a search."""

    def __iter__(self) -> Any:
        raise ValueError

    __len__ = __iter__


class RaisingDict(dict):
    """As `RaisingList`."""

    values = RaisingList.__iter__


ODD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tree": (tree, lambda root: root.value + root.children[0].value),
    "inside itself": (inside_itself, lambda output: output["all"][0]["value"] * 3),
    "deep": (deep, lambda output: at_the_bottom(output) * 3),
    "list that raises": (lambda value: RaisingList([value]), lambda output: output[0] * 3),
    "dict that raises": (lambda value: RaisingDict(value=value), lambda output: output["value"] * 3),
}
"""Functions that make an output of a tensor, and functions that return three times the tensor."""


def train_with_odd_outputs(rank: int, _world_size: int, structure: str, options: dict[str, Any]) -> tuple[list, list]:
    """Gradients, and those of a module that returns the tensor."""
    make, thrice = ODD[structure]
    seen = []
    for odd in (True, False):
        torch.manual_seed(0)
        module = nn.Linear(3, 2)
        if odd:
            module.register_forward_hook(lambda _module, _inputs, output: make(output))
        ddp = DistributedDataParallel(module, **options)
        for step in range(3):
            ddp.zero_grad()
            output = ddp(batch(rank, 2, 3, step=step))
            (thrice(output) if odd else output * 3).square().sum().backward()
            seen.append(gradients(ddp))
    return seen[:3], seen[3:]


SEARCHES = [None, "find_unused_parameters", "static_graph"]


@pytest.mark.parametrize(
    ("structure", "option"), [one for one in product(ODD, SEARCHES) if one != ("dict that raises", SEARCHES[1])]
)
def test_outputs_may_contain_themselves_be_deep_lack_fields_and_raise(two_ranks, structure, option):
    """Torch's class looks into outputs only to find unused parameters; ours raised RecursionError, AttributeError."""
    for odd, plain in two_ranks.run(train_with_odd_outputs, structure, {option: True} if option else {}):
        for got, expected in zip(odd, plain, strict=True):
            torch.testing.assert_close(got, expected)


def test_what_is_inside_itself_stays_as_it_is_there():
    root = tree(torch.tensor(1.0))
    changed = map_tensors(lambda tensor: tensor + 1, root)
    assert (changed.value, changed.children[0].value) == (2, 3)
    assert changed.children[0].parent is root
    assert not hasattr(changed, "label")


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
