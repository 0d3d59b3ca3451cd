"""Operations of a model, counted without data."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ddplab import models
from ddplab.memory_counter import measure_memory
from ddplab.operation_counter import count_operations, measure_operations
from ddplab.reference.errors import ModelError
from ddplab.reference.recorder import record
from ddplab.simulator.workload.roofline import Operations, built_in_operations, data_sheets
from ddplab.simulator.workload.trace_synthesis import rescale, synthesize

from ..simulator.random_operations import SLOW, ready_order, validated


def of(operations) -> tuple[int, int]:
    """FLOPs and bytes."""
    return sum(o.flops for o in operations), sum(o.bytes_moved for o in operations)


def count(module: nn.Module, *inputs: torch.Tensor) -> Operations:
    """Forward and backward, the loss being the sum of what comes out."""
    return count_operations(module, lambda module: module(*inputs).sum(), "m")


def test_a_linear_layer_by_hand():
    batch, inputs, outputs = 5, 3, 7
    counted = count(nn.Linear(inputs, outputs), torch.ones(batch, inputs))
    x, w, b, y = batch * inputs, inputs * outputs, outputs, batch * outputs
    assert of(counted.forward) == (2 * batch * w, 4 * (x + w + b + y))
    assert of(counted.loss) == (0, 4 * (y + 1) + 4)  # the sum, and its gradient of one
    # The gradient of a sum is one number, expanded: it lies in memory once. No gradient of the input is wanted.
    weight, bias = (4 * (1 + x + w), 4 * (1 + b))
    assert of(counted.backward) == (2 * batch * w, weight + bias)
    assert of(counted.step) == (0, 3 * 4 * (w + b))
    assert set(counted.ready_order) == {0, 1}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_by_hand(layer, groups):
    batch, inputs, outputs, kernel, size = 2, 4, 8, 3, 5
    pixels = torch.ones(batch, inputs, size, size, requires_grad=True)
    counted = count(layer(inputs, outputs, kernel, padding=1, groups=groups), pixels)
    forward = 2 * batch * size**2 * kernel**2 * inputs * outputs // groups
    assert of(counted.forward)[0] == forward
    assert of(counted.backward)[0] == 2 * forward
    assert {one.kind for one in (*counted.forward, *counted.backward) if one.flops} <= {
        {1: "conv", 2: "grouped", 4: "depthwise" if layer is nn.Conv2d else "grouped"}[groups]
    }


def test_channels_last_convolutions_are_marked():
    images = torch.ones(2, 4, 5, 5).to(memory_format=torch.channels_last)
    layer = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    assert [one.channels_last for one in count(layer, images).forward if one.flops] == [True]
    assert [one.channels_last for one in count(layer, images.contiguous()).forward if one.flops] == [False]


class Everything(nn.Module):
    """Views, copies, operations in place, reductions, a lookup."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 4)

    def forward(self, index):
        x = self.embedding(index)  # 2 x 4: reads two rows and two indices, writes two rows
        y = x.t().view(4, 2)[1:].expand(3, 2)  # views
        return y.contiguous().add_(1.0)  # a copy of 6 numbers; in place


def test_views_count_nothing_and_lookups_what_they_read():
    index = torch.tensor([1, 2])
    counted = count(Everything(), index)
    assert of(counted.forward) == (0, 4 * 8 + 4 * 8 + 8 * 2 + 2 * 4 * 6 + 2 * 4 * 6)
    assert sum(operation.kernels for operation in counted.forward) == 3


def convolutions() -> models.Model:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(36, 5)
    )
    images = torch.ones(2, 3, 11, 11)
    return module, lambda module: module(images).square().mean()


def test_without_data_the_counts_are_those_of_a_real_run():
    model = "tests.ddplab.test_operation_counter:convolutions"
    real = count_operations(*models.build(model), model)
    assert measure_operations(model) == real
    module, loss_fn = models.build(model)
    with FlopCounterMode(display=False) as oracle:
        loss_fn(module).backward()
    assert of((*real.forward, *real.loss, *real.backward))[0] == oracle.get_total_flops()


@pytest.mark.parametrize("model", ["resnet18", "mlp", "transformer", "small-tensors"])
def test_built_in_models_are_ready_in_the_order_that_was_recorded(model):
    module, loss_fn = models.build(model)
    with record(module, model=model, batch=loss_fn.batch) as recording:
        loss_fn(module).backward()
    recorded = recording.trace
    counted = measure_operations(model)
    synthetic = synthesize(counted, data_sheets()["h100-tf32"], step_ns=50_000_000)
    assert ready_order(synthetic) == ready_order(recorded)
    for field in ("model", "source", "parameters", "buffers", "batch", "torch_version"):
        assert getattr(synthetic.workload, field) == getattr(recorded.workload, field)
    assert validated(rescale(recorded, counted, SLOW, data_sheets()["a100-80gb-tf32"]))


