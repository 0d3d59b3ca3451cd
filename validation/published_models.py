"""Models of published measurements, from which `synthesize` makes traces; their tensors are never allocated.

Each callable is a `--model` and returns the module and its loss on one batch, with the batch size and sequence length
of the published training. Sizes follow the sources that the case files name.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

Model = tuple[nn.Module, Callable[[nn.Module], Tensor]]


class _Loss:
    """Cross entropy of the next token or of the class."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.batch = len(inputs)
        self._inputs, self._labels = inputs, labels

    def __call__(self, module: nn.Module) -> Tensor:
        logits = module(self._inputs)
        return functional.cross_entropy(logits.flatten(0, -2), self._labels.flatten())


def _language_batch(batch: int, length: int, vocabulary: int) -> _Loss:
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return _Loss(tokens[:, :-1], tokens[:, 1:])


# Decoder-only transformers


class _Attention(nn.Module):
    """Causal self-attention with `projections`, the linear layers before the scores: one for q, k and v, or three."""

    def __init__(self, width: int, heads: int, *, fused: bool, bias: bool) -> None:
        super().__init__()
        self._heads = heads
        widths = [3 * width] if fused else [width] * 3
        self.projections = nn.ModuleList(nn.Linear(width, outputs, bias=bias) for outputs in widths)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = torch.cat([projection(x) for projection in self.projections], dim=-1)
        q, k, v = projected.view(batch, length, 3, self._heads, width // self._heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        return self.output((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class _Gated(nn.Module):
    """SwiGLU: two linear layers whose product passes a third (Shazeer 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.up = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _perceptron(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class _Block(nn.Module):
    """Attention and feed-forward layers, each after a norm and added to its input."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.attention = norm(), attention
        self.norm_2, self.feed_forward = norm(), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))  # type: ignore[no-any-return]


class _LanguageModel(nn.Module):
    """Embedding, blocks, norm and output layer.

    Args:
        vocabulary: Number of tokens.
        width: Width of the blocks.
        blocks: The blocks.
        norm: The last norm.
        positions: Number of learned positions; 0: positions have no parameters.
        tied: Whether the output layer shares the embedding.
    """

    def __init__(
        self, vocabulary: int, width: int, blocks: list[nn.Module], norm: nn.Module, *, positions: int, tied: bool
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width) if positions else None
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def _gpt2(
    width: int, heads: int, layers: int, *, batch: int, length: int, vocabulary: int = 50257, positions: int = 1024
) -> Model:
    norm = partial(nn.LayerNorm, width)
    blocks: list[nn.Module] = [
        _Block(_Attention(width, heads, fused=True, bias=True), _perceptron(width, 4 * width), norm)
        for _ in range(layers)
    ]
    module = _LanguageModel(vocabulary, width, blocks, norm(), positions=positions, tied=True)
    return module, _language_batch(batch, length, vocabulary)


def gpt2_512(batch: int = 16) -> Model:
    """GPT-2 with 124 million parameters in 148 tensors, on sequences of 512 tokens."""
    return _gpt2(768, 12, 12, batch=batch, length=512)


gpt2_512_batch_4 = partial(gpt2_512, 4)
gpt2_512_batch_64 = partial(gpt2_512, 64)


def gpt2_large_512(batch: int = 16) -> Model:
    """GPT-2 Large with 774 million parameters in 436 tensors, on sequences of 512 tokens."""
    return _gpt2(1280, 20, 36, batch=batch, length=512)


def gpt2_1024() -> Model:
    """GPT-2 with 124 million parameters, a vocabulary of 50,304 tokens, on 8 sequences of 1,024 tokens."""
    return _gpt2(768, 12, 12, batch=8, length=1024, vocabulary=50304)


def cs336_xl(batch: int = 4) -> Model:
    """The XL model of Stanford's CS336: 1,998,235,200 parameters, SwiGLU, no biases, on sequences of 128 tokens."""
    width, heads, layers, inner, vocabulary = 1600, 25, 48, 6400, 10000
    norm = partial(nn.RMSNorm, width)
    blocks: list[nn.Module] = [
        _Block(_Attention(width, heads, fused=False, bias=False), _Gated(width, inner), norm) for _ in range(layers)
    ]
    module = _LanguageModel(vocabulary, width, blocks, norm(), positions=0, tied=False)
    return module, _language_batch(batch, 128, vocabulary)


