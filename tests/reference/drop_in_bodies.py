"""Rank bodies for what torch's class does beyond averaging: mixed precision, delayed all-reduces, meshes, groups."""

import copy
import functools
import io
import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from reference.broadcast import broadcast_coalesced
from reference.data_parallel import DistributedDataParallel

from .scenarios import ODD_BUFFERS, batch, gradients

TorchDDP = nn.parallel.DistributedDataParallel
CLASSES = {"ours": DistributedDataParallel, "torch": TorchDDP}

# Mixed precision


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


def mixed_like_torch(rank: int, _world_size: int, widths: tuple, precision: Precision, options: dict) -> list:
    """By class, gradients and parameters from the second iteration on: torch's first averages are not initialised."""
    both = []
    for wrap in (DistributedDataParallel, TorchDDP):
        with torch_on_cpu():
            ddp = wrap(Mixture(widths), mixed_precision=precision.config(), **options)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            seen = []
            for step in range(4):
                ddp.zero_grad()
                ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
                if step > 0:
                    optimizer.step()
                    seen.append([*gradients(ddp), *(p.detach().clone() for p in ddp.parameters())])
            both.append([*seen, *ddp.buffers(), str(ddp.module.dtypes)])
    return both


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
    torch.manual_seed(0)
    module = LAYERS[kind]()
    alone = [copy.deepcopy(module) if kind != "weight norm in hooks" else None for _ in range(world_size)]
    if kind == "weight norm in hooks":
        for other in range(world_size):
            torch.manual_seed(0)
            alone[other] = LAYERS[kind]()
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
    loss(copied(batch(rank, 2, 3, 4).to(dtype)))
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
    seen = []
    for ddp in copies:
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
        seen.append(gradients(ddp))
    return seen[0], seen[1:]


# Delayed all-reduces


class Tower(nn.Module):
    """Linear layers, each with a name, whose gradients arrive from the last to the first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=layer > 0) for layer in range(count))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


@contextmanager
def all_reduces_wait() -> Iterator[None]:
    """Make `dist.all_reduce` wait: torch's class never waits for its delayed all-reduce."""
    all_reduce = dist.all_reduce

    def wait(tensor: Tensor, *args: Any, **options: Any) -> Any:
        work = all_reduce(tensor, *args, **options)
        if work is not None:
            work.wait()
        return work

    with mock.patch.object(dist, "all_reduce", wait):
        yield


def _train_tower(
    wrap: type[nn.Module],
    rank: int,
    layers: int,
    names: list[str] | None,
    trigger: str,
    options: dict,
    accumulate: int,
    set_to_none: bool,
) -> list:
    module = Tower(layers)
    parameters = dict(module.named_parameters())
    if names is not None:
        options = options | {
            "delay_all_reduce_named_params": [(name, parameters[name]) for name in names],
            "param_to_hook_all_reduce": parameters[trigger],
        }
    ddp = wrap(module, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        last = (step + 1) % accumulate == 0
        with nullcontext() if last else ddp.no_sync():
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
        if last:
            seen.append([g.clone() for g in gradients(ddp)])
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return [*seen, [p.detach().clone() for p in ddp.parameters()]]


def delayed(rank: int, _world_size: int, layers: int, names: list[str], *script: Any) -> tuple[list, list]:
    """Ours with delayed all-reduces, and torch's class without."""
    return _train_tower(DistributedDataParallel, rank, layers, names, *script), _train_tower(
        TorchDDP, rank, layers, None, *script
    )


def delayed_like_torch(
    rank: int, _world_size: int, layers: int, names: list[str], trigger: str, options: dict
) -> list:
    """Both classes with delayed all-reduces."""
    script = (rank, layers, names, trigger, options, 1, True)
    with all_reduces_wait():
        return [_train_tower(wrap, *script) for wrap in (DistributedDataParallel, TorchDDP)]


def delayed_details(rank: int, _world_size: int) -> dict[str, object]:
    """The buckets, and a delayed parameter that no rank uses."""
    module = Tower(2)
    unused = nn.Parameter(torch.ones(3))
    module.register_parameter("unused", unused)
    first = module.layers[0].weight
    ddp = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("unused", unused), ("scale", module.scale)],
        param_to_hook_all_reduce=first,
    )
    ddp(batch(rank, 3, 4)).sum().backward()
    other = pickle.loads(pickle.dumps(ddp))
    other.zero_grad()
    other(batch(rank, 3, 4)).sum().backward()
    return {
        "bucketed": list(ddp.bucketed_parameters()),
        "unused": unused.grad.tolist(),
        "copy": torch.equal(other.module.scale.grad, module.scale.grad),
    }