def test_under_autocast_activations_have_its_size_and_casts_count():
    """A linear layer: the weight is cast from 4 bytes to 2, and the matrix product moves half the bytes."""
    plain, half = (measure_operations("mlp", autocast=autocast) for autocast in (None, "bfloat16"))
    assert half.parameters == plain.parameters  # which stay float32
    assert of(half.backward)[0] == of(plain.backward)[0]
    casts = sum(parameter.size_bytes * 3 // 2 for parameter in plain.parameters)
    activations = of(plain.forward)[1] - sum(parameter.size_bytes for parameter in plain.parameters)
    weights = sum(parameter.size_bytes // 2 for parameter in plain.parameters)
    inputs = 16 * 1024 * 6  # the batch is cast too
    assert of(half.forward)[1] == casts + weights + activations // 2 + inputs
    assert sum(o.kernels for o in half.forward) == sum(o.kernels for o in plain.forward) + len(plain.parameters) + 1


def in_bfloat16(batch: int = 4) -> models.Model:
    def loss(module):
        return module(torch.randn(batch, 8, dtype=torch.bfloat16)).square().mean()

    loss.batch = batch
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).bfloat16(), loss


def test_a_model_without_parameters_in_float32_computes_under_no_autocast():
    model = f"{__name__}:in_bfloat16"
    for measure in (measure_operations, measure_memory):
        assert measure(model, autocast="bfloat16") == measure(model, autocast="float16") == measure(model)
    for name in ("llama-3.2-1b", "llama-3.2-1b-checkpointed"):
        assert built_in_operations(name, "bfloat16") == built_in_operations(name)


@pytest.mark.parametrize("model", ["transformer", "llama-3.2-1b"])
def test_fused_attention_counts_as_many_flops_as_separate_operations(model):
    """On the meta device it is separate. Its backward pass computes the scores again, one product more."""
    fused, in_16_bits = (measure_operations(model, autocast=autocast) for autocast in (None, "bfloat16"))
    with torch.device("meta"):
        plain = count_operations(*models.build(model), model)
    assert of(in_16_bits.forward)[0] == of(fused.forward)[0] == of(plain.forward)[0]
    assert of(plain.backward)[0] < of(fused.backward)[0] < 1.1 * of(plain.backward)[0]
    attention = [one for one in fused.forward if one.kind == "attention"]
    assert attention
    assert sum(one.kernels for one in fused.forward) < sum(one.kernels for one in plain.forward)


def norm_in_16_bits() -> models.Model:
    return nn.RMSNorm(3).to(torch.bfloat16), lambda module: module(torch.ones(2, 3, dtype=torch.bfloat16)).sum()


def test_an_rms_norm_is_one_kernel_each_way_and_modules_can_be_converted():
    counted = measure_operations("tests.ddplab.test_operation_counter:norm_in_16_bits")
    kernels = [sum(one.kernels for one in part) for part in (counted.forward, counted.backward)]
    assert kernels == [2, 1]  # the batch too
    assert {one.dtype for one in counted.parameters} == {"bfloat16"}


BATCH = torch.ones(2, 3)


def cloned_layers(clone: bool) -> models.Model:
    layer = nn.Linear(3, 3)
    layers = [copy.deepcopy(layer) if clone else nn.Linear(3, 3) for _ in range(3)]
    return nn.Sequential(*layers), lambda module: module(torch.ones(2, 3)).sum()


def test_a_model_that_clones_its_layers_is_counted_as_one_that_does_not():
    """Deep copies of fake tensors, as `nn.TransformerEncoder` makes them."""
    cloned, plain = (
        measure_operations(f"tests.ddplab.test_operation_counter:{name}") for name in ("clones", "makes")
    )
    assert cloned.model_copy(update={"model": plain.model}) == plain


def clones() -> models.Model:
    return cloned_layers(clone=True)


def makes() -> models.Model:
    return cloned_layers(clone=False)


def reads_a_value() -> models.Model:
    return nn.Linear(3, 1), lambda module: module(torch.ones(2, 3)).sum() * module.weight.sum().item()


def batch_from_outside() -> models.Model:
    return nn.Linear(3, 1), lambda module: module(BATCH).sum()


def goes_to_numpy() -> models.Model:
    return nn.Linear(3, 1), lambda module: torch.tensor(module(torch.ones(2, 3)).detach().numpy())


def loss_without_a_parameter() -> models.Model:
    return nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]), lambda module: module[0](torch.ones(2, 3)).sum()


def frozen() -> models.Model:
    return nn.Linear(3, 1).requires_grad_(False), lambda module: module(torch.ones(2, 3)).sum()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (reads_a_value, "does not run on fake tensors, which have no data: "),
        (batch_from_outside, "make model and batch inside the callable"),
        (goes_to_numpy, "use no values (.item(), .numpy()"),
        (loss_without_a_parameter, "expected the loss to use every parameter, 1.weight, 1.bias got no gradient"),
        (loss_without_a_parameter, "freeze those that no batch uses (requires_grad_(False)), and if other"),
        (frozen, "expected at least one trainable parameter, got none"),
    ],
)
def test_a_model_that_cannot_be_counted_is_told_in_one_line(model, says):
    name = f"tests.ddplab.test_operation_counter:{model.__name__}"
    with pytest.raises(ModelError, match=re.escape(says)) as caught:
        measure_operations(name)
    assert str(caught.value).startswith(f"model {name}: ")
    with pytest.raises(ModelError, match=f"^model {name}: "):
        measure_operations(name, autocast="float16")
    assert "\n" not in str(caught.value)
