"""Rank bodies of test_mixed_precision.py."""

import copy
import io
import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ddplab.reference.data_parallel import DistributedDataParallel

from ..scenarios import Wrap, batch, gradients, on_both_classes, train, trained


@dataclass(frozen=True)
class Precision:
    """Names of the dtypes of a configuration. None: as it is."""

    param: str | None
    reduce: str | None
    buffer: str | None = None

    def config(self) -> _MixedPrecision:
        return _MixedPrecision(*(name and getattr(torch, name) for name in (self.param, self.reduce, self.buffer)))


class Mixture(nn.Module):
    """Layers with a frozen scale, buffers of two dtypes, and perhaps a layer that runs twice or again in backward."""

    def __init__(self, widths: tuple[int, ...], *, twice: bool = False, again: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip((4, *widths), (*widths, 4), strict=True))
        self.scale = nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("shift", torch.rand(4))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.twice, self.again = twice, again
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes |= {x.dtype, *(parameter.dtype for parameter in self.parameters())}
        if self.again == "re-entrant":
            x.requires_grad_()
        if self.twice:
            x = x + self.layers[0](x).mean()
        for layer in self.layers:
            if self.again is not None:
                x = checkpoint(layer, x, use_reentrant=self.again == "re-entrant").tanh()
            else:
                x = layer(x).tanh()
        return x * self.scale + self.shift


@contextmanager
def torch_on_cpu() -> Iterator[None]:
    """Make torch's mixed precision run on the CPU, which has neither streams nor events and needs none."""

    class NoStream(nullcontext):
        def __init__(self, *_args: Any, **_options: Any) -> None:
            super().__init__()

        def wait_stream(self, _other: Any) -> None:
            pass

    class NoEvent(SimpleNamespace):
        def record(self) -> None:
            pass

        def wait(self, **_options: Any) -> None:
            pass

    logging.getLogger("torch.nn.parallel.distributed").setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "Stream", NoStream))
        stack.enter_context(mock.patch.object(torch, "Event", NoEvent))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", NoStream))
        yield


@on_both_classes
def mixed_like_torch(wrap: Wrap, rank: int, widths: tuple, precision: Precision, options: dict) -> list:
    """Gradients and parameters from the second iteration on: torch's first averages are not initialised."""
    with torch_on_cpu():
        ddp = wrap(Mixture(widths), mixed_precision=precision.config(), **options)
        trained(ddp, rank, steps=1)
        return [train(ddp, rank), *ddp.buffers(), str(ddp.module.dtypes)]


def mixed_like_one_process(
    rank: int,
    world_size: int,
    widths: tuple,
    precision: Precision,
    options: dict,
    kind: dict,
    accumulate: int,
    set_to_none: bool,
) -> tuple[list, list]:
    """Averages of each synchronised iteration, then those computed without data parallelism."""
    config = precision.config()
    ddp = DistributedDataParallel(Mixture(widths, **kind), mixed_precision=config, **options)
    alone = [Mixture(widths, **kind) for _ in range(world_size)]
    reduce_dtype = config.reduce_dtype or config.param_dtype or torch.float32
    got, expected = [], []
    for step in range(4):
        last = (step + 1) % accumulate == 0
        with nullcontext() if last else ddp.no_sync():
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
        assert all(parameter.dtype == torch.float32 for parameter in ddp.parameters())
        for other, model in enumerate(alone):
            _backward_in(model, config, batch(other, 3, 4, step=step))
        if not last:
            continue
        got.append(gradients(ddp))
        terms = [[None if g is None else g.to(reduce_dtype) for g in gradients(model)] for model in alone]
        expected.append([None if a is None else ((a + b) / world_size).float() for a, b in zip(*terms, strict=True)])
        for model in (ddp, *alone):
            model.zero_grad(set_to_none=set_to_none)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of checkpoints
            ddp(batch(rank, 3, 4))
    return got, expected


def _backward_in(model: Mixture, config: _MixedPrecision, x: Tensor) -> None:
    """Forward in low precision and backward; checkpoints change no numbers, so they are left out."""
    model.again = None
    named = {name: p.to(config.param_dtype or p.dtype) for name, p in model.named_parameters()}
    named["shift"] = model.shift.to(config.buffer_dtype or model.shift.dtype)
    y = torch.func.functional_call(model, named, (x.to(config.param_dtype or x.dtype),))
    y.square().mean().backward()


