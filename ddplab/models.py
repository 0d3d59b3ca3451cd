"""Models to train and record: the built-in ones, and any `module:callable` that `--model` names.

A model is a callable without arguments that returns `(module, loss_fn)`. `loss_fn(module)` runs the module on one
batch of random data and returns the scalar loss. The number of samples of a batch is the default of an argument
`batch` of the callable, or an attribute of `loss_fn`, whose method `optimizer`, if any, makes the optimiser.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .reference.errors import Error, ModelError
from .reference.launch import rank_device
from .simulator.catalogue import unknown
from .simulator.workload.roofline import counted_models
from .user_modules import import_first_here, module_name, place_of

Loss = Callable[[nn.Module], Tensor]
Model = tuple[nn.Module, Loss]


def resolve(name: str) -> Callable[[], Model]:
    """Find a model by name: a built-in one, or what `module:callable` names; raises ModelError if there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    expected = unknown("model", name, BUILT_IN, others="module:callable or")
    if not colon and name in counted_models():
        raise ModelError(f"model {name}: expected a model to run, got one of which only the operations are known")
    if not colon:
        raise ModelError(expected)
    try:
        found = getattr(import_first_here(module), attribute)
    except ImportError as error:
        file = f"{module_name(module)}.py"
        raise ModelError(f"{expected}: {error}; run from the folder that holds {file}") from None
    except AttributeError as error:
        raise ModelError(f"{expected}: {error}") from None
    if not callable(found):
        raise ModelError(f"{expected}: {attribute} is not callable but a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


@contextmanager
def users_code(name: str, function: object, expected: str) -> Iterator[None]:
    """Around a call of the user's `function`: its error is the cause of a ModelError, one line with the place."""
    try:
        yield
    except Error:
        raise
    except (Exception, SystemExit) as error:
        reason, _, _ = str(error).partition("\n")
        seen = f"{type(error).__name__}: {reason}{place_of(error, function)}"
        cure = "correct it there, or call it in Python for a traceback"
        raise ModelError(f"model {name}: expected {expected}, got {seen}; {cure}") from error


def build(name: str, batch: int | None = None) -> Model:
    """Find a model by name and call it, with a `batch` if that is given; returns `(module, loss_fn)`.

    On a rank with a GPU, that is torch's default device during the call, so the model and its batch are there. Raises
    ModelError if there is no such model, it did not return `(module, loss_fn)`, or there is nothing to train.
    """
    make, device = resolve(name), rank_device()
    expected = "it to return (module, loss_fn)"
    with users_code(name, make, expected), nullcontext() if device.type == "cpu" else device:
        made = make() if batch is None else make(batch=batch)  # type: ignore[call-arg]
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        parts = f" of {', '.join(type(one).__name__ for one in made)}" if isinstance(made, tuple) else ""
        seen = f"{type(made).__name__}{parts}{place_of(None, make)}; see docs/predict.md"
        raise ModelError(f"model {name}: expected {expected}, got {seen}")
    if not any(one.requires_grad for one in made[0].parameters()):
        raise ModelError(f"model {name}: expected at least one trainable parameter, got none{place_of(None, make)}")
    if device.type != "cpu":  # a model on the meta device stays there
        made[0].to(device)
    return made


def run_batch(name: str, module: nn.Module, loss_fn: Loss) -> None:
    """Run the forward and the backward pass of one batch, the first one; raises ModelError for a mistake in it."""
    with users_code(name, loss_fn, "loss_fn(module) to return a scalar tensor that depends on a parameter"):
        loss_fn(module).backward()  # raises an error too if the loss has several elements or needs no gradient


def batch_of(name: str, loss_fn: Loss) -> int | None:
    """Return the number of samples of a model's batch; None: neither the callable nor the loss says it."""
    arguments = signature(resolve(name)).parameters
    given = getattr(loss_fn, "batch", arguments["batch"].default if "batch" in arguments else None)
    return given if isinstance(given, int) and given > 0 else None


def mlp() -> Model:
    """An MLP of 30.4 million parameters in 29 linear layers with few FLOPs per parameter: communication dominates."""
    width, depth, classes, batch = 1024, 28, 1000, 16
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes)), _classify(torch.randn(batch, width), classes)


def resnet(depths: tuple[int, int, int, int], *, bottleneck: bool, batch: int, side: int) -> Model:
    """A residual network on a batch of square images, its modules named and ordered as in torchvision."""
    module = nn.Sequential()
    module.add_module("conv1", _convolution(3, 64, 7, 2))
    module.add_module("bn1", nn.BatchNorm2d(64))
    module.add_module("relu", nn.ReLU())
    module.add_module("maxpool", nn.MaxPool2d(3, stride=2, padding=1))
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        blocks = nn.Sequential()
        for position in range(depth):
            blocks.append(_Block(inputs, width, 2 if stage and not position else 1, bottleneck=bottleneck))
            inputs = 4 * width if bottleneck else width
        module.add_module(f"layer{stage + 1}", blocks)
    module.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    module.add_module("flatten", nn.Flatten())
    module.add_module("fc", nn.Linear(inputs, 1000))
    return module, _classify(torch.randn(batch, 3, side, side), 1000)