cs336_xl_batch_2 = partial(cs336_xl, 2)


def bert_base(batch: int, length: int = 128) -> Model:
    """BERT-Base's size: 110 million parameters, a vocabulary of 30,522 words, on sequences of 128 words."""
    return _gpt2(768, 12, 12, batch=batch, length=length, vocabulary=30522, positions=512)


bert_base_batch_32, bert_base_batch_48, bert_base_batch_64, bert_base_batch_96 = (
    partial(bert_base, batch) for batch in (32, 48, 64, 96)
)


def transformer_231m() -> Model:
    """A transformer of the size of Anemoi's (231 million parameters), whose layers are of one width."""
    return _gpt2(1024, 16, 17, batch=8, length=512, vocabulary=16000)


# Transformer-XL


class _RelativeAttention(nn.Module):
    """Attention over a memory and the present segment, with relative positions (Dai et al. 2019)."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self._heads, self._head_width = heads, head_width
        inner = heads * head_width
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.positions = nn.Linear(width, inner, bias=False)
        self.output = nn.Linear(inner, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        split = (batch, -1, self._heads, self._head_width)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(torch.cat([memory, x], 1)).chunk(3, -1))
        q = q[:, :, -length:]
        r = self.positions(positions).view(-1, self._heads, self._head_width).transpose(0, 1)
        scores = q @ k.transpose(-2, -1) + q @ r.transpose(-2, -1)
        read = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.norm(x + self.output(read))  # type: ignore[no-any-return]


class _TransformerXL(nn.Module):
    """Transformer-XL whose output clusters share the embedding."""

    def __init__(self, vocabulary: int, width: int, heads: int, inner: int, layers: int, memory: int) -> None:
        super().__init__()
        self._memory = memory
        self.token = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(_RelativeAttention(width, heads, width // heads) for _ in range(layers))
        self.feed_forward = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        memory = x.new_zeros(x.shape[0], self._memory, x.shape[-1])
        positions = x.new_zeros(self._memory + x.shape[1], x.shape[-1])
        for attention, feed_forward, norm in zip(self.attention, self.feed_forward, self.norms, strict=True):
            x = attention(x, memory, positions)
            x = norm(x + feed_forward(x))
        return functional.linear(x, self.token.weight[:20_000])  # most tokens are in the first cluster


def transformer_xl_base(batch: int = 32) -> Model:
    """Transformer-XL Base: 16 layers of width 512, 267,735 words, segments and memory of 192 tokens."""
    tokens = torch.randint(20_000, (batch, 193))
    return _TransformerXL(267_735, 512, 8, 2048, 16, 192), _Loss(tokens[:, :-1], tokens[:, 1:])


transformer_xl_base_batch_16 = partial(transformer_xl_base, 16)


# Residual networks


class _Bottleneck(nn.Module):
    """1 x 1, grouped 3 x 3, 1 x 1 convolutions and a shortcut (Xie et al. 2017); one group: a plain ResNet."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class _ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], *, first_width: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs, stages = 64, list[nn.Module]()
        for stage, depth in enumerate(depths):
            outputs, width = 256 * 2**stage, first_width * 2**stage
            for position in range(depth):
                stride = 2 if stage and not position else 1
                stages.append(_Bottleneck(inputs, width, outputs, stride, groups))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(self.maxpool(functional.relu(self.bn1(self.conv1(images)))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def _resnet(depths: tuple[int, ...], batch: int) -> Model:
    module = _ResNet(depths, first_width=64, groups=1)
    return module, _Loss(torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,)))


def resnet50(batch: int = 32) -> Model:
    """ResNet-50 on images of 224 x 224: 25,557,032 parameters in 161 tensors."""
    return _resnet((3, 4, 6, 3), batch)


def resnet101(batch: int = 32) -> Model:
    """ResNet-101 on images of 224 x 224: 44,549,160 parameters in 314 tensors."""
    return _resnet((3, 4, 23, 3), batch)


def resnet152(batch: int = 512) -> Model:
    """ResNet-152 on images of 224 x 224: 60,192,808 parameters in 467 tensors."""
    return _resnet((3, 8, 36, 3), batch)


def deepcam() -> Model:
    """A ResNet of the size of MLPerf HPC's DeepCAM: 56.8 million parameters, one image a GPU.

    DeepCAM's gradients are one bucket, which is sent after the backward pass, so that only their size counts.
    """
    return _resnet((3, 8, 33, 3), 1)


