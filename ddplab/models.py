"""Models to train and record: the built-in ones, and any `module:callable` that `--model` names.

A model is a callable without arguments that returns `(module, loss_fn)`. `loss_fn(module)` runs the module on one
batch of random data and returns the scalar loss. `loss_fn` may have an attribute `batch`, the number of samples, and
a method `optimizer`, which makes the optimiser. A model called `emulated:TRACE` takes the times of a trace instead of
computing.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from reference.errors import ModelError, TraceError
from reference.trace import Trace

from .emulation.emulated_device import EmulatedTraining

Loss = Callable[[nn.Module], Tensor]
Model = tuple[nn.Module, Loss]


def import_first_here(name: str) -> ModuleType:
    """Import a module that a user names; the working directory comes first, as with `python -m`.

    It comes first for this import only: a folder `reference` or a file `torch.py` there must not replace the modules
    of this project or torch, which are imported as they are needed.

    Raises:
        ImportError: There is no such module.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def resolve(name: str) -> Callable[[], Model]:
    """Find a model by name: a built-in one, or the callable that `module:callable` names.

    Raises:
        ModelError: There is no such model, module or callable.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(EMULATED):
        return partial(emulated, name.removeprefix(EMULATED))
    module_name, colon, attribute = name.partition(":")
    expected = f"--model: expected {', '.join(BUILT_IN)}, {EMULATED}TRACE or module:callable, got {name!r}"
    if not colon:
        raise ModelError(expected)
    try:
        found = getattr(import_first_here(module_name), attribute)
    except ImportError as error:
        raise ModelError(f"{expected}: {error}; run from the folder that holds {module_name}.py") from None
    except AttributeError as error:
        raise ModelError(f"{expected}: {error}") from None
    if not callable(found):
        raise ModelError(f"{expected}: {attribute} is not callable but a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def build(name: str) -> Model:
    """Find a model by name and call it; returns `(module, loss_fn)`.

    Raises:
        ModelError: There is no such model, or it did not return `(module, loss_fn)`.
    """
    made = resolve(name)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ModelError(f"--model {name}: expected it to return (module, loss_fn), got {type(made).__name__}")
    return made


def mlp() -> Model:
    """An MLP of 30.4 million parameters in 29 linear layers with few FLOPs per parameter: communication dominates."""
    width, depth, classes, batch = 1024, 28, 1000, 16
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes)), _classify(torch.randn(batch, width), classes)


def resnet18() -> Model:
    """ResNet-18 on 64 x 64 images."""
    return _ResNet(_Basic, (2, 2, 2, 2)), _classify(torch.randn(4, 3, 64, 64), 1000)


def resnet50() -> Model:
    """ResNet-50, 161 tensors and 25,557,032 parameters, on 64 x 64 images: computation dominates."""
    return _ResNet(_Bottleneck, (3, 4, 6, 3)), _classify(torch.randn(2, 3, 64, 64), 1000)


def transformer() -> Model:
    """A GPT-like transformer of 29.4 million parameters: 8 layers of width 512, context 64, tied embedding."""
    vocabulary, context, batch = 8192, 64, 4
    module = _Transformer(vocabulary, context, width=512, heads=8, layers=8)
    tokens = torch.randint(vocabulary, (batch, context + 1))
    return module, _Classification(tokens[:, :-1], tokens[:, 1:])


def resnet50_224() -> Model:
    """ResNet-50 on 64 images of 224 x 224, as in published training."""
    return _ResNet(_Bottleneck, (3, 4, 6, 3)), _classify(torch.randn(64, 3, 224, 224), 1000)


def bert_large() -> Model:
    """BERT-Large with its language-model head, 335 million parameters, on 32 sequences of 128 tokens."""
    vocabulary, context, batch = 30522, 512, 32
    module = _MaskedLanguageModel(vocabulary, context, width=1024, heads=16, layers=24)
    tokens = torch.randint(vocabulary, (batch, 128))
    return module, _Classification(tokens, tokens)


def gpt2() -> Model:
    """GPT-2 with 124 million parameters in 148 tensors, on 8 sequences of 1,024 tokens."""
    vocabulary, context, batch = 50257, 1024, 8
    module = _Transformer(vocabulary, context, width=768, heads=12, layers=12)
    tokens = torch.randint(vocabulary, (batch, context + 1))
    return module, _Classification(tokens[:, :-1], tokens[:, 1:])


def small_tensors() -> Model:
    """400 tensors of at most 256 elements in 200 layers: the cost of hooks and launches dominates."""
    width, depth, batch = 16, 200, 16
    linears = [nn.Linear(width, width) for _ in range(depth)]
    for linear in linears:
        nn.init.xavier_normal_(linear.weight, nn.init.calculate_gain("tanh"))  # otherwise gradients underflow
    layers = [layer for linear in linears for layer in (linear, nn.Tanh())]
    return nn.Sequential(*layers), _classify(torch.randn(batch, width), width)


EMULATED = "emulated:"
"""Prefix of a model that takes the times of a trace instead of computing."""


def emulated(path: str) -> Model:
    """An emulated device that takes the recorded times of a trace; see `emulated_device`.

    Raises:
        ModelError: The file is not a trace.
    """
    try:
        trace = Trace.load(path)
    except TraceError as error:
        raise ModelError(f"--model {EMULATED}{error}") from None
    training = EmulatedTraining(trace, dist.get_rank() if dist.is_initialized() else 0)
    return training.model, training


def optimizer_of(module: nn.Module, loss_fn: Loss) -> torch.optim.Optimizer:
    """Make the optimiser of a model: its own, if `loss_fn` has one, else SGD."""
    own = getattr(loss_fn, "optimizer", None)
    return own() if own is not None else torch.optim.SGD(module.parameters(), lr=1e-3)


BUILT_IN: dict[str, Callable[[], Model]] = {
    "resnet50": resnet50,
    "resnet18": resnet18,
    "mlp": mlp,
    "transformer": transformer,
    "small-tensors": small_tensors,
    "resnet50-224": resnet50_224,
    "bert-large": bert_large,
    "gpt2": gpt2,
}
LARGE = ("resnet50-224", "bert-large", "gpt2")
"""Built-in models of the size that GPUs train; a processor takes seconds to minutes for an iteration."""


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


class _Basic(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al. 2015, figure 5 left)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions and a shortcut (figure 5 right); the 3 x 3 one has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _convolution(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class _ResNet(nn.Module):
    """A residual network for images, its modules named and ordered as in torchvision."""

    def __init__(self, block: type[_Basic] | type[_Bottleneck], depths: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            blocks = nn.Sequential()
            for position in range(depth):
                blocks.append(block(inputs, width, 2 if stage and not position else 1))
                inputs = width * block.expansion
            self.add_module(f"layer{stage + 1}", blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


class _Transformer(nn.Module):
    """A decoder-only, pre-norm transformer whose output projection is tied to the embedding, as in GPT-2."""

    def __init__(self, vocabulary: int, context: int, *, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        for embedding in (self.token, self.position):
            # As in GPT-2. With torch's standard deviation of 1 the loss begins at 300 instead of 9, and after ten
            # iterations gradients underflow to denormal numbers, which a processor computes several times as slowly.
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.token(tokens) + self.position(torch.arange(length))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class _MaskedLanguageModel(nn.Module):
    """BERT (Devlin et al. 2019): a post-norm encoder and a head whose output projection is tied to the embedding."""

    def __init__(self, vocabulary: int, context: int, *, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.segment = nn.Embedding(2, width)
        for embedding in (self.token, self.position, self.segment):
            nn.init.normal_(embedding.weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.dense, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1])) + self.segment(torch.zeros_like(tokens))
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.head_norm(functional.gelu(self.dense(x))))  # type: ignore[no-any-return]
