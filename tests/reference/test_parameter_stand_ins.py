"""Stand-ins: forward computes with them, and gradients, errors and everything else see the parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab.reference.features.parameter_stand_ins import ForwardParameters, compose
from ddplab.reference.parameters import ModuleTensors, new_parameters


class Layers(nn.Module):
    """Linear layers, the first of which may occur twice; an input of -1 raises an error in the middle."""

    def __init__(self, count, shares):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))
        if shares:
            self.layers.append(self.layers[0])
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, number + 2.0)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if (x < 0).any():
                raise ArithmeticError("below zero")
        return x


@given(st.integers(1, 4), st.booleans(), st.sets(st.integers(0, 3)), st.sampled_from([2.0, 3.0]), st.booleans())
def test_forward_computes_with_the_stand_ins_and_gradients_are_those_of_the_parameters(
    count, shares, which, factor, always
):
    module = Layers(count, shares)
    before = dict(module.named_parameters())
    parameters = list(before.values())
    chosen = [parameter for index, parameter in enumerate(parameters) if index in which]
    substituted = ForwardParameters(
        module, {parameter: lambda own: own * factor for parameter in chosen}, always=always
    )
    leaves = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    used = [leaf * factor if index in which else leaf for index, leaf in enumerate(leaves)]
    substituted.enter()
    got, expected = module(torch.ones(1, 1)), torch.stack([*used, *used[: int(shares)]]).prod()
    substituted.leave()
    assert got.item() == expected.item()
    for output in (got, expected):
        output.sum().backward()
    for mine, theirs in zip(parameters, leaves, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert all(before[name] is parameter for name, parameter in module.named_parameters())
    own = torch.stack([*leaves, *leaves[: int(shares)]]).prod()
    assert module(torch.ones(1, 1)).item() == (expected if always else own).item()


def test_after_an_error_in_forward_the_parameters_are_back():
    module = Layers(2, shares=False)
    parameters = list(module.parameters())
    ForwardParameters(module, dict.fromkeys(parameters, torch.neg), always=True)
    with pytest.raises(ArithmeticError):
        module(torch.ones(1, 1))
    assert all(own is now for own, now in zip(parameters, module.parameters(), strict=True))


@pytest.mark.parametrize("forward_first", [True, False])
def test_a_backward_pass_computes_with_stand_ins_that_have_gradients(forward_first):
    """As parts that activation checkpoints run again; also in a second backward pass after one forward pass."""
    module = Layers(1, shares=False)
    weight = module.layers[0].weight
    substituted = ForwardParameters(module, {weight: lambda own: own * 2}, always=False)
    if forward_first:
        substituted.enter()
        substituted.leave()
    seen = []

    def look(_gradient):
        substituted.backward_starts()
        seen.append(module.layers[0].weight)

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(look)
    y.backward(retain_graph=True)
    y.backward()
    assert [tensor.item() for tensor in seen] == [4.0, 4.0]
    assert all(tensor.requires_grad for tensor in seen)
    assert module.layers[0].weight is weight


@given(st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2)))
def test_a_composed_stand_in_is_the_first_ones_then_the_others(first, then):
    parameters = [nn.Parameter(torch.tensor(5.0)) for _ in range(3)]
    both = compose(
        {parameters[index]: lambda own: own + 1 for index in first},
        {parameters[index]: lambda own: own * 2 for index in then},
    )
    values = {index: both[own](own).item() for index, own in enumerate(parameters) if own in both}
    assert values == {index: (5.0 + (index in first)) * (2 if index in then else 1) for index in sorted(first | then)}


def test_a_stand_in_has_replaced_no_parameter_but_another_parameter_has():
    module = Layers(2, shares=False)
    wrapper = nn.ModuleDict({"module": module})
    wrapped = ModuleTensors(module, {}).slots
    module.layers[0]._parameters["weight"] = module.layers[0].weight * 2
    assert new_parameters(wrapper, wrapped) == []
    module.layers[1].weight = nn.Parameter(torch.ones(1, 1))
    assert [slot.name for slot in new_parameters(wrapper, wrapped)] == ["layers.1.weight"]
