"""Rank bodies of test_backward_pass.py: steps of a script, with our class, with torch's and with none."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.recording.reducer_observer import Observer

WEIGHTS = (0, 1, 2, 3)
HEADS = {"a": (0, 1), "b": (2, 3)}
"""Weights behind each output of the module."""
LATE_S = 0.02
Gradients = list[float | None]


class RaisedError(Exception):
    """Raised in a backward pass on purpose."""


class Raise(torch.autograd.Function):
    """The identity; its backward pass raises if the script's fault is at `where`."""

    @staticmethod
    def forward(context: Any, x: Tensor, script: "Script", where: str) -> Tensor:
        context.script, context.where = script, where
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        context.script.raise_at(context.where)
        return gradients[0], None, None


class Heads(nn.Module):
    """Two outputs, each a sum of two weights multiplied by `factor`; so `factor` is the gradient of every weight."""

    def __init__(self, script: "Script") -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(1) for _ in WEIGHTS)
        for index, weight in enumerate(self.weights):
            weight.register_hook(lambda _gradient, where=f"weight {index}": script.raise_at(where))

    def forward(self, x: Tensor, factor: float, used: tuple[int, ...]) -> dict[str, Tensor]:
        outputs = {}
        for head, indices in HEADS.items():
            y = x
            for index in indices:
                if index in used:
                    y = y + self.weights[index] * factor
            outputs[head] = y * 1
        return outputs


class Script:
    """A training script that runs step by step.

    Args:
        make: Wraps a module. None: the script trains on this rank alone.
        group: Process group for `make`.
        options: Options for `make`; `hook`: whether a comm hook averages.
    """

    def __init__(self, make: Any, group: Any, options: dict[str, Any]) -> None:
        options = dict(options)
        self.hooked = options.pop("hook", False)
        self.module = Heads(self)
        self.ddp: Any = self.module if make is None else make(self.module, process_group=group, **options)
        self.synchronizes = make is not None
        self.fault = ""
        self.hook_raised = False
        self.outputs: list[tuple[dict[str, Tensor], Tensor]] = []
        self.arrived: set[int] = set()
        self.group = group
        if self.hooked and self.synchronizes:
            self.ddp.register_comm_hook(self, average)
        if not self.synchronizes:
            for index, weight in enumerate(self.module.weights):
                weight.register_post_accumulate_grad_hook(lambda _, index=index: self.arrived.add(index))

    def raise_at(self, where: str) -> None:
        if self.fault == where:
            raise RaisedError(where)

    def gradients(self) -> Gradients:
        return [None if weight.grad is None else weight.grad.item() for weight in self.module.weights]


def average(script: Script, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A comm hook that averages, or raises if the script's fault is at this bucket."""
    script.raise_at(f"hook {bucket.index()}")
    work = dist.all_reduce(bucket.buffer().div_(2), group=script.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# Steps of a script


@dataclass(frozen=True)
class Forward:
    """A forward pass; the script keeps its outputs.

    Attributes:
        factors: The gradient that this pass gives each weight it uses, by rank.
        used: The weights that the pass uses, by rank.
        sync: False: under `no_sync`.
        training: Whether the module is in training mode.
        grad: Whether gradients are enabled.
    """

    factors: tuple[float, ...]
    used: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),) * 2
    sync: bool = True
    training: bool = True
    grad: bool = True

    def run(self, script: Script, rank: int) -> None:
        script.module.train(self.training)
        x = torch.zeros(1, requires_grad=True)
        with torch.set_grad_enabled(self.grad), _no_sync(script, inside=not self.sync):
            outputs = script.ddp(Raise.apply(x, script, "input"), self.factors[rank], self.used[rank])
        if self.grad:
            for output in outputs.values():
                output.register_hook(lambda _gradient: script.raise_at("output"))
            script.outputs.append((outputs, x))


@dataclass(frozen=True)
class Backward:
    """A backward pass through kept outputs.

    Attributes:
        of: Indices of the forward passes; -1: the last one.
        heads: Names of the outputs, a key of `HEADS` each.
        sync: False: under `no_sync`.
        fault: Where the pass raises an exception: at the loss, an output, a weight, the input or in a comm hook.
        ranks: Ranks on which the pass raises.
        retry: Whether these ranks then run the backward pass again.
        late: Whether rank 1 comes late.
    """

    of: tuple[int, ...] = (-1,)
    heads: str = "ab"
    sync: bool = True
    fault: str = ""
    ranks: tuple[int, ...] = (0, 1)
    retry: bool = False
    late: bool = False

    def run(self, script: Script, rank: int) -> None:
        if self.late and rank and script.synchronizes:
            time.sleep(LATE_S)
        chosen = [script.outputs[index][0][head] for index in self.of for head in self.heads]
        with _no_sync(script, inside=not self.sync):
            script.fault = self.fault if rank in self.ranks else ""
            try:
                Raise.apply(torch.cat(chosen).sum(), script, "loss").backward(retain_graph=True)
                raised = False
            except RaisedError:
                raised = True
            except RuntimeError:  # raised for a comm hook
                script.hook_raised = raised = script.hooked and script.fault.startswith("hook")
                if not raised:
                    raise
            finally:
                script.fault = ""
            if raised and self.retry:
                torch.cat(chosen).sum().backward(retain_graph=True)


@dataclass(frozen=True)
class Grad:
    """`torch.autograd.grad` through kept outputs; accumulates no gradient.

    Attributes:
        of: Index of the forward pass; -1: the last one.
        by: Whether to differentiate with respect to the input or the weights.
    """

    of: int = -1
    by: Literal["input", "weights"] = "input"

    def run(self, script: Script, rank: int) -> None:
        outputs, x = script.outputs[self.of]
        weights = [one for one in script.module.weights if one.requires_grad]
        by = [x] if self.by == "input" else weights
        if by:
            torch.autograd.grad(torch.cat(list(outputs.values())).sum(), by, retain_graph=True, allow_unused=True)


