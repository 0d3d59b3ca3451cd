"""Programs that left gradients local in silence, or failed where torch's class trains; each runs on two ranks.

Each returns what it saw: whether gradients are the averages that one process computes, warnings and the error.
"""

import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ddplab.reference.data_parallel import DistributedDataParallel

LOW = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0},
}
COMPILED: dict[str, dict[str, Any]] = {
    **{name: options for name, options in OPTIONS.items() if name != "small buckets"},  # torch.compile refuses these
    "debug": {"debug": True},
    "mixed precision": {"mixed_precision": LOW},
}


class Seen(NamedTuple):
    """What a program saw on one rank: whether its gradients were right, its warnings, its error ("": none)."""

    right: bool | None
    warned: list[str]
    error: str


class Heads(nn.Module):
    """A trunk and two heads; forward returns the outputs of the `heads` that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

    def forward(self, x: Tensor, *heads: int) -> list[Tensor]:
        x = self.trunk(x).tanh()
        return [self.heads[number](x) for number in heads or (0, 1)]


class Gain(nn.Module):
    """Uses a parameter of its own in a method that activation checkpoints run again."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain, self.linear = nn.Parameter(torch.full((3,), 1.5)), nn.Linear(3, 3)
        self.reentrant = reentrant

    def scaled(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.gain).tanh()

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.scaled(x)
        result: Tensor = checkpoint(self.scaled, x, use_reentrant=self.reentrant)
        return result


def inputs(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3).cos() * (rank + 1)


def averages(module: nn.Module, step: Callable[[nn.Module, Tensor], None], world_size: int) -> list[Tensor | None]:
    """The averages that one process computes: `step` for the inputs of each rank in turn, on a copy of the module."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    for rank in range(world_size):
        step(alone, inputs(rank))
    return [None if p.grad is None else p.grad / world_size for p in alone.parameters()]


def same(module: nn.Module, expected: list[Tensor | None], *, loosely: bool = False) -> bool:
    """Whether the module has these gradients; None and zeros are the same."""
    close = partial(torch.allclose, rtol=0.05, atol=0.05) if loosely else torch.allclose
    pairs = zip(module.parameters(), expected, strict=True)
    zero = [
        (torch.zeros_like(p) if p.grad is None else p.grad, torch.zeros_like(p) if e is None else e) for p, e in pairs
    ]
    return all(close(gradient, other) for gradient, other in zero)


@contextmanager
def watched(seen: list[Seen], right: Callable[[], bool | None]) -> Iterator[None]:
    """Append what is seen while the body of the `with` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = ""
        try:
            yield
        except (RuntimeError, AttributeError, ValueError, TypeError, AssertionError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    warned = [str(one.message) for one in caught if "rank" in str(one.message)]
    seen.append(Seen(None if error else right(), warned, error))


def total(outputs: Any) -> Tensor:
    return sum((output**2).sum() for output in outputs)  # type: ignore[return-value]


# Worse than torch's class


def absent_in_low_precision(rank: int, world_size: int, option: str, how: str) -> Seen:
    """Rank 1 uses head 0 only; averages come in a lower precision than the parameters."""
    module, seen = Heads(), []
    heads = [(0, 1), (0,)]
    options = {**OPTIONS[option], "find_unused_parameters": True}
    if how == "mixed precision":
        ddp = DistributedDataParallel(module, mixed_precision=LOW, **options)
    else:
        ddp = DistributedDataParallel(module, **options)
        ddp.register_comm_hook(None, in_half)

    def step(one: nn.Module, x: Tensor) -> None:
        which = next(rank for rank in range(world_size) if torch.equal(x, inputs(rank)))
        total(one(x, *heads[which])).backward()

    expected = averages(module, step, world_size)
    with watched(seen, lambda: same(module, expected, loosely=True)):
        for _ in range(3):
            ddp.zero_grad()
            total(ddp(inputs(rank), *heads[rank])).backward()
    return seen[0]


def wrapped_in_inference_mode(rank: int, world_size: int, option: str) -> Seen:
    module, seen = Heads(), []

    def step(one: nn.Module, x: Tensor) -> None:
        total(one(x)).backward()

    expected = averages(module, step, world_size)
    with watched(seen, lambda: same(module, expected)):
        with torch.inference_mode():
            ddp = DistributedDataParallel(module, **OPTIONS[option])
        for _ in range(3):
            ddp.zero_grad()
            step(ddp, inputs(rank))
    return seen[0]


def wrapped_for_one_step(rank: int, world_size: int, option: str) -> Seen:
    """Nothing but the graph holds the wrapper in the backward pass."""
    module, seen = Heads(), []
    expected = averages(module, lambda one, x: total(one(x)).backward(), world_size)
    with watched(seen, lambda: same(module, expected)):
        for _ in range(2):
            module.zero_grad()
            loss = total(DistributedDataParallel(module, **OPTIONS[option])(inputs(rank)))
            gc.collect()
            loss.backward()
    return seen[0]


def in_half(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future: Any = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def absent_sparse(rank: int, _world_size: int) -> Seen:
    """A sparse gradient that rank 1 has not, averaged in half precision."""
    torch.manual_seed(0)
    module, seen = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "linear": nn.Linear(2, 2)}), []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, rows: Tensor | None) -> Tensor:
            x = torch.ones(2, 2) if rows is None else self.parts["table"](rows)
            return self.parts["linear"](x)

    ddp = DistributedDataParallel(Model(), find_unused_parameters=True)
    ddp.register_comm_hook(None, sparse_in_half)
    table = module["table"].weight

    def right() -> bool:
        gradient = table.grad
        return (
            gradient is not None and gradient.dtype == torch.float32 and bool(gradient.to_dense()[0].abs().sum() > 0)
        )

    with watched(seen, right):
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.tensor([0, 2]) if rank == 0 else None).sum().backward()
    return seen[0]