# Meshes


@functools.cache
def mesh_of_two_dimensions() -> DeviceMesh:
    """A mesh of 2 x 2 ranks; made once, because each mesh keeps process groups."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


class Wide(nn.Module):
    """A tensor-parallel pair of layers behind one that every rank holds whole."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.first(x).tanh()).tanh())


def sharded(rank: int, _world_size: int, hidden: int, options: dict) -> tuple[list, list, dict[str, object]]:
    """Gradients and shards after each step under both classes, and what our class's state dict holds."""
    mesh = mesh_of_two_dimensions()
    both = []
    for wrap in (DistributedDataParallel, TorchDDP):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        module = parallelize_module(Wide(hidden), mesh["tensor"], plan)
        ddp = wrap(module, device_mesh=mesh["data"], **options)
        if wrap is DistributedDataParallel:
            ours = ddp
        parameters = list(ddp.parameters())  # torch's class has none after its first forward pass
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch(mesh["data"].get_local_rank(), 3, 4, step=step)).square().mean().backward()
            optimizer.step()
            seen.append([p.grad.clone() for p in parameters] + [p.detach().clone() for p in parameters])
        both.append(seen)
    return (*both, {name: tuple(value.shape) for name, value in ours.state_dict().items()})


def refused_shards(rank: int, _world_size: int) -> tuple[str, bool, list, list]:
    """The error of ranks with different caps, whether the module is as before, and gradients of a second attempt."""
    mesh = mesh_of_two_dimensions()
    module = parallelize_module(Wide(4), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    before = list(map(id, module.parameters()))
    try:
        DistributedDataParallel(module, device_mesh=mesh["data"], bucket_cap_mb=1 + mesh["data"].get_local_rank())
    except RuntimeError as error:
        text = str(error)
    same = before == list(map(id, module.parameters()))
    ddp = DistributedDataParallel(module, device_mesh=mesh["data"])
    ddp(batch(mesh["data"].get_local_rank(), 3, 4)).square().mean().backward()
    got = [p.grad.clone() for p in ddp.parameters()]
    return text, same, got, sharded(rank, 4, 4, {})[0][0][: len(got)]


def sharded_in_low_precision(rank: int, _world_size: int, hidden: int) -> float:
    """Largest relative difference between gradients computed in bfloat16 and in float32."""
    mesh = mesh_of_two_dimensions()
    both = []
    for config in (None, Precision("bfloat16", None).config()):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        module = parallelize_module(Wide(hidden), mesh["tensor"], plan)
        ddp = DistributedDataParallel(module, device_mesh=mesh["data"], mixed_precision=config)
        ddp(batch(mesh["data"].get_local_rank(), 3, 4)).square().mean().backward()
        both.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
    return float((both[0] - both[1]).abs().max() / both[0].abs().max())


# Process groups


@functools.cache
def three_of_four() -> dist.ProcessGroup:
    """A group without rank 0; made once."""
    return dist.new_group([1, 2, 3])


def broadcast_odd_tensors(rank: int, _world_size: int, kinds: list[str], source: int, piece_bytes: int) -> list:
    """Tensors of each rank of a group after a broadcast from one of them, and those that it had before."""
    group = three_of_four()
    if rank == 0:
        return []
    tensors, sent = (
        [ODD_BUFFERS[kind](torch.arange(24.0) * (number + 1) * of) for number, kind in enumerate(kinds)]
        for of in (rank, source + 1)
    )
    broadcast_coalesced(tensors, group, source=source, piece_bytes=piece_bytes)
    return [
        ([*tensor.resolve_conj().tolist()], [*was.resolve_conj().tolist()])
        for tensor, was in zip(tensors, sent, strict=True)
    ]


class Fails(torch.autograd.Function):
    """An error in the backward pass."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Tensor) -> Tensor:
        raise ArithmeticError


def update_groups(
    rank: int, _world_size: int, groups: list[tuple[int, ...]], options: dict, fails: bool
) -> tuple[list, list, bool]:
    """Gradients of both classes in one process group after the other, and whether ours rebuilt its last buckets.

    With `fails`, each group's last backward pass raises an error under our class.
    """
    made = [dist.new_group(list(ranks)) for ranks in groups]
    both = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(Tower(3), bucket_cap_mb=1e-4, **options)
        seen = []
        for group, ranks in zip([None, *made], [range(4), *groups], strict=True):
            if group is not None:
                ddp._update_process_group(group)
            if rank not in ranks:
                continue
            for step in range(3):
                ddp.zero_grad()
                ddp(batch(rank, 4, 4, step=step)).square().mean().backward()
                seen.append(gradients(ddp))
            if fails and wrap is DistributedDataParallel:
                with suppress(ArithmeticError):
                    Fails.apply(ddp(batch(rank, 4, 4))).sum().backward()
        both.append(seen)
        if wrap is DistributedDataParallel:
            rebuilt = ddp._has_rebuilt_buckets
        del ddp  # torch's may hang when it is freed after its group
    dist.barrier()
    for group, ranks in zip(made, groups, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)
    return (*both, rebuilt)


def update_with_a_comm_hook(rank: int, _world_size: int) -> list[float]:
    """Rank 0 and 1 train in a group of their own, in low precision: averages before and after."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), mixed_precision=Precision(None, "float16").config())
    pair = dist.new_group([0, 1])
    averages = []
    for group in (None, pair):
        ddp._update_process_group(group)
        if group is None or rank < 2:
            ddp.zero_grad()
            ddp(torch.full((1, 1), float(rank))).sum().backward()
            averages.append(ddp.module.weight.grad.item())
    if rank < 2:
        dist.destroy_process_group(pair)
    return averages


# Features switched on after construction


def static_graph_later(rank: int, _world_size: int, options: dict) -> tuple[list, list]:
    """Gradients under both classes, which learn after construction that the graph is static."""
    both = []
    for wrap in (DistributedDataParallel, TorchDDP):
        module = Tower(3)
        module.register_parameter("unused", nn.Parameter(torch.ones(2)))
        ddp = wrap(module, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp._set_static_graph()
            ddp._set_static_graph()
        seen = [ddp.static_graph, len(caught)]
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
            seen.append(gradients(ddp))
        both.append(seen)
    return tuple(both)


# torch.compile


class Layers(nn.Module):
    """A user-defined class, because torch.compile skips torch's own, such as Sequential."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.register_buffer("shift", torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x + self.shift


def compiled(rank: int, _world_size: int, order: str, backend: str, options: dict) -> list[tuple]:
    """By class: gradients and parameters after each step, and the number of graphs; `order` says what is compiled."""
    both = []
    for wrap in (DistributedDataParallel, TorchDDP):
        from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        module: nn.Module = Layers(4, 600)
        if order == "module":
            module = torch.compile(module, backend=counter)
        ddp: Any = wrap(module, bucket_cap_mb=1, **options)
        run = torch.compile(ddp, backend=counter) if order == "wrapper" else ddp
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            run(batch(rank, 2, 600, step=step)).square().mean().backward()
            optimizer.step()
            seen.append([*gradients(ddp), *(p.detach().clone() for p in ddp.parameters())])
        both.append((seen, counter.frame_count))
    torch._dynamo.reset()
    return both


def compiled_in_low_precision(rank: int, _world_size: int, order: str) -> tuple[list, list]:
    """Gradients of three steps, compiled and not."""
    both = []
    for compiles in (True, False):
        torch._dynamo.reset()
        module: nn.Module = Layers(2, 8)
        if compiles and order == "module":
            module = torch.compile(module, backend="eager")
        ddp: Any = DistributedDataParallel(module, mixed_precision=Precision("bfloat16", "float32").config())
        run = torch.compile(ddp, backend="eager") if compiles and order == "wrapper" else ddp
        seen = []
        for step in range(3):
            ddp.zero_grad()
            run(batch(rank, 2, 8, step=step)).float().square().mean().backward()
            seen.append(gradients(ddp))
        both.append(seen)
    torch._dynamo.reset()
    return tuple(both)


# Names that torch's own libraries use


def replicated(rank: int, _world_size: int) -> tuple[list, list]:
    """Gradients under torch's `replicate`, built on our class and on torch's."""
    both = []
    for wrap in (DistributedDataParallel, TorchDDP):
        module = Tower(2)
        with (
            mock.patch.dict(replicate.__globals__, {"DistributedDataParallel": wrap}),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            replicate(module)
            seen = []
            for step in range(3):
                module.zero_grad()
                module(batch(rank, 3, 4, step=step)).square().mean().backward()
                seen.append(gradients(module))
        both.append(seen)
    return tuple(both)