def transformer(vocabulary: int, context: int, batch: int, **sizes: int) -> Model:
    """A GPT-like transformer on sequences that fill the context, with tied embedding."""
    module = _Transformer(vocabulary, context, **sizes)
    tokens = torch.randint(vocabulary, (batch, context + 1))
    return module, _Classification(tokens[:, :-1], tokens[:, 1:])


def vit(batch: int, *, patch: int = 16, **sizes: int) -> Model:
    """A vision transformer (Dosovitskiy et al. 2021) on images of 224 x 224."""
    return _VisionTransformer(side=224, patch=patch, **sizes), _classify(torch.randn(batch, 3, 224, 224), 1000)


def llama(
    vocabulary: int, batch: int, length: int, *, tied: bool = False, dtype: torch.dtype = torch.bfloat16, **sizes: int
) -> Model:
    """A Llama 3 on sequences of `length` tokens; its published configuration is in bfloat16."""
    module = _Llama(vocabulary, tied=tied, dtype=dtype, **sizes)
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return module, _Classification(tokens[:, :-1], tokens[:, 1:])


def bert_large(batch: int = 32, length: int = 128) -> Model:
    """BERT-Large with its language-model head, 335 million parameters, on sequences of `length` tokens."""
    vocabulary, context = 30522, 512
    module = _MaskedLanguageModel(vocabulary, context, width=1024, heads=16, layers=24)
    tokens = torch.randint(vocabulary, (batch, length))
    return module, _Classification(tokens, tokens)


def checkpointed(make: Callable[[], Model]) -> Model:
    """A model of blocks, each an activation checkpoint: it keeps its input, and runs forward again in backward."""
    module, loss_fn = make()
    for block in module.get_submodule("blocks").children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return module, loss_fn


def small_tensors() -> Model:
    """400 tensors of at most 256 elements in 200 layers: the cost of hooks and launches dominates."""
    width, depth, batch = 16, 200, 16
    linears = [nn.Linear(width, width) for _ in range(depth)]
    for linear in linears:
        nn.init.xavier_normal_(linear.weight, nn.init.calculate_gain("tanh"))  # otherwise gradients underflow
    layers = [layer for linear in linears for layer in (linear, nn.Tanh())]
    return nn.Sequential(*layers), _classify(torch.randn(batch, width), width)


def optimizer_of(module: nn.Module, loss_fn: Loss) -> torch.optim.Optimizer:
    """Make the optimiser of a model: its own, if `loss_fn` has one, else SGD."""
    own = getattr(loss_fn, "optimizer", None)
    return own() if own is not None else torch.optim.SGD(module.parameters(), lr=1e-3)


BUILT_IN: dict[str, Callable[[], Model]] = {
    # 161 tensors and 25,557,032 parameters, on small images: computation dominates
    "resnet50": partial(resnet, (3, 4, 6, 3), bottleneck=True, batch=2, side=64),
    "resnet18": partial(resnet, (2, 2, 2, 2), bottleneck=False, batch=4, side=64),
    "mlp": mlp,
    # 29.4 million parameters
    "transformer": partial(transformer, vocabulary=8192, context=64, batch=4, width=512, heads=8, layers=8),
    "small-tensors": small_tensors,
    # as in published training
    "resnet50-224": partial(resnet, (3, 4, 6, 3), bottleneck=True, batch=64, side=224),
    "bert-large": bert_large,
    "bert-large-512": partial(bert_large, batch=8, length=512),
    # 124 million parameters in 148 tensors
    "gpt2": partial(transformer, vocabulary=50257, context=1024, batch=8, width=768, heads=12, layers=12),
    # 467 tensors and 60,192,808 parameters
    "resnet152-224": partial(resnet, (3, 8, 36, 3), bottleneck=True, batch=64, side=224),
    # 1,557,611,200 parameters, and GPT-3's with 1.3 billion
    "gpt2-xl": partial(transformer, vocabulary=50257, context=1024, batch=2, width=1600, heads=25, layers=48),
    "gpt-1.3b": partial(transformer, vocabulary=50257, context=2048, batch=2, width=2048, heads=16, layers=24),
    # 86,567,656 parameters in 152 tensors, 304,326,632 in 296 and 632,045,800 in 392
    "vit-b-16": partial(vit, batch=64, width=768, heads=12, layers=12),
    "vit-l-16": partial(vit, batch=32, width=1024, heads=16, layers=24),
    "vit-h-14": partial(vit, batch=16, patch=14, width=1280, heads=16, layers=32),
    # config.json of meta-llama/Llama-3.2-1B and Llama-3.1-8B: 1,235,814,400 and 8,030,261,248 parameters
    "llama-3.2-1b": partial(llama, 128256, 2, 4096, tied=True, width=2048, heads=32, pairs=8, layers=16, inner=8192),
    "llama-3.1-8b": partial(llama, 128256, 2, 4096, width=4096, heads=32, pairs=8, layers=32, inner=14336),
}
BUILT_IN |= {
    f"{name}-checkpointed": partial(checkpointed, BUILT_IN[name])
    for name in ("bert-large", "gpt2-xl", "gpt-1.3b", "llama-3.2-1b", "llama-3.1-8b")
}


