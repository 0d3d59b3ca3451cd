"""A U-Net and a GRU for committed runs; neither was used to develop the reducer, the simulator or the calibration."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class _TwoConvolutions(nn.Module):
    """Two convolutions at one resolution, each followed by a group norm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)  # type: ignore[no-any-return]


class _UNet(nn.Module):
    """Encoder and decoder with a skip connection at each resolution."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.first = _TwoConvolutions(3, widths[0])
        self.down = nn.ModuleList(_TwoConvolutions(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in reversed(pairs))
        self.join = nn.ModuleList(_TwoConvolutions(2 * narrow, narrow) for narrow, _ in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        kept = [self.first(image)]
        for layers in self.down:
            kept.append(layers(functional.max_pool2d(kept[-1], 2)))
        image = kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            image = join(torch.cat([kept.pop(), up(image)], dim=1))
        return self.last(image)  # type: ignore[no-any-return]


class _Gru(nn.Module):
    """A recurrent language model; all gradients of a layer become ready together, after its last time step."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])  # type: ignore[no-any-return]


def unet() -> tuple[nn.Module, object]:
    """Build a U-Net of 7.8 million parameters in 82 tensors, without buffers, and its loss on images of 64 x 64."""
    images = torch.randn(2, 3, 64, 64)
    return _UNet((32, 64, 128, 256, 512)), lambda model: functional.mse_loss(model(images), images)


def gru() -> tuple[nn.Module, object]:
    """Build two GRU layers of width 512 with 8,192 words, 11.5 million parameters in 11 tensors, and the loss."""
    vocabulary, context, batch = 8192, 32, 8
    tokens = torch.randint(vocabulary, (batch, context + 1))

    def loss(model: nn.Module) -> Tensor:
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return _Gru(vocabulary, 512, 2), loss
