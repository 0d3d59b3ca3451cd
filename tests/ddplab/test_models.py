"""The built-in models begin where training does: their numbers are of a size that processors like."""

import math

import pytest
import torch

from ddplab import models
from ddplab.operation_counter import measure_operations

CLASSES = {"transformer": 8192, "small-tensors": 16}
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("name", [name for name in models.BUILT_IN if name not in models.LARGE])
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


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "shape"),
    [
        ("resnet50-224", 25_557_032, 161, (64, 3, 224, 224)),
        ("bert-large", 335_174_458, 298, (32, 128)),
        ("gpt2", 124_439_808, 148, (8, 1024)),
    ],
)
def test_large_models_have_the_published_size(name, parameters, tensors, shape):
    """GPT-2 has fused projections also in its authors' code; BERT's are three tensors there."""
    operations = measure_operations(name)
    assert sum(parameter.size_bytes for parameter in operations.parameters) == 4 * parameters
    assert len(operations.parameters) == tensors
    assert operations.input_shape == shape
    assert operations.batch == shape[0]
