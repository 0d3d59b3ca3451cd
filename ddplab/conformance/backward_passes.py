"""Forward and backward passes in other numbers than one each: repeated, nested, without a parameter, raising errors.

Whatever a script does, the class must average its gradients or raise an error; no gradient may silently stay local.
"""

import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .check_runner import OF_PASSES, VIEWS, Bench
from .class_under_test import RefusalError, Subject, refusing
from .comm_hooks import averaging_hook
from .local_training import FindingError
from .real_models import STEPS, Assembled, Pass, Training, batch, mean_square, trains

CAPS_MB = (1e-4, 25.0)
"""Caps that give each parameter a bucket of its own, and all parameters one bucket."""
LATE_S = 0.2
"""Delay of the late rank; longer than an all-reduce, a backward pass and a forward pass."""


class _Branches(nn.Module):
    """Three layers with an output each; if `raises` has elements, a backward pass raises an error before them."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: list[int] = []
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = [layer(x).tanh() for layer in self.layers]
        return [_raises(output, self.raises) for output in outputs] if self.raises else outputs


def _forces() -> nn.Module:
    """Build what returns an energy and its gradient with respect to the input, as models of molecules do."""

    def forward(own: Any, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        energy: Tensor = own.energy(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return [energy, forces]

    return Assembled(forward, energy=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    outputs: Sequence[Tensor] = module(x)
    return torch.stack([output.square().mean() for output in outputs]).sum()


def _inputs(step: int, rank: int) -> Tensor:
    return batch(step, rank).requires_grad_()


def _usual(module: nn.Module, step: int, rank: int) -> Tensor:
    return _loss(module, _inputs(step, rank))


def _gradient_of_the_inputs_first(module: nn.Module, step: int, rank: int) -> None:
    x = _inputs(step, rank)
    loss = _loss(module, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)


def _gradient_of_the_parameters_first(module: nn.Module, step: int, rank: int) -> Tensor:
    loss = _loss(module, _inputs(step, rank))
    torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    return loss


def _gradient_of_the_inputs_only(module: nn.Module, step: int, rank: int) -> Tensor:
    x = _inputs(step + 10, rank)
    torch.autograd.grad(_loss(module, x), x)
    return _usual(module, step, rank)


def _gradient_penalty(module: nn.Module, step: int, rank: int) -> Tensor:
    x = _inputs(step, rank)
    loss = _loss(module, x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def _one_pass_for_each_output(module: nn.Module, step: int, rank: int) -> None:
    """One backward pass for each output, in an order that differs between ranks; the outputs share no parameter."""
    outputs: Sequence[Tensor] = module(_inputs(step, rank))
    for number in range(len(outputs)):
        outputs[(number + rank + step) % len(outputs)].square().mean().backward()


def _evaluation_in_between(module: nn.Module, step: int, rank: int) -> None:
    loss = _usual(module, step, rank)
    for number in range(2):
        module.eval()
        with torch.no_grad():
            module(batch(step + 10, rank))
        module.train()
        if number == 0:
            loss.backward()


def _after_a_batch(module: nn.Module, step: int, rank: int, *, cleared: bool) -> Tensor:
    """A second batch; gradients of the first may be cleared, as those of a loss that the script does not trust."""
    _usual(module, step + 10, rank).backward()
    if cleared:
        module.zero_grad()
    return _usual(module, step, rank)


def _in_another_thread(module: nn.Module, step: int, rank: int) -> None:
    """Run backward in a thread, and thus hooks of a class, as autograd always does on a GPU."""
    loss = _usual(module, step, rank)
    with ThreadPoolExecutor() as pool:
        pool.submit(loss.backward).result()


def _frozen_for_a_pass(module: nn.Module, step: int, rank: int) -> Tensor:
    """A pass through frozen parameters, as when a GAN trains its generator, then a usual iteration."""
    module.requires_grad_(requires_grad=False)
    _usual(module, step + 10, rank).backward()
    module.requires_grad_()
    return _usual(module, step, rank)


def _frozen_in_part(module: nn.Module, step: int, rank: int) -> None:
    second_layer = nn.ParameterList(list(module.parameters())[2:4])
    second_layer.requires_grad_(requires_grad=False)
    _usual(module, step, rank).backward()
    second_layer.requires_grad_()


FORCES = "a gradient inside of forward"
PASSES: dict[str, Pass] = {
    "autograd.grad of the inputs first": _gradient_of_the_inputs_first,
    "autograd.grad of the parameters first": _gradient_of_the_parameters_first,
    "autograd.grad of the inputs only, then another iteration": _gradient_of_the_inputs_only,
    "a gradient penalty": _gradient_penalty,
    "a backward pass for each output": _one_pass_for_each_output,
    "evaluation between forward, backward and step": _evaluation_in_between,
    "gradients cleared after a pass": partial(_after_a_batch, cleared=True),
    "a second batch before the step": partial(_after_a_batch, cleared=False),
    "a backward pass in another thread": _in_another_thread,
    "parameters frozen for a pass": _frozen_for_a_pass,
    FORCES: _usual,
}


# Backward passes that raise an error


def _raises(x: Tensor, raises: list[int]) -> Tensor:
    """Copy a tensor; while `raises` has elements, backward through the copy removes one and raises an error."""

    def hook(_gradient: Tensor) -> None:
        if raises:
            raises.pop()
            raise ArithmeticError("this backward pass fails on purpose")

    copied = x.clone()
    copied.register_hook(hook)
    return copied.clone()  # hooks of the class on this tensor run first


def skips_a_batch(
    rank: int, _size: int, subject: Subject, failing: Sequence[int], late: int, *, in_hook: bool = False, **how: Any
) -> str:
    """Train; in one iteration the backward pass of some ranks raises an error after the last gradient.

    These ranks skip the batch and go on with the next one, while the rank `late` is late. The error may be that of a
    comm hook at the second bucket. Returns what is wrong.
    """
    training, fails, at = Training(subject, _Branches, **how), False, 2 if in_hook else 1

    def look(_state: Any, bucket: Any) -> None:
        if fails and bucket.index() == 1:
            raise ArithmeticError("this comm hook fails on purpose")

    if in_hook:
        training.wrapped.register_comm_hook(None, averaging_hook(look))
    problem = ""  # returned at the end, because the other ranks go on
    for step in range(2 * STEPS):
        x, fails = _inputs(step, rank), step == at and rank in failing
        loss = _loss(training.wrapped, _raises(x, [1]) if fails and not in_hook else x)
        if step == at and rank == late:
            time.sleep(LATE_S)  # this rank is late on purpose: the others must already wait in a collective
        try:
            loss.backward()
        except (ArithmeticError, RuntimeError):
            if not fails:
                raise
            training.finish()  # does nothing if the class needs no such call
            training.module.zero_grad(set_to_none=False)
            continue
        training.finish()
        if fails:
            return f"iteration {step}, rank {rank}: the error of the backward pass did not reach the script"
        problem = problem or training.wrong(_usual, step)
        training.module.zero_grad(set_to_none=step % 2 == 0)
    where = "in a comm hook" if in_hook else "after the last gradient"
    return problem and f"an error {where} on ranks {list(failing)}, rank {late} late: {problem}"


def raises_before_the_first_gradient(
    rank: int, world_size: int, subject: Subject, failing: Sequence[int], then: str, where: str, cap_mb: float
) -> str:
    """Train; some backward passes of the ranks in `failing` raise an error before the first gradient.

    What follows, `then`, is a `retry` of the backward pass, a `new iteration`, or the backward pass of an
    `older graph`. The error is raised `inside` the module, or `outside`, before the pass reaches the module.
    """
    training = Training(subject, _Branches, bucket_cap_mb=cap_mb)
    module, wrapped = training.module, training.wrapped
    assert isinstance(module, _Branches)
    described = f"an error before the first gradient, {where} the module, on ranks {list(failing)}, then {then}"
    for step in range(STEPS):
        fails = step < STEPS - 1 and rank in failing
        module.zero_grad()
        older = _usual(wrapped, step, rank) if then == "older graph" else None
        if fails and where == "inside":
            module.raises = [1]
        loss = _usual(wrapped, step, rank)
        if fails:
            loss = _raises(loss, [1]) if where == "outside" else loss
            with suppress(ArithmeticError):  # without `finish`, which the other ranks call once
                loss.backward(retain_graph=True)
            if older is not None:
                loss = older
            elif then == "new iteration":
                loss = _usual(wrapped, step, rank)
        loss.backward()
        training.finish()
        problems: list[Any] = [None] * world_size
        dist.all_gather_object(problems, training.wrong(_usual, step))
        if any(problems):
            _usual(wrapped, step, rank)  # the class may still raise an error here
            problem = problems[rank] or "another rank is wrong"
            return f"{described}: {problem}, and the next forward pass raised no error"
    return ""


# The first pass of a static graph

FIRST = {"frozen in part": _frozen_in_part, "parameters frozen for a pass": _frozen_for_a_pass} | {
    name: run for name, run in PASSES.items() if name not in ("a gradient penalty", FORCES)
}
"""First passes of a static graph that differ from the later ones."""
LOCAL = "under no_sync"


def static_graph_first(_rank: int, _world_size: int, subject: Subject, first: str) -> str:
    """Train a static graph whose first pass is one of `FIRST`, or `LOCAL`; returns what is wrong."""
    training = Training(subject, _Branches, static_graph=True)
    for step in range(STEPS):
        run = _usual if step else FIRST.get(first, _usual)
        if first == LOCAL and not step:
            with training.wrapped.no_sync():
                _usual(training.wrapped, step, training.rank).backward()
            continue
        training.backward(run, step)
        if run is not _frozen_in_part and (problem := training.wrong(run, step)):
            return f"the first pass of a static graph: {first}: {problem}"
    return ""


# Gradients that no forward pass of the class waits for


class _BackwardInside(_Branches):
    """Runs its backward pass inside of forward, and returns nothing to differentiate."""

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = super().forward(x)
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
        return [output.detach() for output in outputs]


class _SecondLayerFrozen(_Branches):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(requires_grad=False)


def _inside(module: nn.Module, step: int, rank: int) -> None:
    module(_inputs(step, rank))


def _two_backward_passes(graphs: int, module: nn.Module, step: int, rank: int) -> None:
    """Run forward once, or twice as pipelines do, and then backward twice."""
    losses = [_usual(module, step + 10 * number, rank) for number in range(graphs)]
    for number in range(2):
        losses[number % graphs].backward(retain_graph=True)


UNFROZEN = "a layer unfrozen after construction"
WRAPPED_AGAIN = "a module wrapped again after a layer was unfrozen"
NOT_WAITED_FOR: dict[str, tuple[type[_Branches], Pass]] = {
    "a backward pass inside of forward": (_BackwardInside, _inside),
    "two forward passes, then a backward pass for each": (_Branches, partial(_two_backward_passes, 2)),
    "a second backward pass through a graph": (_Branches, partial(_two_backward_passes, 1)),
    "a call of the wrapped module itself": (_Branches, lambda ddp, *at: _usual(getattr(ddp, "module", ddp), *at)),
    UNFROZEN: (_SecondLayerFrozen, _usual),
    WRAPPED_AGAIN: (_SecondLayerFrozen, _usual),
    "a module converted after construction": (_Branches, lambda ddp, *at: _loss(ddp.double(), _inputs(*at).double())),
}


def stays_local(_rank: int, _world_size: int, subject: Subject, name: str) -> tuple[str, bool]:
    """Train one of `NOT_WAITED_FOR`; returns which gradient is not the average, if any, and if the class warned."""
    make, run = NOT_WAITED_FOR[name]
    training = Training(subject, make)
    for module in (training.module, training.twin):
        module.requires_grad_()
    if name == WRAPPED_AGAIN:
        training = Training(subject, iter((training.module, training.twin)).__next__)
    with warnings.catch_warnings(record=True, action="always") as given:
        problem = training.train(run)
    return problem, any(issubclass(warning.category, UserWarning) for warning in given)


# Several forward passes for one backward pass


def _checkpointed(*, reentrant: bool) -> nn.Module:
    """Build layers that two checkpoints share; re-entrant ones need an input that requires a gradient."""

    def forward(own: Any, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = checkpoint(own.shared, x, use_reentrant=reentrant).tanh()
        return own.head(x)

    return Assembled(forward, shared=nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), head=nn.Linear(6, 3))


def _around(module: nn.Module, step: int, rank: int) -> Tensor:
    output: Tensor = checkpoint(module, _inputs(step, rank), use_reentrant=False)
    return output.square().mean()


def _scaled() -> nn.Module:
    """Build a layer whose output is multiplied by a buffer, which autograd saves, and by a keyword argument."""
    module = Assembled(lambda own, x, *, factor: own.layer(x) * own.scale * factor, layer=nn.Linear(6, 3))
    module.register_buffer("scale", torch.full((3,), 2.0))
    return module


def _two_forward_passes(module: nn.Module, step: int, rank: int) -> Tensor:
    first, second = (module(batch(step + 10 * number, rank), factor=3.0) for number in range(2))
    return (first * second).square().mean()  # type: ignore[no-any-return]


REPEATED_FORWARD: dict[str, Any] = {"make": _scaled, "run": _two_forward_passes}
"""Arguments of `trains`."""


def nested_no_sync(rank: int, _world_size: int, subject: Subject) -> str:
    """Accumulate under nested `no_sync`, of which an exception ends one, beside another module; then average."""
    training, other = Training(subject), Training(subject)
    module, wrapped = training.module, training.wrapped
    wrapped.no_sync()  # without effect, because it is not entered
    with suppress(ArithmeticError), wrapped.no_sync():
        raise ArithmeticError
    training.backward(mean_square, 0)
    if problem := training.wrong(mean_square, 0):
        return f"after an exception inside of no_sync: {problem}"

    def several(passes: int, module: nn.Module, step: int, rank: int) -> None:  # in this order: sums round
        for number in range(passes):
            mean_square(module, step + 10 * number, rank).backward()

    accumulated, everything = partial(several, 2), partial(several, 3)
    for step in range(STEPS):
        module.zero_grad()
        with wrapped.no_sync():
            with wrapped.no_sync():
                mean_square(wrapped, step, rank).backward()
                other.backward(mean_square, step)
            with torch.no_grad():
                mean_square(wrapped, step, rank)
            mean_square(wrapped, step + 10, rank).backward()
        if problem := other.wrong(mean_square, step):
            return f"a module beside another one under no_sync: {problem}"
        if problem := training.wrong(accumulated, step, [rank]):
            averaged = "after no_sync or evaluation inside, the outer one averaged"
            return problem if training.wrong(accumulated, step) else f"iteration {step}, rank {rank}: {averaged}"
        mean_square(wrapped, step + 20, rank).backward()
        training.finish()
        if problem := training.wrong(everything, step):
            return problem
    return ""


# Checks


def check_checkpoints(bench: Bench) -> None:
    """Activation checkpoints in the module: the default ones, and re-entrant ones under a static graph.

    A checkpoint around the wrapped module may end with an error instead.
    """
    for reentrant in (False, True):
        what = f"activation checkpoints with use_reentrant={reentrant}"
        how: dict[str, Any] = {"make": partial(_checkpointed, reentrant=reentrant), "what": what}
        for options in bench.variants({}, "static_graph", VIEWS):
            if "static_graph" in options or not reentrant:
                bench.try_body(trains, **how, **options)
    how = {"run": _around, "what": "a checkpoint around the wrapped module"}
    bench.averages_or_refuses(f"checkpoint|{OF_PASSES}", trains, **how)


def check_several(bench: Bench) -> None:
    """Several backward passes, an evaluation in between or a gradient in the loss: gradients are averaged."""
    for name, run in PASSES.items():
        if bench.subject.one_order and run is _one_pass_for_each_output:
            continue  # in an order that differs between ranks
        how: dict[str, Any] = {"make": _forces if name == FORCES else _Branches, "run": run, "what": name}
        for cap_mb in CAPS_MB:
            bench.try_body(trains, bucket_cap_mb=cap_mb, **how)
        # torch's search for unused parameters passes all outputs through one node, which runs backward only once.
        search = ["find_unused_parameters"] if name != "a backward pass for each output" else []
        for options in bench.variants({"bucket_cap_mb": 1e-4}, *search, VIEWS)[1:]:
            bench.try_body(trains, steps=2, **how, **options)


def check_raising(bench: Bench) -> None:
    """After a backward pass that raises an error, the next averages are right, or the class raises an error."""
    everyone, last = list(range(bench.world_size)), bench.world_size - 1
    for cap_mb, where in ((CAPS_MB[0], "inside"), (CAPS_MB[1], "inside"), (CAPS_MB[1], "outside")):
        for then in ("retry", "new iteration", "older graph"):
            for failing in (everyone, [0]):
                bench.averages_or_refuses(OF_PASSES, raises_before_the_first_gradient, failing, then, where, cap_mb)
    for options in bench.variants({"bucket_cap_mb": 1e-4}, VIEWS):
        for failing, late in ((everyone, last), ([0], last), ([last], 0)):
            bench.averages_or_refuses(OF_PASSES, skips_a_batch, failing, late, **options)
    if "register_comm_hook" in bench.methods:
        bench.averages_or_refuses(OF_PASSES, skips_a_batch, everyone, 0, in_hook=True)


def check_static_first(bench: Bench) -> None:
    """A static graph whose first pass differs: later gradients are averaged, or the class raises an error."""
    bench.needs("static_graph")
    for first in (*FIRST, *([LOCAL] if "no_sync" in bench.methods else [])):
        bench.averages_or_refuses(OF_PASSES, static_graph_first, first)


def check_not_waited_for(bench: Bench) -> str:
    """Passes of which a class may not know: it averages their gradients, warns or raises an error.

    Returns the passes that the class warns of or refuses; empty if it averages all.
    """
    noticed, silent = list[str](), list[str]()
    for name in (UNFROZEN,) if bench.offer.is_adapter else NOT_WAITED_FOR:
        try:
            outcomes = bench.run(partial(refusing, OF_PASSES, stays_local), bench.subject, name)
        except RefusalError:
            outcomes = [("it refuses the pass", True)]
        if any(problem for problem, _ in outcomes):
            (noticed if all(warned for _, warned in outcomes) else silent).append(name)
    if silent:
        raise FindingError(f"gradients are no averages, in silence: {', '.join(silent)}")
    return f"warns or raises an error: {', '.join(noticed)}" if noticed else ""
