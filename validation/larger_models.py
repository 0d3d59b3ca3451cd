"""Models of published training whose operations are counted here and that no command of the package trains.

T5 (Raffel et al. 2020, arXiv 1910.10683), Whisper (Radford et al. 2022, arXiv 2212.04356) and the U-Net of Stable
Diffusion 2 (Rombach et al. 2022, arXiv 2112.10752), with the sizes of their published configurations. Attention is
fused, except T5's, which adds a bias to the scores. A test compares the numbers of parameters with published ones.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import log

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddplab.models import Model


class Attention(nn.Module):
    """Attention with several heads, to the sequence itself or to another one of width `read`."""

    def __init__(self, width: int, heads: int, head: int, *, read: int = 0, bias: str = "") -> None:
        super().__init__()
        inner = heads * head
        self.head = head
        self.query = nn.Linear(width, inner, bias="q" in bias)
        self.key = nn.Linear(read or width, inner, bias="k" in bias)
        self.value = nn.Linear(read or width, inner, bias="v" in bias)
        self.output = nn.Linear(inner, width, bias="o" in bias)

    def forward(
        self, x: Tensor, other: Tensor | None = None, *, is_causal: bool = False, scores: Tensor | None = None
    ) -> Tensor:
        """Return what each place of `x` reads; `scores` are added to T5's, which are not scaled."""
        read = x if other is None else other
        layers = (self.query, x), (self.key, read), (self.value, read)
        q, k, v = (layer(of).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer, of in layers)
        if scores is None:
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        else:
            found = (q @ k.transpose(2, 3) + scores).softmax(-1) @ v
        return self.output(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


# T5


class T5Block(nn.Module):
    """A pre-norm layer without biases, of an encoder or, reading one, of a decoder."""

    def __init__(self, width: int, heads: int, inner: int, *, reads: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(width, heads, 64) for _ in range(1 + reads))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2 + reads))
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, scores: Tensor, encoded: Tensor | None = None) -> Tensor:
        """Return the layer's output."""
        x = x + self.attentions[0](self.norms[0](x), scores=scores)
        if encoded is not None:
            x = x + self.attentions[1](self.norms[1](x), encoded, scores=x.new_zeros(()))
        return x + self.down(functional.relu(self.up(self.norms[-1](x))))  # type: ignore[no-any-return]


