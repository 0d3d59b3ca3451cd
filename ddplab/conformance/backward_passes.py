"""Forward and backward passes in other numbers than one each: repeated, nested, without a parameter, raising errors.

Whatever a script does, the class must average its gradients or raise an error; no gradient may silently stay local.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Reducer as TorchReducer
from torch.utils.checkpoint import checkpoint

from .check_runner import VIEWS, Bench, report
from .class_under_test import NotSupportedError, Subject
from .comm_hooks import averaging_hook
from .local_training import FindingError
from .real_models import batch, difference, local_gradients, mlp, square, train

STEPS = 3
CAPS_MB = (1e-4, 25.0)
"""Caps that give each parameter a bucket of its own, and all parameters one bucket."""
LATE_S = 0.2
"""Delay of the late rank; longer than an all-reduce, a backward pass and a forward pass."""


class _Branches(nn.Module):
    """Three independent layers, each with an output of its own.

    Attributes:
        raises: If not empty, the next backward pass raises an error before it reaches the layers; see `_Raises`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.raises: list[int] = []
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = [layer(x).tanh() for layer in self.layers]
        return [_raises(output, self.raises) for output in outputs] if self.raises else outputs


class _Forces(nn.Module):
    """Returns an energy and its gradient with respect to the input, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return [energy, forces]


Pass = Callable[[nn.Module, int, int], None]
"""Runs the forward and backward passes of a step on the batch of a rank; called as `run(module, step, rank)`."""


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    outputs: Sequence[Tensor] = module(x)
    return torch.stack([output.square().mean() for output in outputs]).sum()


def _inputs(step: int, rank: int) -> Tensor:
    return batch(step, rank).requires_grad_()


def gradient_of_the_inputs_first(module: nn.Module, step: int, rank: int) -> None:
    """`autograd.grad` with respect to the inputs, before the backward pass and after it."""
    x = _inputs(step, rank)
    loss = _loss(module, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)


def gradient_of_the_parameters_first(module: nn.Module, step: int, rank: int) -> None:
    """`autograd.grad` with respect to the parameters, before the backward pass."""
    loss = _loss(module, _inputs(step, rank))
    torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    loss.backward()


def gradient_of_the_inputs_only(module: nn.Module, step: int, rank: int) -> None:
    """A forward pass followed only by `autograd.grad`, then a usual iteration."""
    x = _inputs(step + 10, rank)
    torch.autograd.grad(_loss(module, x), x)
    _loss(module, _inputs(step, rank)).backward()


def gradient_penalty(module: nn.Module, step: int, rank: int) -> None:
    """A loss that contains its own gradient with respect to the inputs."""
    x = _inputs(step, rank)
    loss = _loss(module, x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def one_pass_for_each_output(module: nn.Module, step: int, rank: int) -> None:
    """One backward pass for each output, in an order that differs between ranks; the outputs share no parameter."""
    outputs: Sequence[Tensor] = module(_inputs(step, rank))
    for number in range(len(outputs)):
        outputs[(number + rank + step) % len(outputs)].square().mean().backward()


def evaluation_in_between(module: nn.Module, step: int, rank: int) -> None:
    """A forward pass without gradients between forward and backward."""
    loss = _loss(module, _inputs(step, rank))
    module.eval()
    with torch.no_grad():
        module(batch(step + 10, rank))
    module.train()
    loss.backward()


def frozen_for_a_pass(module: nn.Module, step: int, rank: int) -> None:
    """A pass through frozen parameters, as when a GAN trains its generator, then a usual iteration."""
    for parameter in module.parameters():
        parameter.requires_grad = False
    x = _inputs(step + 10, rank)
    _loss(module, x).backward()
    for parameter in module.parameters():
        parameter.requires_grad_()
    _loss(module, _inputs(step, rank)).backward()


def usual(module: nn.Module, step: int, rank: int) -> None:
    """One forward pass, one backward pass."""
    _loss(module, _inputs(step, rank)).backward()


PASSES: dict[str, tuple[Callable[[], nn.Module], Pass]] = {
    "autograd.grad of the inputs first": (_Branches, gradient_of_the_inputs_first),
    "autograd.grad of the parameters first": (_Branches, gradient_of_the_parameters_first),
    "autograd.grad of the inputs only, then another iteration": (_Branches, gradient_of_the_inputs_only),
    "a gradient penalty": (_Branches, gradient_penalty),
    "a backward pass for each output": (_Branches, one_pass_for_each_output),
    "evaluation between forward and backward": (_Branches, evaluation_in_between),
    "parameters frozen for a pass": (_Branches, frozen_for_a_pass),
    "a gradient inside of forward": (_Forces, usual),
}
"""Model and pass by description."""


def local_gradients_of(
    make: Callable[[], nn.Module], run: Pass, step: int, world_size: int
) -> list[dict[str, Tensor | None]]:
    """Return the gradients that each rank would have after a pass if nothing were averaged."""
    found = []
    for rank in range(world_size):
        twin = make()
        run(twin, step, rank)
        found.append({name: one.grad for name, one in twin.named_parameters()})
    return found


def wrong(module: nn.Module, make: Callable[[], nn.Module], run: Pass, step: int, rank: int, world_size: int) -> str:
    """Describe how the module's gradients differ from the averages over the ranks; empty if they do not."""
    problem = difference(module, local_gradients_of(make, run, step, world_size))
    return problem and f"iteration {step}, rank {rank}: {problem}"