def sparse_in_half(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer() / dist.get_world_size()
    future: Any = dist.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].to(torch.bfloat16))  # type: ignore[no-any-return]


def batch_skipped(rank: int, world_size: int, option: str) -> tuple[Seen, int]:
    """The first batch runs out of memory in backward, the next goes through the other head; gradients then alive."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **{**OPTIONS[option], "find_unused_parameters": True})

    def out_of_memory(_gradient: Tensor) -> None:
        raise MemoryError

    alive = [0]
    expected = averages(module, lambda one, x: total(one(x, 1)).backward(), world_size)
    with watched(seen, lambda: same(module, expected)):
        handle = module.trunk.weight.register_hook(out_of_memory)
        try:
            total(ddp(inputs(rank), 0)).backward()
        except MemoryError:
            handle.remove()
        ddp.zero_grad()
        alive[0] = len(ddp._reducer.changes)
        total(ddp(inputs(rank), 1)).backward()
    return seen[0], alive[0]


def sum_of_synchronized_and_not(rank: int, world_size: int, option: str) -> Seen:
    """`a` with synchronisation, `b` under `no_sync`, and one backward pass, under `no_sync`, of their sum."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])

    def step(one: nn.Module, x: Tensor) -> None:
        (first,) = one(x, 0)
        with one.no_sync() if isinstance(one, DistributedDataParallel) else nullcontext():
            (second,) = one(x, 1)
            (first.square().sum() + second.square().sum()).backward()

    expected = averages(module, step, world_size)
    with watched(seen, lambda: same(module, expected)):
        for _ in range(3):
            ddp.zero_grad()
            step(ddp, inputs(rank))
    return seen[0]


