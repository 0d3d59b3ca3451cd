"""The built-in models begin where training does: their numbers are of a size that processors like."""

import math

import pytest
import torch

from reference import models

CLASSES = {"transformer": 8192, "small-tensors": 16}
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("name", models.BUILT_IN)
def test_training_begins_near_chance_and_without_underflow(name):
    """Guessing among n classes has a loss of log n. Far above it softmax saturates and gradients underflow."""
    torch.manual_seed(0)
    module, loss_fn = models.build(name)
    loss = loss_fn(module)
    assert loss.item() < 1.5 * math.log(CLASSES.get(name, 1000))
    loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    underflown = (gradients != 0) & (gradients.abs() < SMALLEST_NORMAL)
    assert underflown.sum() <= 1e-3 * len(gradients)