def several_passes(
    rank: int, world_size: int, subject: Subject, name: str, options: dict[str, Any], steps: int
) -> str:
    """Train with one of `PASSES`; returns what is wrong."""
    make, run = PASSES[name]
    module = make()
    wrapped = subject.wrap(module, **options)
    problem = ""  # returned at the end, because the other ranks go on
    for step in range(steps):
        module.zero_grad()
        run(wrapped, step, rank)
        subject.finish(wrapped, torch.optim.SGD(module.parameters(), lr=0.1))
        problem = problem or wrong(module, make, run, step, rank, world_size)
    return problem and f"{name}: {problem}"


# Backward passes that raise an error


class _Raises(torch.autograd.Function):
    """The identity. While the list `raises` has elements, each backward pass removes one and raises an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: list[int]) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.raises:
            ctx.raises.pop()
            raise ArithmeticError("this backward pass fails on purpose")
        return gradients[0], None


def _raises(x: Tensor, raises: list[int]) -> Tensor:
    return _Raises.apply(x, raises)  # type: ignore[no-any-return, no-untyped-call]


def _gather_words(world_size: int, word: str) -> list[str]:
    words: list[Any] = [None] * world_size
    dist.all_gather_object(words, word)
    return words


def skips_a_batch(
    rank: int,
    world_size: int,
    subject: Subject,
    failing: Sequence[int],
    late: int,
    options: dict[str, Any],
) -> str:
    """Train; in the second iteration the backward pass of some ranks raises an error after the last gradient.

    These ranks skip the batch and go on with the next one, while the rank `late` is late. Returns what is wrong.
    """
    module = _Branches()
    wrapped = subject.wrap(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    problem = ""  # returned at the end, because the other ranks go on
    for step in range(2 * STEPS):
        x, fails = _inputs(step, rank), step == 1 and rank in failing
        loss = _loss(wrapped, _raises(x, [1]) if fails else x)
        if step == 1 and rank == late:
            time.sleep(LATE_S)
        try:
            loss.backward()
        except ArithmeticError:
            subject.finish(wrapped, optimizer)  # does nothing if the class needs no such call
            optimizer.zero_grad(set_to_none=False)
            continue
        subject.finish(wrapped, optimizer)
        if fails:
            return f"iteration {step}, rank {rank}: the error of the backward pass did not reach the script"
        problem = problem or wrong(module, _Branches, usual, step, rank, world_size)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return problem and f"an error after the last gradient on ranks {list(failing)}, rank {late} late: {problem}"


def raises_before_the_first_gradient(
    rank: int, world_size: int, subject: Subject, failing: Sequence[int], then: str, where: str, cap_mb: float
) -> str:
    """Train; some backward passes of some ranks raise an error before the first gradient; returns what is wrong.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        subject: The class under test.
        failing: The ranks whose backward passes raise.
        then: What follows: `retry` the backward pass, a `new iteration`, or the backward pass of an `older graph`.
        where: The error is raised `inside` the module, or `outside`, before the pass reaches the module.
        cap_mb: Bucket cap.
    """
    module = _Branches()
    wrapped = subject.wrap(module, bucket_cap_mb=cap_mb)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    described = f"an error before the first gradient, {where} the module, on ranks {list(failing)}, then {then}"
    for step in range(STEPS):
        fails = step < STEPS - 1 and rank in failing
        module.zero_grad()
        older = _loss(wrapped, _inputs(step, rank)) if then == "older graph" else None
        if fails and where == "inside":
            module.raises = [1]
        loss = _loss(wrapped, _inputs(step, rank))
        if fails:
            loss = _raises(loss, [1]) if where == "outside" else loss
            try:
                loss.backward(retain_graph=True)
            except ArithmeticError:
                subject.finish(wrapped, optimizer)
            if older is not None:
                loss = older
            elif then == "new iteration":
                loss = _loss(wrapped, _inputs(step, rank))
        loss.backward()
        subject.finish(wrapped, optimizer)
        problem = wrong(module, _Branches, usual, step, rank, world_size)
        if any(_gather_words(world_size, problem)):
            wrapped(_inputs(step, rank))  # the class may still raise an error here
            return f"{described}: {problem or 'another rank is wrong'}, and the next forward pass raised no error"
    return ""


def raises_in_a_comm_hook(rank: int, world_size: int, subject: Subject) -> str:
    """Train with a comm hook that raises an error in the third iteration, on all ranks, at the second bucket."""
    module = _Branches()
    wrapped: Any = subject.wrap(module, bucket_cap_mb=1e-4)

    def look(_state: Any, bucket: Any) -> None:
        if failing and bucket.index() == 1:
            raise ArithmeticError("this comm hook fails on purpose")

    wrapped.register_comm_hook(None, averaging_hook(look))
    for step in range(2 * STEPS):
        failing = step == 2
        loss = _loss(wrapped, _inputs(step, rank))
        if failing and rank == 0:
            time.sleep(LATE_S)
        try:
            loss.backward()
        except (ArithmeticError, RuntimeError):
            if not failing:
                raise
            module.zero_grad()
            continue
        if failing:
            return f"iteration {step}, rank {rank}: the error of the comm hook did not reach the script"
        if problem := wrong(module, _Branches, usual, step, rank, world_size):
            return f"after a comm hook that raised an error: {problem}"
        module.zero_grad(set_to_none=False)
    return ""


# The first pass of a static graph


def static_graph_first(rank: int, world_size: int, subject: Subject, first: str) -> str:
    """Train a static graph whose first pass differs from the later ones; returns what is wrong."""
    module = _Branches()
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4, static_graph=True)
    for step in range(STEPS):
        module.zero_grad()
        run: Pass = usual
        if step == 0:
            if first == "frozen in part":
                for parameter in module.layers[1].parameters():
                    parameter.requires_grad = False
            else:
                run = PASSES[first][1]
        run(wrapped, step, rank)
        for parameter in module.parameters():
            parameter.requires_grad_()
        if first == "frozen in part" and step == 0:
            continue
        if problem := wrong(module, _Branches, run, step, rank, world_size):
            return f"the first pass of a static graph: {first}: {problem}"
    return ""


def uses_torchs_reducer(_rank: int, _world_size: int, subject: Subject) -> bool:
    """Whether the class under test is torch's, or averages with torch's reducer."""
    return isinstance(getattr(subject.wrap(nn.Linear(2, 1)), "reducer", None), TorchReducer)


# Several forward passes for one backward pass


class _Checkpointed(nn.Module):
    """A layer that two re-entrant checkpoints share."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def checkpoints(_rank: int, world_size: int, subject: Subject) -> str:
    """Train with re-entrant checkpoints that share a layer."""

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank).requires_grad_()).square().mean()  # type: ignore[no-any-return]

    return train(subject, _Checkpointed, loss, range(world_size), 3, static_graph=True)