def forward_beside_backward(rank: int, _world_size: int, option: str) -> Seen:
    """A forward pass while another thread is in the middle of a backward pass that has brought gradients."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    inside, go_on = threading.Event(), threading.Event()

    def stop(_gradient: Tensor) -> None:
        inside.set()
        go_on.wait(20)

    module.trunk.weight.register_hook(stop)
    loss = total(ddp(inputs(rank)))
    thread = threading.Thread(target=loss.backward)
    with watched(seen, lambda: None):
        thread.start()
        inside.wait(20)
        try:
            ddp(inputs(rank))
        finally:
            go_on.set()
            thread.join()
    return seen[0]


def functional_transforms(rank: int, world_size: int, option: str) -> tuple[Seen, bool]:
    """`torch.func.grad`, `vjp`, `jacrev`, `hessian` and `vmap` of the wrapper, and whether they are right; a step."""
    torch.manual_seed(0)
    module, seen = nn.Linear(3, 2), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    x = inputs(rank)

    def loss(call: nn.Module, names: dict[str, Tensor], rows: Tensor) -> Tensor:
        out = torch.func.functional_call(call, names, (rows,))
        return (out**2).sum()

    def all_of(call: nn.Module) -> list[Tensor]:
        names = {name: parameter.detach() for name, parameter in call.named_parameters()}
        gradients = torch.func.grad(loss, argnums=1)(call, names, x)
        samples = torch.func.vmap(torch.func.grad(partial(loss, call)), in_dims=(None, 0))(names, x)
        _, pull = torch.func.vjp(call, x)
        jacobian, hessian = torch.func.jacrev(call)(x), torch.func.hessian(lambda rows: (call(rows) ** 2).sum())(x)
        return [*gradients.values(), *samples.values(), *pull(torch.ones(2, 2)), jacobian, hessian]

    expected = averages(module, lambda one, rows: one(rows).square().sum().backward(), world_size)
    equal = [False]
    with watched(seen, lambda: same(module, expected)):
        for _ in range(2):
            equal[0] = all(map(torch.allclose, all_of(ddp), all_of(module)))
            ddp.zero_grad()
            ddp(x).square().sum().backward()
    return seen[0], equal[0]


def physics_informed(rank: int, world_size: int, option: str) -> Seen:
    """The loss contains derivatives of the output by the input, made by `torch.func` transforms of the wrapper."""
    torch.manual_seed(0)
    module, seen = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])

    def step(call: nn.Module, rows: Tensor) -> None:
        _, pull = torch.func.vjp(call, rows)
        outputs = torch.func.vmap(call)(rows)
        (outputs.square().sum() + pull(torch.ones(2, 1))[0].square().sum()).backward()

    expected = averages(module, step, world_size)
    with watched(seen, lambda: same(module, expected)):
        for _ in range(3):
            ddp.zero_grad()
            step(ddp, inputs(rank))
    return seen[0]


def checkpointed_method(rank: int, world_size: int, reentrant: bool) -> Seen:
    """Mixed precision; a checkpoint of a method that uses a parameter of its own module."""
    module, seen = Gain(reentrant=reentrant), []
    ddp = DistributedDataParallel(module, mixed_precision=LOW)
    expected = averages(module, lambda one, x: one(x.requires_grad_()).square().sum().backward(), world_size)
    with watched(seen, lambda: same(module, expected, loosely=True) and module.gain.dtype == torch.float32):
        for _ in range(3):
            ddp.zero_grad()
            ddp(inputs(rank).requires_grad_()).square().sum().backward()
    return seen[0]


def module_in_full_precision(rank: int, _world_size: int) -> Seen:
    """Mixed precision; the module itself, and a copy of it, compute in full precision."""
    module, seen = Gain(), []
    plain = Gain()
    ddp = DistributedDataParallel(module, mixed_precision=LOW)
    outputs: list[Tensor] = []
    with watched(seen, lambda: all(torch.equal(output, plain(inputs(rank))) for output in outputs)):
        outputs.append(ddp.module(inputs(rank)))
        outputs.append(copy.deepcopy(ddp.module)(inputs(rank)))
        ddp(inputs(rank)).sum().backward()
        outputs.append(ddp.module(inputs(rank)))
    return seen[0]


def on_another_default_device(rank: int, world_size: int, option: str) -> Seen:
    """Tensors made without a device would be on `meta`."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    expected = averages(module, lambda one, x: total(one(x)).backward(), world_size)
    x = inputs(rank)
    with watched(seen, lambda: same(module, expected)):
        torch.set_default_device("meta")
        try:
            for _ in range(3):
                ddp.zero_grad()
                total(ddp(x)).backward()
        finally:
            torch.set_default_device(None)
    return seen[0]