def mixed_details(rank: int, _world_size: int) -> dict[str, object]:
    """What a script sees of a module of ignored, frozen, shared and integer tensors."""
    module = Mixture((6,))
    module.register_parameter("count", nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False))
    module.register_parameter("own", nn.Parameter(torch.full((4,), float(rank)), requires_grad=False))
    module.layers.append(module.layers[-1])  # registered twice
    module.layers[1] = nn.Linear(6, 4)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own"])
    seen: dict[str, object] = {}

    def forward(x: Tensor) -> Tensor:
        seen["in forward"] = {name: p.dtype for name, p in module.named_parameters()}
        x = module.layers[1](module.layers[0](x))
        if x.isnan().any():
            raise ValueError("not a number")
        return x

    module.forward = forward
    config = _MixedPrecision(torch.bfloat16, torch.float32, torch.float16)
    ddp = DistributedDataParallel(module, mixed_precision=config, find_unused_parameters=True)
    ddp(batch(rank, 3, 4)).sum().backward()
    seen["state"] = {name: value.dtype for name, value in ddp.state_dict().items()}
    seen["torch's names"] = {p._mp_param.dtype for p in module.parameters() if hasattr(p, "_mp_param")}
    seen["own"] = module.own.tolist()
    for bad in (torch.full((3, 4), torch.nan), torch.ones(3, 5)):
        try:
            ddp(bad)
        except (ValueError, RuntimeError):
            seen.setdefault("after errors", set()).update(p.dtype for p in module.layers.parameters())
    del ddp
    module(torch.ones(3, 4))
    seen["after the wrapper"] = seen["in forward"]["layers.0.weight"]
    return seen


def _with_norm(norm: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    norm(module[0])
    return module


LAYERS: dict[str, Any] = {
    "LSTM": lambda: nn.LSTM(4, 6, num_layers=2),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "weight norm": lambda: _with_norm(nn.utils.parametrizations.weight_norm),
    "weight norm in hooks": lambda: _with_norm(nn.utils.weight_norm),
    "convolution": lambda: nn.Conv1d(3, 3, 3, padding=1),
}


def mixed_layers(rank: int, world_size: int, kind: str) -> tuple[list, list]:
    """Averages of two passes through one of torch's layers, then the same without data parallelism."""
    warnings.simplefilter("ignore", FutureWarning)  # of weight norm in hooks
    dtype = torch.bfloat16
    made = []
    for _ in range(1 + world_size):  # copies would not do: weight norm in hooks has tensors that are no leaves
        torch.manual_seed(0)
        made.append(LAYERS[kind]())
    module, *alone = made
    ddp = DistributedDataParallel(module, mixed_precision=_MixedPrecision(dtype, torch.float32))

    def loss(output: Any) -> Tensor:
        return (output if isinstance(output, Tensor) else output[0]).square().mean()

    got, expected = [], []
    for step in range(2):
        for model in (ddp, *alone):
            model.zero_grad()
        loss(ddp(batch(rank, 2, 3, 4, step=step))).backward()
        for other, model in enumerate(alone):
            named = {name: p.to(dtype) for name, p in model.named_parameters()}
            x = batch(other, 2, 3, 4, step=step).to(dtype)
            loss(torch.func.functional_call(model, named, (x,))).backward()
        got.append(gradients(ddp))
        expected.append([(a + b) / world_size for a, b in zip(*map(gradients, alone), strict=True)])
    copied = copy.deepcopy(ddp.module) if kind != "weight norm in hooks" else ddp.module
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float32}
    loss(copied(batch(rank, 2, 3, 4)))
    return got, expected


def mixed_sparse(rank: int, _world_size: int, precision: Precision) -> tuple[list, list]:
    """Averages of an embedding's gradients, sparse and dense."""
    both = []
    for sparse in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 2))
        ddp = DistributedDataParallel(module, mixed_precision=precision.config())
        ddp(torch.tensor([rank, 3])).square().sum().backward()
        both.append([(g.to_dense() if g.is_sparse else g) for g in gradients(ddp)])
    return tuple(both)


def mixed_after_pickling(rank: int, _world_size: int) -> tuple[list, list]:
    ddp = DistributedDataParallel(Mixture((6,)), mixed_precision=Precision("bfloat16", "float16", "float16").config())
    file = io.BytesIO()
    torch.save(ddp, file)
    copies = [ddp, torch.load(io.BytesIO(file.getvalue()), weights_only=False), pickle.loads(pickle.dumps(ddp))]
    original, *others = (trained(ddp, rank) for ddp in copies)
    return original, others


class _Interrupted(nn.Module):
    def forward(self, _x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def interrupted_in_forward(_rank: int, _world_size: int) -> tuple[bool, set[torch.dtype]]:
    """After Ctrl-C in forward: whether the module has its parameters, and the dtypes of its state dict."""
    module = nn.Sequential(nn.Linear(2, 2), _Interrupted())
    before = list(module.parameters())
    ddp = DistributedDataParallel(module, mixed_precision=_MixedPrecision(torch.bfloat16))
    try:
        ddp(torch.ones(1, 2))
    except KeyboardInterrupt:
        after = list(module.parameters())
        same = len(after) == len(before) and all(one is other for one, other in zip(after, before, strict=True))
        return same, {tensor.dtype for tensor in module.state_dict().values()}
    raise AssertionError("no Ctrl-C")