class _Scaled(nn.Module):
    """A layer whose output is multiplied by a buffer, which autograd saves."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.get_buffer("scale")  # type: ignore[no-any-return]


def repeated_forward(_rank: int, world_size: int, subject: Subject) -> str:
    """Train with two forward passes before each backward pass."""

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        first, second = (module(batch(step + 10 * number, rank)) for number in range(2))
        return (first * second).square().mean()  # type: ignore[no-any-return]

    return train(subject, _Scaled, loss, range(world_size), 3)


def nested_no_sync(rank: int, world_size: int, subject: Subject) -> str:
    """Accumulate under nested `no_sync`, of which one is left by an exception; then average."""
    module = mlp(seed=0)
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4)
    with suppress(ArithmeticError), subject.no_sync(wrapped):
        raise ArithmeticError

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        parts = [square(module, step + 10 * number, rank) for number in range(3)]
        return torch.stack(parts).sum()

    for step in range(3):
        module.zero_grad()
        with subject.no_sync(wrapped):
            with subject.no_sync(wrapped):
                square(wrapped, step, rank).backward()
            square(wrapped, step + 10, rank).backward()
        before = [one.grad.clone() for one in module.parameters() if one.grad is not None]
        twin = mlp(seed=0)
        (square(twin, step, rank) + square(twin, step + 10, rank)).backward()
        alone = [one.grad for one in twin.parameters() if one.grad is not None]
        if not all(map(torch.allclose, before, alone)):
            return f"iteration {step}, rank {rank}: after an inner no_sync, the outer one averaged"
        square(wrapped, step + 20, rank).backward()
        subject.finish(wrapped, torch.optim.SGD(module.parameters(), lr=0.1))
        if problem := difference(module, local_gradients(twin, loss, step, range(world_size))):
            return f"iteration {step}, rank {rank}: {problem}"
    return ""


# Checks


def check_several(bench: Bench) -> None:
    """Several backward passes, an evaluation in between or a gradient in the loss: gradients are averaged."""
    for name in PASSES:
        for cap_mb in CAPS_MB:
            report(bench.run(several_passes, bench.subject, name, {"bucket_cap_mb": cap_mb}, STEPS))
        # torch's search for unused parameters passes all outputs through one node, which runs backward only once.
        search = ["find_unused_parameters"] if name != "a backward pass for each output" else []
        for options in bench.variants({"bucket_cap_mb": 1e-4}, *search, VIEWS)[1:]:
            report(bench.run(several_passes, bench.subject, name, options, 2))


def check_raising(bench: Bench) -> None:
    """After a backward pass that raises an error, the next averages are right, or the class raises an error."""
    everyone, last = list(range(bench.world_size)), bench.world_size - 1
    for cap_mb, where in ((CAPS_MB[0], "inside"), (CAPS_MB[1], "inside"), (CAPS_MB[1], "outside")):
        for then in ("retry", "new iteration", "older graph"):
            for failing in (everyone, [0]):
                bench.averages_or_raises(raises_before_the_first_gradient, failing, then, where, cap_mb)
    for options in bench.variants({"bucket_cap_mb": 1e-4}, VIEWS):
        for failing, late in ((everyone, last), ([0], last), ([last], 0)):
            bench.averages_or_raises(skips_a_batch, failing, late, options)
    if "register_comm_hook" in bench.methods:
        bench.averages_or_raises(raises_in_a_comm_hook)


FIRST = (
    "frozen in part",
    "parameters frozen for a pass",
    "autograd.grad of the inputs first",
    "autograd.grad of the parameters first",
    "autograd.grad of the inputs only, then another iteration",
    "evaluation between forward and backward",
    "a backward pass for each output",
)
"""First passes of a static graph that differ from the later ones."""


def check_static_first(bench: Bench) -> None:
    """A static graph whose first pass differs: later gradients are averaged, or the class raises an error."""
    bench.needs("static_graph")
    for first in FIRST:
        try:
            bench.averages_or_raises(static_graph_first, first)
        except FindingError as finding:
            if not bench.run(uses_torchs_reducer, bench.subject)[0]:
                raise
            raise NotSupportedError(f"torch's reducer is silently wrong: {finding}") from None


def check_checkpoints(bench: Bench) -> None:
    """Re-entrant checkpoints that share a layer, under a static graph."""
    bench.needs("static_graph")
    report(bench.run(checkpoints, bench.subject))


def check_repeated_forward(bench: Bench) -> None:
    """Two forward passes, then one backward pass."""
    report(bench.run(repeated_forward, bench.subject))


def check_nested_no_sync(bench: Bench) -> None:
    """An inner no_sync does not end the outer one, and an exception ends it."""
    bench.needs("no_sync")
    report(bench.run(nested_no_sync, bench.subject))
