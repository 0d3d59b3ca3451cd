"""The autograd graph: what a backward pass can reach, and which tensors accumulate gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab.reference.autograd_graph import accumulators, reachable

PARAMETERS = 5
terms = st.lists(st.sets(st.integers(0, PARAMETERS - 1)), min_size=1, max_size=3)


@given(terms, st.data())
def test_reachable_parameters_are_those_that_get_a_gradient(terms, data):
    """Each output is a sum of some parameters and of some earlier outputs; some outputs are detached."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(PARAMETERS)]
    nodes = accumulators(parameters)  # kept alive
    indices = {node: index for index, node in enumerate(nodes)}
    outputs = []
    for used in terms:
        earlier = data.draw(st.lists(st.sampled_from(outputs), max_size=2)) if outputs else []
        output = sum([parameters[index] for index in used] + earlier, torch.zeros(1)).sin()
        outputs.append(output.detach() if data.draw(st.booleans()) else output)
    chosen = data.draw(st.lists(st.sampled_from(outputs), unique_by=id, max_size=3))
    for output in chosen:
        if output.requires_grad:
            output.backward(retain_graph=True)
    found = {index for index, parameter in enumerate(parameters) if parameter.grad is not None}
    assert reachable(chosen, indices) == found


def test_a_tensor_that_is_no_leaf_is_named():
    first = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"parameter 1 \(Tensor, shape \(2,\)\), got the node MulBackward0"):
        accumulators([first, first * 2])