class Recomputes(torch.autograd.Function):
    """A reversible layer: backward accumulates the parameters' gradients itself, and returns None for them."""

    @staticmethod
    def forward(context: Any, layer: nn.Module, x: Tensor, *_parameters: Tensor) -> Tensor:
        context.layer, context.x = layer, x.detach()
        with torch.no_grad():
            result: Tensor = layer(x)
            return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        x = context.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(context.layer(x), gradients[0])
        return None, x.grad, *[None for _ in context.layer.parameters()]


class Reversible(nn.Module):
    """A trunk, a layer that `Recomputes`, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.layer, self.head = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(Recomputes.apply(self.layer, self.trunk(x), *self.layer.parameters()).tanh())  # type: ignore[no-untyped-call]
        return result


def gradients_from_inside_a_function(rank: int, world_size: int) -> Seen:
    """A static graph; a parameter gets a gradient and then, from the function that computed it, an undefined one."""
    module, seen = Reversible(), []
    ddp = DistributedDataParallel(module, static_graph=True)
    expected = averages(module, lambda one, x: one(x).square().sum().backward(), world_size)
    right = []
    with watched(seen, lambda: all(right)):
        for _ in range(4):
            ddp.zero_grad()
            ddp(inputs(rank)).square().sum().backward()
            right.append(same(module, expected))
    return seen[0]


def trained_in_turn(rank: int, world_size: int, option: str, how: str) -> Seen:
    """Two wrappers of one module, which train in turn; or the first one is kept by mistake when the second trains.

    "accumulating": likewise, and the second adds up gradients under `no_sync`. "hidden": likewise, and forward's
    output is one in which the wrapper finds no tensor.
    """
    module, seen = Heads(), []
    if how == "hidden":
        module.register_forward_hook(lambda _module, _inputs, outputs: iter(outputs))
    first = DistributedDataParallel(module, **OPTIONS[option])
    second = copy.copy(first) if how == "shallow copy" else DistributedDataParallel(module, **OPTIONS[option])
    passes = 2 if how == "accumulating" else 1
    expected = averages(module, lambda one, x: (passes * total(one(x))).backward(), world_size)
    right = []
    with watched(seen, lambda: all(right)):
        for ddp in [second] * 4 if how in ("kept", "accumulating", "hidden") else [first, second] * 2:
            ddp.zero_grad()
            for _ in range(passes - 1):
                with ddp.no_sync():
                    total(ddp(inputs(rank))).backward()
            total(ddp(inputs(rank))).backward()
            right.append(same(module, expected))
    return seen[0]


def wrapper_beside(rank: int, world_size: int, option: str, inside: bool) -> Seen:
    """After wrapping, the wrapper or its module gets a layer that has a wrapper of its own."""
    module, seen = nn.Sequential(nn.Linear(3, 3)), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    head = nn.Linear(3, 3)
    both = nn.Sequential(ddp, DistributedDataParallel(head, **OPTIONS[option]))
    expected = averages(nn.Sequential(module[0], head), lambda one, x: one(x).square().sum().backward(), world_size)
    (module[0] if inside else ddp).wrapped_head = both[1]
    with watched(seen, lambda: same(nn.Sequential(module[0], head), expected)):
        for _ in range(3):
            both.zero_grad()
            both(inputs(rank)).square().sum().backward()
    return seen[0]


# Silent under torch's class too


def step_between(rank: int, _world_size: int, option: str, what: str) -> Seen:
    """Two backward passes of one forward pass; between them an optimiser steps, gradients are clipped, or nothing."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    step = torch.optim.SGD(module.heads[0].parameters(), lr=0.1)
    with watched(seen, lambda: None):
        for _ in range(2):
            ddp.zero_grad()
            first, second = ddp(inputs(rank))
            # The trunk's gradient comes with that of the second head.
            first.square().sum().backward(inputs=list(module.heads[0].parameters()), retain_graph=True)
            if what == "step":
                step.step()
            elif what == "clip":
                nn.utils.clip_grad_norm_(module.heads[0].parameters(), 1e-3)
            second.square().sum().backward()
    return seen[0]


