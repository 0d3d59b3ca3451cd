"""The counted memory of a step, against torch's own record of what the processor's allocator gave and took."""

import random
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ddplab.memory_counter import LiveBytes, held_by_a_step, measure_memory
from ddplab.reference.errors import ModelError


class _Random(nn.Module):
    """Layers drawn at random, some of them in an activation checkpoint, one used twice."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([8, 16])
        layers = [
            lambda: nn.Linear(width, width),
            lambda: nn.Sequential(nn.LayerNorm(width), nn.GELU()),
            lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(width, width, bias=False), nn.ReLU(inplace=True)),
            lambda: nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True),
        ]
        self.first = nn.Linear(4, width)
        self.layers = nn.ModuleList(draw.choice(layers)() for _ in range(draw.randint(1, 5)))
        self.checkpointed = [draw.random() < 0.3 for _ in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, is_checkpointed in [*zip(self.layers, self.checkpointed, strict=True), (self.layers[0], False)]:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if is_checkpointed else layer(x)
        return x


def torchs_count(module: nn.Module, batch: Tensor) -> int:
    """Bytes that forward allocates and does not free, by the allocator's record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = module(batch).square().mean()
    kept = sum(event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    assert loss.requires_grad
    return kept


@pytest.mark.parametrize("seed", range(12))
def test_what_autograd_keeps_is_what_the_allocator_gave(seed):
    module = _Random(random.Random(seed))
    batch = torch.randn(3, 5, 4)
    held = held_by_a_step(module, lambda model: model(batch).square().mean())
    module.zero_grad()
    assert held.kept_bytes == torchs_count(module, batch)
    assert held.batch_bytes == batch.nbytes
    assert held.peak_bytes >= held.kept_bytes


def frozen(batch=4):
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    module[0].requires_grad_(requires_grad=False)
    inputs = torch.randn(batch, 512)
    return module, lambda model: model(inputs).square().mean()


def test_parameters_that_are_not_trained_take_memory_of_any_batch():
    """A model of which a small part is trained fitted into any GPU."""
    memory = measure_memory(f"{__name__}:frozen")
    assert memory is not None
    assert memory.frozen_bytes == memory.with_batch(8).frozen_bytes == 4 * (512 * 512 + 512)
    assert memory.batch_bytes == 4 * 4 * 512


def deaf(batch=4):
    assert batch
    inputs, module = torch.randn(16, 8), nn.Linear(8, 8)
    return module, lambda model: model(inputs).sum()


def test_a_callable_that_does_not_use_its_batch_is_refused():
    """Any batch fitted, and samples per second were those of a batch that did not run."""
    with pytest.raises(
        ModelError, match="expected more memory with batch=8 than with 4, got as much; make that many"
    ):
        measure_memory(f"{__name__}:deaf")


def half_precision(batch=4):
    module = nn.Linear(8, 16).half()

    def loss(model: nn.Module) -> Tensor:
        return model(inputs).float().sum()

    inputs, loss.batch = torch.randn(batch, 8).to(torch.float16), batch
    return module, loss


def test_a_model_of_another_element_type_is_counted():
    """Nothing was counted: module.half() refuses fake parameters that a weak reference points to."""
    memory = measure_memory(f"{__name__}:half_precision")
    assert memory is not None
    assert memory.batch_bytes == 2 * 4 * 8
    assert memory.peak_bytes >= 2 * 4 * 16


def test_what_ends_while_another_tensor_is_counted_is_counted_as_ended(monkeypatch):
    """Threads of a backend let go of what they have sent at any time, also between two lines of the counter."""
    live_tensors = []
    finalize = weakref.finalize

    def finalize_and_end_another(*arguments):
        live_tensors.clear()
        return finalize(*arguments)

    monkeypatch.setattr(weakref, "finalize", finalize_and_end_another)
    with LiveBytes([]) as live:
        live_tensors.append(torch.empty(10))
        kept = torch.empty(20)
    assert live.bytes == kept.nbytes