class T5Stack(nn.Module):
    """An encoder or a decoder, whose layers share a bias by the distance of two places."""

    def __init__(self, width: int, heads: int, inner: int, layers: int, *, reads: bool) -> None:
        super().__init__()
        self.distance = nn.Embedding(32, heads)
        self.blocks = nn.ModuleList(T5Block(width, heads, inner, reads=reads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.reads = reads

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        """Return the stack's output."""
        places = torch.arange(x.shape[1], device=x.device)
        apart = places[None] - places[:, None]
        scores = self.distance(apart.abs().clamp(max=31)).permute(2, 0, 1)[None]
        if self.reads:
            scores = scores.masked_fill(apart > 0, float("-inf"))
        for block in self.blocks:
            x = block(x, scores, encoded)
        return self.norm(x)  # type: ignore[no-any-return]


class T5(nn.Module):
    """An encoder and a decoder with one embedding, to which the output projection is tied."""

    def __init__(self, width: int, heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(32128, width)
        self.encoder = T5Stack(width, heads, inner, layers, reads=False)
        self.decoder = T5Stack(width, heads, inner, layers, reads=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return logits of the targets' tokens."""
        decoded = self.decoder(self.token(targets), self.encoder(self.token(tokens)))
        return functional.linear(decoded, self.token.weight)


def t5(width: int, heads: int, inner: int, layers: int, batch: int) -> Model:
    """T5 on 512 tokens and 114 tokens of targets, as in its pre-training."""
    module = T5(width, heads, inner, layers)
    tokens, targets = (torch.randint(32128, (batch, length)) for length in (512, 114))

    def loss(wrapped: nn.Module) -> Tensor:
        return functional.cross_entropy(wrapped(tokens, targets).flatten(0, 1), targets.flatten())

    return module, _of(batch, loss)


# Whisper


class WhisperBlock(nn.Module):
    """A pre-norm layer with GELU, of an encoder or, reading one, of a decoder; keys have no bias."""

    def __init__(self, width: int, *, reads: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(width, width // 64, 64, bias="qvo") for _ in range(1 + reads))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + reads))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        """Return the layer's output."""
        x = x + self.attentions[0](self.norms[0](x), is_causal=encoded is not None)
        if encoded is not None:
            x = x + self.attentions[1](self.norms[1](x), encoded)
        return x + self.down(functional.gelu(self.up(self.norms[-1](x))))  # type: ignore[no-any-return]


class Whisper(nn.Module):
    """Two convolutions and an encoder over 30 s of sound, and a decoder of text."""

    sound: Tensor

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(80, width, 3, padding=1), nn.Conv1d(width, width, 3, stride=2, padding=1)
        frequencies = torch.exp(-log(10_000) / (width // 2 - 1) * torch.arange(width // 2))
        angles = torch.arange(1500)[:, None] * frequencies[None]
        self.register_buffer("sound", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.token, self.position = nn.Embedding(51865, width), nn.Embedding(448, width)
        self.encoder = nn.ModuleList(WhisperBlock(width, reads=False) for _ in range(layers))
        self.decoder = nn.ModuleList(WhisperBlock(width, reads=True) for _ in range(layers))
        self.encoded, self.decoded = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, sound: Tensor, text: Tensor) -> Tensor:
        """Return logits of the text's tokens."""
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(sound)))).transpose(1, 2) + self.sound
        for block in self.encoder:
            x = block(x)
        encoded = self.encoded(x)
        y = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.decoder:
            y = block(y, encoded)
        return functional.linear(self.decoded(y), self.token.weight)


def whisper(width: int, layers: int, batch: int) -> Model:
    """Whisper on 30 s of sound and 448 tokens of text."""
    module = Whisper(width, layers)
    sound, text = torch.randn(batch, 80, 3000), torch.randint(51865, (batch, 448))

    def loss(wrapped: nn.Module) -> Tensor:
        return functional.cross_entropy(wrapped(sound, text).flatten(0, 1), text.flatten())

    return module, _of(batch, loss)


# Stable Diffusion 2


class Residual(nn.Module):
    """Two convolutions, between which the time is added, and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(1280, outputs))
        self.after = nn.Sequential(nn.GroupNorm(32, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor, _text: Tensor) -> Tensor:
        """Return the block's output."""
        return self.shortcut(x) + self.after(self.before(x) + self.time(time)[..., None, None])  # type: ignore[no-any-return]


class Reading(nn.Module):
    """A transformer's layer over the places of an image, which reads the text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself = Attention(width, width // 64, 64, bias="o")
        self.text = Attention(width, width // 64, 64, read=1024, bias="o")
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, image: Tensor, _time: Tensor, text: Tensor) -> Tensor:
        """Return the block's output."""
        x = self.enter(self.norm(image).flatten(2).transpose(1, 2))
        x = x + self.itself(self.norms[0](x))
        x = x + self.text(self.norms[1](x), text)
        values, gates = self.up(self.norms[2](x)).chunk(2, dim=-1)
        x = self.leave(x + self.down(values * functional.gelu(gates)))
        back: Tensor = x.transpose(1, 2).unflatten(2, image.shape[2:])
        return image + back


class Resampled(nn.Module):
    """A convolution at half or at twice the resolution."""

    def __init__(self, width: int, *, larger: bool) -> None:
        super().__init__()
        self.conv, self.larger = nn.Conv2d(width, width, 3, stride=1 if larger else 2, padding=1), larger

    def forward(self, x: Tensor, _time: Tensor, _text: Tensor) -> Tensor:
        """Return the image at the other resolution."""
        return self.conv(functional.interpolate(x, scale_factor=2.0) if self.larger else x)  # type: ignore[no-any-return]


class Stage(nn.ModuleList):
    """Blocks that run one after the other."""

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Return the last block's output."""
        for block in self:
            x = block(x, time, text)
        return x


class UNet(nn.Module):
    """The U-Net of Stable Diffusion 2, for latent images of four channels and text of width 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(320, 1280), nn.SiLU(), nn.Linear(1280, 1280))
        self.enter = nn.Conv2d(4, 320, 3, padding=1)
        widths, self.down, self.up, kept, width = (320, 640, 1280, 1280), nn.ModuleList(), nn.ModuleList(), [320], 320
        for level, wider in enumerate(widths):
            for _ in range(2):
                self.down.append(Stage([Residual(width, wider), *([Reading(wider)] if level < 3 else [])]))
                width = wider
                kept.append(width)
            if level < 3:
                self.down.append(Stage([Resampled(width, larger=False)]))
                kept.append(width)
        self.middle = Stage([Residual(width, width), Reading(width), Residual(width, width)])
        for level, wider in reversed(list(enumerate(widths))):
            for number in range(3):
                blocks = [Residual(width + kept.pop(), wider), *([Reading(wider)] if level < 3 else [])]
                width = wider
                self.up.append(Stage([*blocks, *([Resampled(width, larger=True)] if level and number == 2 else [])]))
        self.leave = nn.Sequential(nn.GroupNorm(32, 320), nn.SiLU(), nn.Conv2d(320, 4, 3, padding=1))

    def forward(self, image: Tensor, moment: Tensor, text: Tensor) -> Tensor:
        """Return the predicted noise."""
        frequencies = torch.exp(-log(10_000) / 160 * torch.arange(160, device=image.device))
        angles = moment[:, None] * frequencies[None]
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=1))
        kept = list(accumulate(self.down, lambda x, stage: stage(x, time, text), initial=self.enter(image)))
        x = self.middle(kept[-1], time, text)
        for stage in self.up:
            x = stage(torch.cat([x, kept.pop()], dim=1), time, text)
        return self.leave(x)  # type: ignore[no-any-return]


def unet(batch: int) -> Model:
    """Stable Diffusion 2's U-Net on latent images of 64 x 64, of pictures of 512 x 512, and 77 tokens of text."""
    module = UNet()
    image, moment, text = torch.randn(batch, 4, 64, 64), torch.rand(batch), torch.randn(batch, 77, 1024)

    def loss(wrapped: nn.Module) -> Tensor:
        return functional.mse_loss(wrapped(image, moment, text), image)

    return module, _of(batch, loss)


def checkpointed(make: Callable[[], Model]) -> Model:
    """A model whose blocks keep their inputs only, and run forward again in backward."""
    module, loss = make()
    blocks = (T5Block, WhisperBlock, Residual, Reading)
    for block in [one for one in module.modules() if isinstance(one, blocks)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]
    return module, loss


def _of(batch: int, loss: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
    loss.batch = batch  # type: ignore[attr-defined]  # which the counter reads
    return loss


COUNTED: dict[str, Callable[[], Model]] = {
    "t5-base": partial(t5, 768, 12, 3072, 12, batch=8),
    "t5-large": partial(t5, 1024, 16, 4096, 24, batch=8),
    "whisper-small": partial(whisper, 768, 12, batch=8),
    "whisper-large-v2": partial(whisper, 1280, 32, batch=4),
    "stable-diffusion-2-unet": partial(unet, batch=8),
}
COUNTED |= {
    f"{name}-checkpointed": partial(checkpointed, COUNTED[name])
    for name in ("t5-large", "whisper-large-v2", "stable-diffusion-2-unet")
}
"""By the name that `ddplab plan` has; the number of samples is that of one GPU."""