resnet50_batch_128, resnet50_batch_256 = partial(resnet50, 128), partial(resnet50, 256)


def resnext101_32x4d(batch: int = 128) -> Model:
    """ResNeXt-101 with 32 groups of width 4 on images of 224 x 224: 44,177,704 parameters in 314 tensors."""
    module = _ResNet((3, 4, 23, 3), first_width=128, groups=32)
    return module, _Loss(torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,)))


class _VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2021) on images of 224 x 224 in patches of 16 x 16."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.patches = nn.Conv2d(3, width, 16, 16)
        norm = partial(nn.LayerNorm, width)
        self.blocks = nn.Sequential(
            *(
                _Block(_Attention(width, heads, fused=True, bias=True), _perceptron(width, 4 * width), norm)
                for _ in range(layers)
            )
        )
        self.norm, self.head = norm(), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


def vit_b_16(batch: int = 1024) -> Model:
    """ViT-B/16 on images of 224 x 224: 86,567,656 parameters in 152 tensors."""
    return _VisionTransformer(768, 12, 12), _Loss(torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,)))


# RetinaNet


class _ConvRelu(nn.Conv2d):
    """A convolution with the scale and shift of a frozen batch norm, and ReLU in place."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu_(super().forward(x))


class FrozenNormBottleneck(nn.Module):
    """The bottleneck of ResNeXt-50 32x4d, whose batch norms are frozen."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _ConvRelu(inputs, width, 1)
        self.conv2 = _ConvRelu(width, width, 3, stride, padding=1, groups=32)
        self.conv3 = nn.Conv2d(width, outputs, 1)
        changes = stride > 1 or inputs != outputs
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return functional.relu_(self.conv3(self.conv2(self.conv1(x))) + self.downsample(x))


class RetinaNet(nn.Module):
    """MLPerf's RetinaNet: a pyramid of five levels, nine anchors at each place; stem and first stage are frozen."""

    block = FrozenNormBottleneck

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, inputs, self.stages = _ConvRelu(3, 64, 7, 2, padding=3), 64, nn.ModuleList()
        for stage, depth in enumerate((3, 4, 6, 3)):
            blocks = []
            for position in range(depth):
                stride = 2 if stage and not position else 1
                blocks.append(self.block(inputs, 128 * 2**stage, 256 * 2**stage, stride))
                inputs = 256 * 2**stage
            self.stages.append(nn.Sequential(*blocks))
        self.stem.requires_grad_(requires_grad=False)
        self.stages[0].requires_grad_(requires_grad=False)
        self.lateral = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in (512, 1024, 2048))
        self.smooth = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in range(3))
        self.coarser = nn.ModuleList(nn.Conv2d(256, 256, 3, 2, padding=1) for _ in range(2))
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(_ConvRelu(256, 256, 3, padding=1) for _ in range(4)), nn.Conv2d(256, 9 * outputs, 3, padding=1)
            )
            for outputs in (classes, 4)
        )

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """Return the features of all levels, the finest first."""
        x, maps = functional.max_pool2d(self.stem(images), 3, 2, 1), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        levels = [lateral(one) for lateral, one in zip(self.lateral, maps[1:], strict=True)]
        for finer in (1, 0):
            levels[finer] = levels[finer] + functional.interpolate(levels[finer + 1], size=levels[finer].shape[2:])
        levels = [smooth(one) for smooth, one in zip(self.smooth, levels, strict=True)]
        for convolution in self.coarser:
            levels.append(convolution(functional.relu(levels[-1])))
        return levels

    def forward(self, images: Tensor) -> Tensor:
        """Return a loss without meaning: the sum of logits and boxes."""
        levels = self.pyramid(images)
        return torch.stack([head(one).float().sum() for head in self.heads for one in levels]).sum()


def retinanet(batch: int = 32, dtype: torch.dtype = torch.float16) -> Model:
    """MLPerf's RetinaNet on images of 800 x 800: 36.8 million trainable parameters, in 16 bits from its v4.0 on.

    The loss is a sum in place of focal loss and box regression, which have no parameters.
    """
    module = RetinaNet(264).to(dtype)
    images = torch.randn(batch, 3, 800, 800, dtype=dtype)

    def loss(model: nn.Module) -> Tensor:
        return model(images)  # type: ignore[no-any-return]

    return module, loss


retinanet_float32 = partial(retinanet, dtype=torch.float32)