def steps_without_averages(rank: int, _world_size: int, option: str, why: str) -> Seen:
    """An optimiser steps after passes without averages: a layer's parametrization was removed, ..."""
    module, seen = nn.Sequential(nn.Linear(3, 3), Heads()), []
    nn.utils.parametrize.register_parametrization(module[0], "weight", nn.Tanh())
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        total(ddp(inputs(rank))).backward()
    if why == "parametrization removed":
        nn.utils.parametrize.remove_parametrizations(module[0], "weight")
    ddp.require_manual_backward_finalization = why == "not finalized"
    with watched(seen, lambda: None):
        outputs = ddp(inputs(rank))
        total(outputs[1:] if why == "output not in the loss" else outputs).backward()
        optimizer.step()
    return seen[0]


def optimizer_in_a_hook(rank: int, _world_size: int, option: str, what: str) -> Seen:
    """A post-accumulate hook steps an optimiser, or moves gradients away."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in module.parameters()}

    def hook(parameter: Tensor) -> None:
        if what.startswith("step"):
            optimizers[parameter].step()  # type: ignore[index]
        if what != "step":
            parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    with watched(seen, lambda: None):
        for _ in range(2):
            total(ddp(inputs(rank))).backward()
    return seen[0]


def layer_changed(rank: int, _world_size: int, option: str, what: str) -> Seen:
    """After wrapping and a first iteration, a layer is replaced, or added."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    total(ddp(inputs(rank))).backward()
    if what == "head":
        module.heads[1] = nn.Linear(3, 2)
    elif what == "append":
        module.heads.append(nn.Linear(3, 2))
    elif what == "module":
        ddp.module = Heads()
    elif what == "converted":
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            module.double().float()
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
    elif what == "beside":
        ddp.head = nn.Linear(2, 2)
    elif what == "teacher":
        module.teacher = Heads()
    elif what == "frozen":
        module.average = copy.deepcopy(module).requires_grad_(requires_grad=False)
    elif what == "frozen, then not":
        module.heads.append(nn.Linear(3, 2).requires_grad_(requires_grad=False))
        total(ddp(inputs(rank))).backward()
        module.heads[2].requires_grad_()
    with watched(seen, lambda: True):
        for _ in range(2):
            ddp.zero_grad()
            outputs = ddp(inputs(rank), *range(len(module.heads)))
            total(map(ddp.head, outputs) if what == "beside" else outputs).backward()
    return seen[0]


def swapped_for_a_call(rank: int, world_size: int, option: str, frozen: bool) -> Seen:
    """`functional_call` with the parameters of an average, and a layer that appears at the same time."""
    module, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])

    def step(one: nn.Module, x: Tensor) -> None:
        one(x).square().sum().backward()

    expected = averages(module, step, world_size)
    with watched(seen, lambda: same(module, expected) and not ddp._frozen_slots):  # nothing keeps the averages alive
        for _ in range(3):
            ddp.zero_grad()
            nn.Linear(1, 1)
            average = copy.deepcopy(module).requires_grad_(not frozen)
            names = {f"module.{name}": parameter for name, parameter in average.named_parameters()}
            torch.func.functional_call(ddp, names, (inputs(rank),)).detach()
            step(ddp, inputs(rank))
    return seen[0]


