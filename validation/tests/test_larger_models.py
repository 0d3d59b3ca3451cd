"""Models that are only counted have the published numbers of parameters."""

import pytest
import torch

from validation.larger_models import COUNTED

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