@dataclass(frozen=True)
class Zero:
    """Clears the gradients; `in_place`: they become zeros instead of None."""

    in_place: bool = False

    def run(self, script: Script, rank: int) -> None:
        script.ddp.zero_grad(set_to_none=not self.in_place)


@dataclass(frozen=True)
class Freeze:
    """Freezes these weights and unfreezes all others."""

    weights: tuple[int, ...]

    def run(self, script: Script, rank: int) -> None:
        for index, weight in enumerate(script.module.weights):
            weight.requires_grad_(index not in self.weights)


@dataclass(frozen=True)
class Join:
    """Iterations under Join; `counts`: how many on each rank."""

    counts: tuple[int, ...]
    divide_by_all: bool = True

    def run(self, script: Script, rank: int) -> None:
        def iterate() -> None:
            for step in range(self.counts[rank]):
                script.ddp.zero_grad()
                outputs = script.ddp(torch.zeros(1, requires_grad=True), float(1 + 3 * step + rank), (0, 1, 2, 3))
                torch.cat(list(outputs.values())).sum().backward()

        if script.synchronizes:
            with script.ddp.join(divide_by_initial_world_size=self.divide_by_all):
                iterate()


Step = Forward | Backward | Grad | Zero | Freeze | Join


def _no_sync(script: Script, *, inside: bool) -> Any:
    return script.ddp.no_sync() if inside and script.synchronizes else nullcontext()


# Bodies

_scripts: dict[str, Script] = {}
_ended: list[Script] = []  # kept until the next scripts begin, because collectives may be in flight
_groups: dict[str, Any] = {}


@dataclass(frozen=True)
class Seen:
    """Results of a step on one rank; the scripts are `local`, `ours` and `torch`.

    Attributes:
        gradients: Gradients after the step, by script.
        errors: Message of the error that ended the script in this step, by script.
        arrived: Weights that got a gradient in this step, in the script without data parallelism.
        hook_raised: Whether a comm hook of our class has raised an exception.
    """

    gradients: dict[str, Gradients]
    errors: dict[str, str]
    arrived: set[int]
    hook_raised: bool


def begin(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Start three scripts: `local`, without data parallelism; `ours`, with our class; `torch`, with torch's.

    They get new groups. In an old one, a collective that the last script has left behind on one rank alone would be
    paired with the first collective of this script on the other, and both ranks would wait for ever.
    """
    for script in (*_scripts.values(), *_ended):
        vars(script).clear()  # hooks hold the script, which must not hold its group
    _scripts.clear()
    _ended.clear()
    for group in _groups.values():
        dist.destroy_process_group(group)
    _groups.update({kind: dist.new_group() for kind in ("ours", "torch")})
    _scripts["local"] = Script(None, None, options)
    _scripts["ours"] = Script(DistributedDataParallel, _groups["ours"], options)
    _scripts["torch"] = Script(TorchDDP, _groups["torch"], options)


def go_on(rank: int, world_size: int, step: Step, averaged: list[int], without: str) -> Seen:
    """Run a step in each script, except in those that ended with an error.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        step: The step.
        averaged: Ranks on which the script `local` first takes over the gradients of `ours`.
        without: Name of a script to end first. Empty: none.
    """
    if without in _scripts:  # it may have ended with an error on this rank
        _ended.append(_scripts.pop(without))
    local, ours = _scripts["local"], _scripts["ours"]
    if rank in averaged:
        for mine, theirs in zip(local.module.weights, ours.module.weights, strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.detach().clone()
    local.arrived.clear()
    errors = {}
    for kind, script in _scripts.items():
        try:
            step.run(script, rank)
        except RuntimeError as error:
            errors[kind] = str(error)
    gradients = {kind: script.gradients() for kind, script in _scripts.items()}
    seen = Seen(gradients, errors, set(local.arrived), ours.hook_raised)
    _ended.extend(_scripts.pop(kind) for kind in errors)
    return seen


def leave_behind(rank: int, _world_size: int) -> None:
    """Launch a collective of each script on rank 1 alone, as a script that fails on one rank may."""
    if rank == 1:
        for group in _groups.values():
            dist.all_reduce(torch.zeros(1), group=group, async_op=True)


class Interrupt(Observer):
    """Raises KeyboardInterrupt once, when the first bucket is done."""

    def __init__(self) -> None:
        self.armed = True

    def bucket_done(self, bucket: int) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


def interrupted_while_finishing(rank: int, world_size: int) -> Gradients:
    """Ctrl-C on rank 0 while the reducer copies averages out and rank 1 is late; then a usual iteration."""
    script = Script(DistributedDataParallel, None, {"bucket_cap_mb": 1e-6})
    for step in range(3):
        script.ddp.zero_grad()
        Forward((3.0, 70.0) if step == 2 else (1000.0, 5000.0)).run(script, rank)
        if step == 1 and rank == 0:
            script.ddp.reducer.observers.append(Interrupt())
            with pytest.raises(KeyboardInterrupt):
                Backward().run(script, rank)
        else:
            Backward(late=True).run(script, rank)
    return script.gradients()


def interrupted_alone(rank: int, _world_size: int) -> Gradients:
    """In a group of this rank alone, an exception between two launches; then a usual iteration."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    script = Script(DistributedDataParallel, alone, {"bucket_cap_mb": 1e-6})
    for fault in ("", "weight 0", ""):
        script.ddp.zero_grad()
        Forward((3.0, 70.0)).run(script, rank)
        Backward(fault=fault).run(script, rank)
    return script.gradients()
