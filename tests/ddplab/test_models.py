"""The built-in models begin where training does: their numbers are of a size that processors like."""

import math
import os
import re
import sys
from functools import partial

import pytest
import torch
from torch import nn

from ddplab import models
from ddplab.memory_counter import held_by_a_step
from ddplab.operation_counter import count_operations
from ddplab.simulator.workload.roofline import built_in_operations
from ddplab.training_runs import Trainer

CLASSES = {"transformer": 8192, "small-tensors": 16}
LINEAR = nn.Linear(3, 1)
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("name", ["resnet50", "resnet18", "mlp", "transformer", "small-tensors"])  # the small ones
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
        ("gpt2-xl", 1_557_611_200, 580, (2, 1024)),  # openai-community/gpt2-xl
        ("vit-l-16", 304_326_632, 296, (32, 3, 224, 224)),  # torchvision
        ("vit-h-14", 632_045_800, 392, (16, 3, 224, 224)),  # torchvision
        ("resnet152-224", 60_192_808, 467, (64, 3, 224, 224)),  # torchvision
        ("vit-b-16", 86_567_656, 152, (64, 3, 224, 224)),  # torchvision
        ("llama-3.2-1b", 1_235_814_400, 146, (2, 4096)),  # meta-llama/Llama-3.2-1B
        ("llama-3.1-8b", 8_030_261_248, 291, (2, 4096)),  # meta-llama/Llama-3.1-8B
    ],
)
def test_large_models_have_the_published_size(name, parameters, tensors, shape):
    """GPT-2 has fused projections also in its authors' code; BERT's are three tensors there."""
    operations = built_in_operations(name)  # a test of the file counts again
    element_bytes = 2 if name.startswith("llama") else 4
    assert sum(parameter.size_bytes for parameter in operations.parameters) == element_bytes * parameters
    assert len(operations.parameters) == tensors
    assert operations.input_shape == shape
    assert operations.batch == shape[0]


@pytest.mark.parametrize("name", ["of_users.mine:make", "of_users/mine.py:make", "./of_users/mine.py:make"])
def test_a_users_model_is_named_by_its_module_or_its_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_users").mkdir()
    (tmp_path / "of_users" / "mine.py").write_text("make = dict\n")
    assert models.resolve(name) is dict
    for other in (f".{name}", f"../{name}"):
        with pytest.raises(models.ModelError, match=r"not below the working directory|No module named"):
            models.resolve(other)


class Mistaken(nn.Module):
    """Transposes its inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs):
        return self.linear(inputs.T)


def with_loss(of_output, module=LINEAR):
    """Return a model, with a loss of its outputs of shape (2, 1)."""
    return module, lambda module: of_output(module(torch.ones(2, 3)))


def with_optimizer(optimizer):
    _, loss_fn = model = with_loss(torch.sum)
    loss_fn.optimizer = optimizer
    return model


MISTAKES = {
    "an argument": (lambda batch: batch, r"got TypeError: .* missing 1 required positional argument: 'batch'"),
    "a dict": (lambda: {"model": LINEAR}, "got dict"),
    "three parts": (lambda: (LINEAR, len, 3), "got tuple of Linear, builtin_function_or_method, int"),
    "nothing": (lambda: None, "got NoneType"),
    "an error": (lambda: {}["key"], "got KeyError: 'key'"),
    "no parameter": (lambda: with_loss(torch.sum, nn.ReLU()), "expected at least one trainable parameter, got none"),
    "a vector": (lambda: with_loss(torch.abs), "got RuntimeError: .* scalar outputs"),
    "no gradient": (
        lambda: with_loss(lambda outputs: outputs.sum().detach()),
        "got RuntimeError: .* require grad",
    ),
    "a number": (lambda: with_loss(lambda outputs: outputs.sum().item()), "got AttributeError: 'float'"),
    "no loss": (lambda: with_loss(id), "got AttributeError: 'int'"),
    "a loss of nothing": (lambda: (LINEAR, lambda: None), "got TypeError: "),
    "an error in forward": (
        lambda: with_loss(torch.sum, Mistaken()),
        "got RuntimeError: (addmm: )?mat1 and mat2 shapes",
    ),
    "an exit": (lambda: with_loss(lambda _: sys.exit("bye")), "got SystemExit: bye"),
    "no backward": (lambda: with_loss(lambda outputs: outputs.exp().square_().exp_().sum()), "got RuntimeError: "),
    "no optimiser": (
        lambda: with_optimizer(lambda: 3),
        "expected loss_fn.optimizer.* to return an optimiser, got .*'int'",
    ),
    "no method": (lambda: with_optimizer(3), "got TypeError: 'int' object is not callable"),
}
"""Functions with which a user makes a model, each with a mistake, and a part of its message."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_users_model_is_one_line_with_its_place(mistake, monkeypatch):
    """Most were tracebacks of ours; other lines had no place."""
    make, says = MISTAKES[mistake]
    monkeypatch.setattr(sys.modules[__name__], "make", make, raising=False)
    name = f"{__name__}:make"
    with pytest.raises(models.ModelError, match=f"^model {name}: .*{says}") as caught:
        Trainer(name, 0).uses_all_parameters()
    (line,) = str(caught.value).splitlines()
    assert re.search(rf" \({re.escape(os.path.relpath(__file__))}, line \d+\)", line) or mistake == "no method"