def probe_then_changed_parameters(rank: int, _world_size: int, option: str) -> Seen:
    """`autograd.grad` of the inputs; then the parameters become others, as those of an average, and back."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with watched(seen, lambda: True):
        for _ in range(3):
            x = inputs(rank).requires_grad_()
            torch.autograd.grad(total(ddp(x)), x)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.5)
            optimizer.zero_grad()
            total(ddp(inputs(rank))).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
    return seen[0]


def functional_gradients_assigned(rank: int, _world_size: int, option: str) -> Seen:
    """Gradients of `torch.func.grad` become those of the parameters, and an optimiser steps with them."""
    module, seen = nn.Linear(3, 2), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(ddp, values, (inputs(rank),)).square().sum()

    with watched(seen, lambda: True):
        for _ in range(2):
            optimizer.zero_grad()
            gradients = torch.func.grad(loss)({name: p.detach() for name, p in ddp.named_parameters()})
            for name, parameter in ddp.named_parameters():
                parameter.grad = gradients[name]
            optimizer.step()
    return seen[0]


def assigned_gradients(rank: int, _world_size: int, option: str, what: str) -> Seen:
    """`autograd.grad`, whose results become the gradients; or are those of the inputs only."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    step = torch.optim.SGD(module.parameters(), lr=0.1)
    with watched(seen, lambda: True):
        for _ in range(2):
            step.zero_grad()
            x = inputs(rank).requires_grad_()
            loss = total(ddp(x))
            if what == "assigned":
                for parameter, gradient in zip(
                    module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
                ):
                    parameter.grad = gradient
            else:
                (towards,) = torch.autograd.grad(loss, x)
                total(ddp(x.detach() + 0.1 * towards)).backward()
            step.step()
    return seen[0]


def ignored_output_of_a_static_graph(rank: int, world_size: int, option: str) -> Seen:
    """The loss ignores an output in every iteration."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, static_graph=True, **OPTIONS[option])
    expected = averages(module, lambda one, x: total(one(x)[:1]).backward(), world_size)
    right = []

    with watched(seen, lambda: all(right)):
        for _ in range(4):
            ddp.zero_grad()
            total(ddp(inputs(rank))[:1]).backward()
            right.append(same(module, expected))
    return seen[0]


def checkpoint_of_the_wrapper(rank: int, _world_size: int, option: str, order: str) -> Seen:
    """A re-entrant checkpoint of the whole wrapper beside another forward pass of it."""
    module, seen = Gain(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    with watched(seen, lambda: None):
        for _ in range(2):
            ddp.zero_grad()
            x = inputs(rank).requires_grad_()
            first = ddp(x) if order == "after" else None
            second = checkpoint(ddp, x, use_reentrant=True)
            first = ddp(x) if first is None else first
            (first - 2 * second).square().sum().backward()
    return seen[0]


# Whole steps under torch.compile


def compiled_steps(rank: int, world_size: int, option: str) -> Seen:
    """Forward, loss and backward in one compiled function; the batch size changes, so that shapes become symbols."""
    torch.compiler.reset()
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **COMPILED[option])
    expected = averages(module, lambda one, x: total(one(x)).backward(), world_size)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> None:
        total(ddp(x)).backward()

    def right() -> bool:
        ddp.zero_grad()
        step(inputs(rank))
        return same(module, expected, loosely=option == "mixed precision")

    with watched(seen, right):
        for rows in (2, 3, 4, 5):
            ddp.zero_grad()
            step(torch.ones(rows, 3))
    return seen[0]


# Who ends a backward pass, and which one is averaged


def manual_finalization(rank: int, world_size: int, option: str, where: str) -> Seen:
    """`finalize_backward` after the backward pass, in a hook of it, twice, or never."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    ddp.require_manual_backward_finalization = True
    expected = averages(module, lambda one, x: total(one(x)).backward(), world_size)
    right = []

    def in_hook(_gradient: Tensor) -> None:
        if where == "in a hook" and not ddp.should_finalize_after_backward:
            ddp.finalize_backward()

    with watched(seen, lambda: all(right)):
        for _ in range(4):
            ddp.zero_grad()
            x = inputs(rank).requires_grad_()
            x.register_hook(in_hook)
            total(ddp(x * 1)).backward()
            after = where != "in a hook" or ddp.should_finalize_after_backward
            if after and where != "never":
                if option != "views":  # which collectives write into while the script waits
                    right.append(not same(module, expected))
                ddp.finalize_backward()
            if where == "twice":
                ddp.finalize_backward()
            right.append(same(module, expected))
    return seen[0]


