"""Models that are only counted have the published numbers of parameters."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ddplab import memory_counter
from ddplab.operation_counter import without_data
from validation.larger_models import COUNTED, Reading, Residual, Stage, T5Block, checkpointed, t5

PUBLISHED = {
    "t5-base": 222_903_552,  # huggingface.co/google-t5/t5-base
    "t5-large": 737_668_096,  # huggingface.co/google-t5/t5-large
    "whisper-small": 241_734_912,  # huggingface.co/openai/whisper-small, its fixed positions of the sound included
    "whisper-large-v2": 1_543_304_960,  # huggingface.co/openai/whisper-large-v2, likewise
    "stable-diffusion-2-unet": 865_910_724,  # huggingface.co/stabilityai/stable-diffusion-2-base
}


@pytest.mark.parametrize("name", list(COUNTED))
def test_numbers_of_parameters_are_the_published_ones(name):
    with torch.device("meta"):
        module, _ = COUNTED[name]()
    tensors = [*module.parameters(), *module.buffers()]
    assert sum(one.numel() for one in tensors) == PUBLISHED[name.removesuffix("-checkpointed")]


def _blocks(batch: int):
    """Blocks of the U-Net, of width 64, on 16 x 16 places."""
    module = Stage([Residual(64, 64), Reading(64), Residual(64, 64), Reading(64)])
    image, time, text = torch.randn(batch, 64, 16, 16), torch.rand(batch, 1280), torch.randn(batch, 77, 1024)
    return module, lambda wrapped: wrapped(image, time, text).square().mean()


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("make", [partial(_blocks, 2), partial(t5, 128, 2, 512, 2, batch=2)], ids=["U-Net", "T5"])
def test_the_count_is_what_a_processor_holds_when_it_trains(make, checkpoints, tmp_path, monkeypatch):
    """By torch's profiler, with and without checkpoints; a processor's RMSNorm keeps its result, a GPU's does not."""
    monkeypatch.setattr(memory_counter, "FLOAT32_ATTENTION_OUTPUTS", 1)
    make = partial(checkpointed, make) if checkpoints else make
    with without_data():
        counted = memory_counter.held_by_a_step(*make(), 2)
    module, loss_fn = make()
    normalised = [0]

    def note(_module, _inputs, output):
        normalised[0] += output.nbytes

    # Norms inside checkpoints keep nothing after the forward pass.
    inside = {one for block in module.modules() if isinstance(block, T5Block) for one in block.modules()}
    for norm in {one for one in module.modules() if isinstance(one, nn.RMSNorm)} - (inside if checkpoints else set()):
        norm.register_forward_hook(note)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = loss_fn(module)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    held = sum(one["args"]["Bytes"] for one in events if one.get("name") == "[memory]")
    assert loss.isfinite()
    assert counted.kept_bytes == pytest.approx(held - normalised[0], rel=0.02, abs=2**17)