def test_a_users_line_is_that_which_calls_torch(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make", MISTAKES["an error in forward"][0], raising=False)
    line = Mistaken.forward.__code__.co_firstlineno + 1
    with pytest.raises(models.ModelError, match=rf"test_models.py, line {line}\)"):
        Trainer(f"{__name__}:make", 0).uses_all_parameters()


SMALL = {"width": 32, "heads": 4, "pairs": 2, "layers": 2, "inner": 64}


def test_a_llama_reads_earlier_tokens_only_and_their_distances():
    """Rotary positions are relative: attention alone cannot tell a sequence from the same one a step later."""
    torch.manual_seed(0)
    module, _ = models.llama(50, 1, 8, tied=False, dtype=torch.float64, **SMALL)
    tokens = torch.randint(50, (1, 9))
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 50
    logits, again = module(tokens), module(changed)
    assert torch.equal(logits[:, :6], again[:, :6])
    assert not torch.allclose(logits[:, 6:], again[:, 6:])
    swapped = tokens[:, [1, 0, *range(2, 9)]]
    if not torch.equal(swapped, tokens):
        assert not torch.allclose(logits[:, -1], module(swapped)[:, -1])


def test_activation_checkpoints_keep_less_and_run_forward_again():
    """The gradients are the same; blocks run again, the head does not."""
    kept, flops, gradients = [], [], []
    for wrap in (lambda make: make(), models.checkpointed):
        torch.manual_seed(0)
        module, loss_fn = wrap(partial(models.llama, 50, 1, 64, tied=False, dtype=torch.float32, **SMALL))
        kept.append(held_by_a_step(module, loss_fn).kept_bytes)
        gradients.append([one.grad.clone() for one in module.parameters()])
        module.zero_grad()
        counted = count_operations(module, loss_fn, "llama")
        flops.append([sum(one.flops for one in part) for part in (counted.forward, counted.backward)])
    assert kept[1] < kept[0] / 3
    torch.testing.assert_close(*gradients)
    (forward, backward), (same, more) = flops
    assert forward == same
    assert 0.6 * forward < more - backward < forward


def test_rotation_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    angles = torch.outer(torch.arange(10.0), torch.rand(4)).repeat(1, 2).double()

    def score(position: int, other: int) -> float:
        turned = [models._rotated(x, angles[at].cos(), angles[at].sin()) for x, at in ((q, position), (k, other))]
        return (turned[0] * turned[1]).sum().item()

    assert score(5, 2) == pytest.approx(score(9, 6))
    assert score(5, 2) != pytest.approx(score(5, 4))


@pytest.mark.parametrize("name", models.BUILT_IN)
def test_a_pass_makes_its_tensors_where_the_model_is(name):
    """Llama's positions were on the CPU, so that it failed on a GPU: only construction has the default device."""
    with torch.device("meta"):
        module, loss_fn = models.resolve(name)()
    loss = loss_fn(module)
    loss.backward()
    assert loss.device.type == "meta"