def micro_batches_in_flight(rank: int, world_size: int, option: str) -> Seen:
    """Four forward passes, then their backward passes, first in, first out; the last one is averaged."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **OPTIONS[option])
    factors = (1.0, 2.0, 3.0, 4.0)

    def step(one: nn.Module, x: Tensor) -> None:
        for factor in factors:
            total(one(factor * x)).backward()

    expected = averages(module, step, world_size)
    with watched(seen, lambda: same(module, expected)):
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                outputs = [ddp(factor * inputs(rank)) for factor in factors]
                for waiting in outputs[:-1]:
                    total(waiting).backward()
            ddp.reducer.prepare_for_backward(outputs[-1])
            total(outputs[-1]).backward()
    return seen[0]


def buckets_without_memory(rank: int, world_size: int, option: str) -> tuple[Seen, list[int]]:
    """`lazy_bucket_allocation`: bytes of all buffers after construction and after each iteration."""
    module, seen, sizes = Heads(), [], []
    ddp = DistributedDataParallel(module, lazy_bucket_allocation=True, **OPTIONS[option])
    ddp.register_comm_hook(None, in_half)
    expected = averages(module, lambda one, x: total(one(x)).backward(), world_size)

    def measure() -> None:
        sizes.append(sum(bucket.buffer.untyped_storage().nbytes() for bucket in ddp.reducer.buckets))

    measure()
    with watched(seen, lambda: same(module, expected, loosely=True)):
        for _ in range(3):
            ddp.zero_grad()
            total(ddp(inputs(rank))).backward()
            measure()
    return seen[0], sizes


# With debug=True


def crossed(rank: int, _world_size: int) -> None:
    """Two wrappers of equal size, whose backward passes run in another order on rank 1."""
    wrappers = [DistributedDataParallel(Heads(), debug=True) for _ in range(2)]
    losses = [total(ddp(inputs(rank))) for ddp in wrappers]
    for loss in losses if rank == 0 else losses[::-1]:
        loss.backward()


def batch_left_out(rank: int, _world_size: int) -> Seen:
    """Rank 1 skips the backward pass of its second batch, as if the loss were NaN, and goes on."""
    ddp, seen = DistributedDataParallel(Heads(), debug=True), []
    with watched(seen, lambda: None):
        for number in range(4 + rank):
            loss = total(ddp(inputs(rank)))
            if (rank, number) != (1, 1):
                loss.backward()
    return seen[0]


def gradients_with_other_data(rank: int, world_size: int) -> Seen:
    """Views whose data the script replaces between iterations."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    expected = averages(module, lambda one, x: total(one(x)).backward(), world_size)
    right = []
    with watched(seen, lambda: all(right)):
        for _ in range(3):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.data = torch.zeros_like(parameter)
            total(ddp(inputs(rank))).backward()
            right.append(same(module, expected))
    return seen[0]


def used_under_no_sync_only(rank: int, world_size: int, option: str) -> Seen:
    """Each head is used in one of two passes, the first of them under `no_sync`."""
    module, seen = Heads(), []
    ddp = DistributedDataParallel(module, **{**OPTIONS[option], "find_unused_parameters": True})

    def step(one: nn.Module, x: Tensor) -> None:
        with one.no_sync() if isinstance(one, DistributedDataParallel) else nullcontext():
            total(one(x, 0)).backward()
        total(one(x, 1)).backward()

    expected = averages(module, step, world_size)
    with watched(seen, lambda: same(module, expected)):
        for _ in range(3):
            ddp.zero_grad()
            step(ddp, inputs(rank))
    return seen[0]