@dataclass(frozen=True)
class _Classification:
    """A `loss_fn`: the cross entropy of one batch."""

    inputs: Tensor
    labels: Tensor

    @property
    def batch(self) -> int:
        return len(self.inputs)

    def __call__(self, module: nn.Module) -> Tensor:
        logits = module(self.inputs)
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), self.labels.reshape(-1))


def _classify(inputs: Tensor, classes: int) -> _Classification:
    return _Classification(inputs, torch.randint(classes, (len(inputs),)))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class _Block(nn.Module):
    """Convolutions and a shortcut (He et al. 2015, figure 5): 3 x 3 twice, or, as a bottleneck, 1 x 1, 3 x 3, 1 x 1.

    The first 3 x 3 convolution has the stride.
    """

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        basic = [(width, 3, stride), (width, 3, 1)]
        convolutions = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)] if bottleneck else basic
        channels = inputs
        for number, (outputs, size, own_stride) in enumerate(convolutions, start=1):
            self.add_module(f"conv{number}", _convolution(channels, outputs, size, own_stride))
            self.add_module(f"bn{number}", nn.BatchNorm2d(outputs))
            channels = outputs
        self.last = len(convolutions)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != channels:
            self.downsample = nn.Sequential(_convolution(inputs, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number in range(1, self.last + 1):
            y = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(y))
            y = functional.relu(y if number < self.last else y + self.downsample(x))
        return y


def _embeddings(width: int, *counts: int, dtype: torch.dtype | None = None) -> list[nn.Embedding]:
    """Make embeddings as in GPT-2.

    With torch's standard deviation of 1 the loss begins at 300 instead of 9, and after ten iterations gradients
    underflow to denormal numbers, which a processor computes several times as slowly.
    """
    embeddings = [nn.Embedding(count, width, dtype=dtype) for count in counts]
    for embedding in embeddings:
        nn.init.normal_(embedding.weight, std=0.02)
    return embeddings


def _blocks(width: int, heads: int, layers: int, *, norm_first: bool) -> nn.Sequential:
    layer = partial(nn.TransformerEncoderLayer, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(*(layer(width, heads, 4 * width, norm_first=norm_first) for _ in range(layers)))


class _Transformer(nn.Module):
    """A decoder-only, pre-norm transformer whose output projection is tied to the embedding, as in GPT-2."""

    def __init__(self, vocabulary: int, context: int, *, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.position = _embeddings(width, vocabulary, context)
        self.blocks = _blocks(width, heads, layers, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class _MaskedLanguageModel(nn.Module):
    """BERT (Devlin et al. 2019): a post-norm encoder and a head whose output projection is tied to the embedding."""

    def __init__(self, vocabulary: int, context: int, *, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.position, self.segment = _embeddings(width, vocabulary, context, 2)
        self.norm = nn.LayerNorm(width)
        self.blocks = _blocks(width, heads, layers, norm_first=False)
        self.dense, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions) + self.segment(torch.zeros_like(tokens))
        x = self.blocks(self.norm(x))
        return self.head(self.head_norm(functional.gelu(self.dense(x))))  # type: ignore[no-any-return]


class _VisionTransformer(nn.Module):
    """A pre-norm transformer over patches of an image and a class token, as in torchvision."""

    def __init__(self, *, side: int, patch: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = _blocks(width, heads, layers, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


class _Llama(nn.Module):
    """A decoder-only transformer with RMSNorm, grouped queries, rotary positions and SwiGLU, as in Llama 3.

    `pairs` is the number of heads of keys and values, and `inner` the width of the layers inside SwiGLU.
    """

    def __init__(
        self, vocabulary: int, *, tied: bool, width: int, heads: int, pairs: int, layers: int, inner: int, dtype: Any
    ) -> None:
        super().__init__()
        (self.token,) = _embeddings(width, vocabulary, dtype=dtype)
        self.head_width = width // heads
        self.blocks = nn.ModuleList(_LlamaBlock(width, heads, pairs, inner, dtype) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5, dtype=dtype)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        # The published scaling of long contexts changes these frequencies, but no operation.
        frequencies = 500_000.0 ** (-torch.arange(0, self.head_width, 2, device=x.device) / self.head_width)
        angles = torch.outer(torch.arange(tokens.shape[1], device=x.device), frequencies).repeat(1, 2)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, pairs: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_width = width // heads
        norm = partial(nn.RMSNorm, width, eps=1e-5, dtype=dtype)
        linear = partial(nn.Linear, bias=False, dtype=dtype)
        self.attention_norm, self.feed_forward_norm = norm(), norm()
        self.query, self.output = linear(width, width), linear(width, width)
        self.key, self.value = (linear(width, pairs * self.head_width) for _ in range(2))
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self._attended(self.attention_norm(x), rotation)
        y = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]

    def _attended(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        layers = self.query, self.key, self.value
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in layers)
        q, k = (_rotated(heads, *rotation) for heads in (q, k))
        read = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(read.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of elements by angles that grow with the position (Su et al. 2021)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine
