"""Usual scripts: what training runs have and short programs on few forked ranks lack.

Options in combination, hundreds of iterations, buckets of several MiB, deep models, hooks of the script, compiled
modules, parameters in one piece of memory, and ranks that are interpreters of their own.
"""

import copy
import ctypes
import gc
import logging
import random
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from functools import partial, reduce
from itertools import combinations
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import checkpoint

from ..emulation.virtual_time import patient
from ..memory_counter import LiveBytes
from ..reference.errors import RankError
from ..reference.launch import RankPool, rank_device
from ..reference.ranks.launcher import launched_ranks
from . import real_models
from .check_runner import OF_PASSES, VIEWS, Bench, HangError, cause_of, report
from .class_under_test import IGNORE, Offer, Subject, methods_of
from .comm_hooks import averaging_hook
from .local_training import FindingError, same
from .real_models import STEPS, Assembled, Training, batch, difference, differing_ranks, mean_square, mlp, trains
from .several_modules import group_of
from .training_programs import BUFFER_OPTIONS, SPECIAL, program_of

# Options in combination

SITUATIONS: dict[str, tuple[str, ...]] = {
    "parameters that some ranks do not use": ("find_unused_parameters",),
    "accumulation": ("no_sync",),
    "gradients as views": (VIEWS,),
    "a comm hook": ("register_comm_hook",),
    "buffers": (),
    "a static graph": ("static_graph",),
    "uneven inputs": ("join",),
    "a group of some ranks": ("process_group",),
    "ignored parameters": (IGNORE,),
    "two dtypes": (),
    "a checkpoint": (),
}
"""What a script may have, with the options and methods of the class that it needs."""
UNUSED, LOCALLY, AS_VIEWS, HOOK, BUFFERS, STATIC, UNEVEN, GROUP, IGNORED, DTYPES, CHECKPOINT = SITUATIONS
OPTION_OF = {UNUSED: "find_unused_parameters", STATIC: "static_graph", AS_VIEWS: VIEWS}


def pairwise(names: Collection[str]) -> list[frozenset[str]]:
    """Return seven sets of up to 15 names, so that each two are together, apart in both ways, and absent together.

    A name is in set 0 and in two of the others, and no two names are in the same ones (Kleitman and Spencer 1973,
    doi:10.1016/0012-365X(73)90098-8).
    """
    sets = dict(zip(names, combinations(range(1, 7), 2), strict=False))
    return [frozenset(name for name, two in sets.items() if number in (0, *two)) for number in range(7)]


class _Combined(nn.Module):
    """Heads of which forward uses some, with parts of the `SITUATIONS`."""

    def __init__(self, situations: Collection[str]) -> None:
        super().__init__()
        dtype = torch.float64 if DTYPES in situations else torch.float32
        self.heads = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5, dtype=dtype), nn.Linear(6, 5)])
        self.inner, self.ignored = nn.Linear(6, 6), nn.Linear(6, 6) if IGNORED in situations else nn.Identity()
        self.checkpoints = CHECKPOINT in situations
        if BUFFERS in situations:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        own = self.ignored(x).square().mean()  # of the rank's own, which no other gradient depends on
        x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)
        outputs = [self.heads[index](x.to(next(self.heads[index].parameters()).dtype)).tanh() for index in used]
        return torch.stack([own.double(), *(output.double().square().mean() for output in outputs)]).sum()


def combined(rank: int, world_size: int, subject: Subject, situations: Collection[str]) -> str:
    """Train in several of the `SITUATIONS` at once; returns what is wrong.

    The last rank has the most inputs, and then uses every head. Each iteration but the first may accumulate. A state
    dict follows each pass, and the comm hook halves the averages.
    """
    members = list(range(int(GROUP in situations and world_size > 2), world_size))  # one alone would send nothing
    group = group_of(members)  # every rank takes part in making it
    if rank not in members:
        return ""
    options: dict[str, Any] = {OPTION_OF[one]: True for one in situations if one in OPTION_OF}
    if STATIC in situations:
        options.pop(OPTION_OF[UNUSED], None)  # which a static graph implies
    names = [f"ignored.{name}" for name in ("weight", "bias")] if IGNORED in situations else []

    def make() -> nn.Module:
        module = _Combined(situations)
        if names:
            getattr(subject.make, IGNORE)(module, names)
        return module

    def used(step: int, number: int, rank: int) -> list[int]:
        changing = 0 if STATIC in situations else number
        if UNUSED in situations and UNEVEN not in situations:  # one head in passes that accumulate only
            return [0] if rank == members[0] else [0, 1 + changing]
        if UNUSED in situations and rank != members[-1]:
            return [0, 1 + rank % 2]
        return [(rank * (not subject.one_order) + step * changing + head) % 3 for head in range(3)]

    def run(module: nn.Module, step: int, rank: int) -> None:
        passes = 2 if LOCALLY in situations and step else 1
        for number in range(passes):
            is_local = module is training.wrapped and number + 1 < passes
            with training.wrapped.no_sync() if is_local else nullcontext():
                module(batch(step + 10 * number, rank), used(step, number, rank)).backward()
                module.state_dict()

    if GROUP in situations:
        options["process_group"] = group
    training = Training(subject, make, members, **options)
    module, optimizer, problem = training.module, training.optimizer, ""
    if HOOK in situations:  # which makes a collective of its own, so that nothing but the hook matches it

        def look(_state: Any, bucket: Any) -> None:
            dist.all_reduce(torch.ones(1 + bucket.index(), device=rank_device()), group=group)

        training.wrapped.register_comm_hook(None, averaging_hook(look, 0.5, group))
    inputs = {one: STEPS + members.index(one) * (UNEVEN in situations) for one in members}
    with training.wrapped.join() if UNEVEN in situations else nullcontext():
        for step in range(inputs[rank]):
            having = [one for one in members if step < inputs[one]]
            if BUFFERS in situations:
                module.get_buffer("count").fill_(rank)
            training.backward(run, step)
            for name in names:
                module.get_parameter(name).grad = None  # the ignored ones have a check of their own
            local = [{**one, **dict.fromkeys(names)} for one in training.local(run, step, having)]
            divisor = len(members) * (1 + (HOOK in situations))
            wrong = difference(module, local, divisor=divisor, tolerance=subject.tolerance)
            source = having[-1] if UNEVEN in situations else members[0]
            if not wrong and BUFFERS in situations and (got := int(module.get_buffer("count"))) != source:
                wrong = f"the buffer is that of rank {got}, expected rank {source}'s"
            problem = problem or (wrong and f"iteration {step}, rank {rank}: {wrong}")
            optimizer.step()
    return problem  # at the end, because the other ranks go on


def check_combined(bench: Bench) -> str:
    """Each two options and situations together, and each without the other; a class may refuse some.

    Returns what it refuses. A failure is traced to as few of them as show it.
    """
    offered = bench.offer.options | bench.methods | bench.offer.defines
    possible = {name for name, needs in SITUATIONS.items() if offered.issuperset(needs)}
    if not set(BUFFER_OPTIONS) & bench.offer.options:
        possible.remove(BUFFERS)
    if bench.world_size == 1:  # on a single GPU
        possible.discard(GROUP)

    def refusal(situations: frozenset[str]) -> str:
        try:
            return bench.averages_or_refuses(f"{OF_PASSES}|{'|'.join(offered)}", combined, situations)
        except HangError as fault:
            raise HangError(f"{_told(situations)}: {fault}") from fault

    def wrong(situations: frozenset[str]) -> str:
        try:
            refusal(situations)
        except (FindingError, RankError) as error:
            return cause_of(error)
        return ""

    rows, refused = [row & possible for row in pairwise(SITUATIONS)], list[frozenset[str]]()
    while rows:
        row = rows.pop(0)
        if too_many := next(filter(row.issuperset, refused), None):
            rows = [fewer for one in sorted(too_many) if (fewer := row - {one}) not in rows] + rows
            continue
        try:
            if not (words := refusal(row)):
                continue
            fewest = _fewest(row, lambda fewer: not wrong(fewer) and bool(refusal(fewer)))
        except (FindingError, RankError, HangError) as error:
            pairs = map(frozenset, combinations(sorted(row), 2))  # first, because one that hangs ends the search
            pair = next(filter(wrong, pairs), None)
            if pair is None and isinstance(error, HangError):
                raise
            shown = _fewest(pair or row, lambda fewer: bool(wrong(fewer)))
            milder = getattr(error, "milder", False)
            raise FindingError(f"{_told(shown)}: {wrong(shown) or cause_of(error)}", milder=milder) from error
        if not fewest:
            raise FindingError(f"{_told(fewest)}: {words}")
        refused.append(fewest)
        rows.insert(0, row)
    return f"refuses {'; '.join(map(_told, refused))}" if refused else ""


def _fewest(situations: frozenset[str], shows: Callable[[frozenset[str]], bool]) -> frozenset[str]:
    """Leave situations out, one after the other, as long as the rest shows what all do."""
    for one in sorted(situations):
        if shows(situations - {one}):
            situations -= {one}
    return situations


def _told(situations: Collection[str]) -> str:
    return " with ".join(name for name in SITUATIONS if name in situations) or "a plain model"


# What training leaves behind


class _Leaving(nn.Module):
    """A perceptron whose graph holds an object, and which draws a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.held = mlp(), weakref.WeakSet[nn.Module]()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        self.held.add(held := nn.Module())
        assert output.grad_fn is not None
        output.grad_fn.metadata["held"] = held  # type: ignore[index]  # a dict
        return output


def left_behind(rank: int, world_size: int, subject: Subject, **options: Any) -> str:
    """Train, and look for what the class leaves behind, also of a search of the graph; returns what is wrong."""
    training, at = Training(subject, _Leaving, **options), "".join(f"with {name}, " for name in options)
    module: Any = training.module
    names, problem = set(module.state_dict()), ""
    torch.manual_seed(rank)
    for step in range(STEPS):
        training.backward(mean_square, step)
        training.optimizer.step()
        gc.collect()
        if module.held:
            problem = problem or f"{at}iteration {step}, rank {rank}: its graph is kept alive after its backward pass"
    drawn: list[Any] = [None] * world_size
    dist.all_gather_object(drawn, torch.rand(()).item())
    if len(set(drawn)) < world_size:
        problem = problem or "after training, ranks with seeds of their own draw equal random numbers, as for dropout"
    if further := [name for name in training.wrapped.state_dict() if name.removeprefix("module.") not in names]:
        problem = problem or f"the state dict has {', '.join(further)} beside the module's own tensors"
    training.train(steps=1)
    saved = {name.removeprefix("module."): tensor for name, tensor in training.wrapped.state_dict().items()}
    for name, tensor in module.state_dict().items():
        if name in saved and not torch.equal(saved[name], tensor) and not problem:
            problem = f"a second state dict has another {name} than the module: was it kept from the first?"
    return problem


# Use as the module


class _Named(NamedTuple):
    """Inputs and outputs with names."""

    values: Tensor
    rest: Any


STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "a dict": lambda values: {"deeper": [values, OrderedDict(number=1)]},
    "a tuple of one": lambda values: (values,),
    "a tuple with None": lambda values: (values, None),
    "a list with integers": lambda values: [values, values.argmax(dim=1)],
    "a named tuple": lambda values: _Named(values, {"positive": values > 0}),
}
"""What a forward pass may return, made of its values."""


class _Used(nn.Module):
    """A module with modes, hooks, gradients, an operation in place and a number that is random in double precision.

    Attributes:
        seen: Inputs and output of the last forward pass.
        called: Which hooks were called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(5, 3))
        self.factor = nn.Parameter(torch.rand((), dtype=torch.float64))
        self.layers[2].eval()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.layers[0].bias.grad, self.frozen.grad = torch.ones(5), torch.ones(2)
        self.seen: Any = None
        self.called = set[str]()
        self.register_forward_pre_hook(lambda own, _inputs: own.called.add("forward pre-hook"))
        self.register_forward_hook(lambda own, _inputs, _output: own.called.add("forward hook"))

    def forward(self, x: Tensor, *inputs: Any, structure: Callable[[Tensor], Any], **named: Any) -> Any:
        named.get("cache", {})["is written"] = True
        output = structure(self.layers(x) * self.factor.float())
        self.seen = ((x, *inputs), named), output
        return output


def _values(output: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


def _returning(name: str, module: nn.Module, step: int, rank: int) -> Tensor:
    """Change an output in place."""
    return _values(module(x=batch(step, rank), structure=STRUCTURES[name])).mul_(2).square().mean()


def _is_kept(before: Any, after: Any) -> bool:
    """Return whether two structures are equal, tensors in dtype and in whether they require a gradient, too."""
    (leaves, structure), (others, other_structure) = tree_flatten(before), tree_flatten(after)
    return structure == other_structure and all(
        leaf.dtype == other.dtype and leaf.requires_grad == other.requires_grad and torch.equal(leaf, other)
        if isinstance(leaf, Tensor) and isinstance(other, Tensor)
        else leaf is other
        for leaf, other in zip(leaves, others, strict=True)
    )


def as_the_module(rank: int, _world_size: int, subject: Subject) -> str:
    """Use a wrapped module as a script uses the module itself; returns what is wrong."""
    training, problems = Training(subject, _Used), list[str]()
    module: Any = training.module
    wrapped, layers = training.wrapped, module.layers

    def expect(problem: str, *, unless: bool) -> None:
        problems.extend([] if unless else [problem])

    differing = differing_ranks(module.parameters(), 0)
    expect("parameters in double precision differ between the ranks", unless=not differing)
    expect("its modes changed at construction", unless=[one.training for one in layers] == [True, True, False, True])
    is_kept = same(layers[0].bias.grad, torch.ones_like(layers[0].bias))
    expect("a gradient from before its construction changed", unless=is_kept)
    with torch.no_grad():
        output = wrapped(batch(0, rank), structure=STRUCTURES["a tuple of one"])
        expect("a forward pass under no_grad ends it", unless=not torch.is_grad_enabled())
    expect("under no_grad, its output requires a gradient", unless=not _values(output).requires_grad)
    for hook in ("forward hook", "forward pre-hook"):
        expect(f"it does not call the module's {hook}", unless=hook in module.called)
    for name, mode in ("eval", False), ("train", True):
        expect(f"{name}() does not return it", unless=getattr(wrapped, name)() is wrapped)
        expect(f"{name}() does not reach the module", unless={one.training for one in module.modules()} == {mode})
    for number, structure in enumerate(STRUCTURES.values()):
        wrapped.train(number % 2 == 0)
        x, before, cache = batch(0, rank), torch.ones(6, device=rank_device(), requires_grad=True), dict[str, bool]()
        inputs = x * before, x, _Named(x.long(), [x.double()]), [None]
        named = {"cache": cache, "mask": {"of x": x > 0}}
        output = wrapped(*inputs, structure=structure, **named)
        given, returned = module.seen
        expect("its forward gets other inputs than the script gives", unless=_is_kept((inputs, named), given))
        expect("what forward writes into an argument is lost", unless=bool(cache))
        expect("an input of the script requires a gradient afterwards", unless=not x.requires_grad)
        expect("the script gets another output than its forward returns", unless=_is_kept(returned, output))
        _values(output).sum().backward()
        training.finish()
        expect("no gradient reaches what has computed its inputs", unless=before.grad is not None)
    wrapped.zero_grad(set_to_none=True)
    expect("zero_grad() does not clear the gradients", unless=all(one.grad is None for one in module.parameters()))
    _save_and_copy(module, wrapped, expect)
    wrapped.train()
    layers[2].eval()
    for step, name in enumerate(STRUCTURES):
        training.backward(partial(_returning, name), step)
        wrong = training.wrong(partial(_returning, name), step)
        expect(f"forward returns {name}: {wrong}", unless=not wrong)
    with suppress(TypeError):
        wrapped("no tensor", structure=None)
    training.backward(partial(_returning, name), 0)
    wrong = training.wrong(partial(_returning, name), 0)
    expect(f"after a forward pass that raised an error: {wrong}", unless=not wrong)
    return f"rank {rank}: {problems[0]}" if problems else ""


def _save_and_copy(module: Any, wrapped: nn.Module, expect: Callable[..., None]) -> None:
    """Load what was saved, and train a copy of the module itself, as for an average of its weights."""
    saved = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    own = copy.deepcopy(module.state_dict())
    module.seen = None  # its tensors have a graph, and cannot be copied
    copied = copy.deepcopy(module)
    with torch.no_grad():
        torch._foreach_zero_(list(copied.parameters()))
        output = copied(batch(0, 0), structure=STRUCTURES["a tuple of one"])
        torch._foreach_zero_(list(module.parameters()))
    expect("a deep copy of the module computes with the module's own parameters", unless=not _values(output).any())
    wrapped.load_state_dict(saved)
    is_loaded = all(torch.equal(own[name], tensor) for name, tensor in module.state_dict().items())
    expect("load_state_dict() does not load what state_dict() returned", unless=is_loaded)
    names = nn.ModuleDict({"part": wrapped}).state_dict()
    is_part = len(names) == len(saved) and all(name.startswith("part.") for name in names)
    expect("as a part of another module, its state dict has other names", unless=is_part)


def passes_alone(rank: int, _world_size: int, subject: Subject, *, accumulates: bool) -> str:
    """Evaluate a module without buffers on rank 0 only, and perhaps accumulate there; then train on all ranks."""
    training = Training(subject)
    if rank == 0:
        with torch.no_grad():
            training.wrapped.eval()(batch(0, rank))
        training.wrapped.train()
    if rank == 0 and accumulates:
        with training.wrapped.no_sync():
            mean_square(training.wrapped, 0, rank).backward()
    return training.train()


def _clamped(module: nn.Module, step: int, rank: int) -> Tensor:
    """Load changed parameters first, as a script that goes on from a checkpoint."""
    module.load_state_dict({name: values.clamp(-0.1, 0.1) for name, values in module.state_dict().items()})
    return mean_square(module, step, rank)


def _frozen_later(module: nn.Module, step: int, rank: int) -> Tensor:
    """Freeze the first layer after the first step, as a script that trains the others to the end."""
    if step == 1:
        nn.ParameterList(list(module.parameters())[:2]).requires_grad_(requires_grad=False)
    return mean_square(module, step, rank)


def _left_out(module: nn.Module, step: int, rank: int) -> Tensor | None:
    """Leave out the second batch of all ranks, as a script that finds no word of it worth a loss."""
    return None if step == 1 else mean_square(module, step, rank)


OF_ADAPTERS: dict[str, dict[str, Any]] = {
    "load_state_dict of a changed state_dict before each pass": {"run": _clamped},
    "a lr that changes after each step, in param_groups of its optimiser or the given one": {"rates": (0.1,)},
    "a param_group of one parameter, and another lr and weight_decay for the others": {"rates": (0.1, 0.01)},
    "a layer frozen after the first step": {"run": _frozen_later},
    "a step without a backward pass, after which all parameters must be as before": {"run": _left_out},
}
"""What a script does with the module and the optimiser of an adapter: arguments of `trains`."""


def check_use(bench: Bench) -> str:
    """A wrapped module is used as the module itself: modes, hooks, inputs, outputs, state dict, copies.

    That rank 0 cannot evaluate alone is milder. An adapter is used as in `OF_ADAPTERS`; returns what it refuses.
    """
    if bench.offer.is_adapter:
        words = f"state|group|rate|frozen|requires_grad|{OF_PASSES}"
        told = {what: bench.averages_or_refuses(words, trains, what=what, **how) for what, how in OF_ADAPTERS.items()}
        return "; ".join(f"refuses {what}: {refusal}" for what, refusal in told.items() if refusal)
    bench.try_body(as_the_module)
    try:
        bench.try_body(passes_alone, accumulates="no_sync" in bench.methods)
    except (HangError, RankError, FindingError) as fault:
        alone = f"rank 0 cannot evaluate a module without buffers, or accumulate, alone: {cause_of(fault)}"
        raise FindingError(alone, milder=True) from fault
    return ""


# Memory at its peak, and compiled modules

TORCHS = Subject("torch.nn.parallel:DistributedDataParallel")


def peak_memory(_rank: int, _world_size: int, subject: Subject) -> float:
    """The least of five: a thread of Gloo may keep what it sent at construction until the first pass ends."""
    return min(_peak_of_a_training(subject) for _ in range(5))


def _peak_of_a_training(subject: Subject) -> float:
    """Train 2 MiB of parameters; returns how many times as many bytes of tensors live beside them at most."""
    device = rank_device()
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).to(device)
    held = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    with LiveBytes(module.parameters()) as live:
        wrapped, optimizer, update = subject.prepare(module, lambda one: torch.optim.SGD(one.parameters(), lr=0.1))
        for _ in range(STEPS):
            module.zero_grad()
            wrapped(torch.ones(1, 256, device=device)).mean().backward()
            subject.finish(wrapped, optimizer)
            update()
    # A mode does not see the threads that run backward on a GPU.
    peak = torch.cuda.max_memory_allocated() - held if device.type == "cuda" else live.peak_with_gradients
    return peak / sum(parameter.nbytes for parameter in module.parameters())


def check_memory(bench: Bench) -> None:
    """At its peak, training takes no more memory than under torch's class, and half of the gradients."""
    torchs, own = (max(bench.run(peak_memory, subject)) for subject in (TORCHS, bench.subject))
    if own > torchs + 0.5:
        raise FindingError(f"at its peak, training takes {own:.2g} times the parameters, torch's class {torchs:.2g}")


def compiled(_rank: int, _world_size: int, subject: Subject) -> str:
    """Train the wrapped module as `torch.compile` makes it."""
    training = Training(subject, bucket_cap_mb=25.0)  # with a smaller one, torch's class refuses
    module: Any = torch.compile(training.wrapped, backend="eager")

    def run(wrapped: nn.Module, step: int, rank: int) -> Tensor:
        return mean_square(module if wrapped is training.wrapped else wrapped, step, rank)

    logging.disable(logging.WARNING)  # which names what is not compiled
    try:
        with warnings.catch_warnings(action="ignore"):
            return training.train(run)
    finally:
        logging.disable(logging.NOTSET)


# Many iterations

LONG, SETTLED = 260, 50
"""Number of iterations, more than a byte counts, and of those after which memory no longer grows."""
LONG_TIMEOUT_S = 40.0


def _unequal_layers() -> nn.Module:
    """Build layers of different sizes side by side, which forward uses in any order; gradients come in reverse."""

    def forward(own: Any, x: Tensor, order: list[int]) -> Tensor:
        return torch.stack([own.layers[index](x).square().mean() for index in order]).sum()

    return Assembled(forward, layers=nn.ModuleList(nn.Linear(6, size) for size in (4000, 600, 100)))


def _order(step: int, rank: int) -> list[int]:
    """Return the same order on all ranks for long, then one of the rank's own for long, then any."""
    order = [(index + rank * (3 * step >= LONG)) % 3 for index in range(3)]
    if 3 * step >= 2 * LONG:
        random.Random(f"{step} {rank}").shuffle(order)
    return order


def long_run(rank: int, _world_size: int, subject: Subject, *, accumulates: bool) -> str:
    """Train for long, and compare every average, and the growth of memory and objects; some passes may accumulate."""
    training = Training(subject, _unequal_layers, bucket_cap_mb=0.01)  # three buckets

    def run(module: nn.Module, step: int, rank: int) -> None:
        passes, ordered_as = 1 + (accumulates and random.Random(step).random() < 0.5), rank * (not subject.one_order)
        for number in range(passes):
            is_local = module is training.wrapped and number + 1 < passes
            with training.wrapped.no_sync() if is_local else nullcontext():
                module(batch(step + LONG * number, rank), _order(step, ordered_as)).backward()

    problem, held, objects = "", 0, 0  # the problem is returned at the end, because other ranks go on
    for step in range(LONG):
        training.backward(run, step)
        problem = problem or training.wrong(run, step)
        training.optimizer.step()
        with torch.no_grad():
            training.wrapped.eval()(batch(step, rank), _order(0, 0))
        training.wrapped.train()
        if step == SETTLED:
            held, objects = _own_bytes(), _live_objects()
    further = (_live_objects() - objects) / (LONG - SETTLED)
    sent = (LONG - SETTLED) * sum(parameter.nbytes for parameter in training.module.parameters())
    if (grown := _own_bytes() - held) > sent / 2:
        told = f"memory grew by {grown / 2**20:.0f} MiB in iterations {SETTLED} to {LONG}, {grown / sent:.1f} times"
        problem = problem or f"rank {rank}: {told} the gradients in each: is every bucket kept?"
    if further > 0.5:
        problem = problem or f"rank {rank}: each iteration leaves {further:.1f} objects: is a hook or output kept?"
    return problem


def _live_objects() -> int:
    """Number of the Python objects that can refer to others, such as hooks."""
    gc.collect()
    return len(gc.get_objects())


def _own_bytes() -> int:
    """Memory of this process without free memory and without the files that it maps, which come and go."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc; what earlier programs freed hides growth
        trim(0)
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def _frozen_in_turn(module: nn.Module, step: int, rank: int) -> Tensor:
    layers: Any = getattr(module, "module", module).layers
    for number, layer in enumerate(layers):
        layer.requires_grad_(number != step % 4)
    return module(batch(step, rank), _order(LONG, rank + step))  # type: ignore[no-any-return]


FROZEN_IN_TURN: dict[str, Any] = {"make": _unequal_layers, "run": _frozen_in_turn, "steps": 6}
"""Arguments of `trains`: layers are frozen and thawed, and ranks differ in their ready orders."""


def check_long(bench: Bench) -> None:
    """260 iterations: ready orders are stable, then differ; each adds under half the gradients, and no hooks."""
    body = partial(long_run, accumulates="no_sync" in bench.methods)
    report(bench.run(body, bench.subject, timeout_s=LONG_TIMEOUT_S))


# Large buckets


def _steep(module: nn.Module, step: int, rank: int) -> Tensor:
    """Return a loss whose gradients exceed the range of half precision."""
    return module(batch(step, rank)).square().sum() * 1e6  # type: ignore[no-any-return]


LARGE: dict[str, Any] = {"make": partial(nn.Linear, 6, 374_999), "run": _steep, "what": "a bucket of 10 MiB"}
"""Arguments of `trains`."""

# Deep models and scaled losses


def _residual() -> nn.Module:
    """Build 1,200 residual blocks, whose graph has two ways through each block."""
    weights = nn.ParameterList(nn.Parameter(torch.ones(6)) for _ in range(1200))
    return Assembled(lambda own, x: reduce(lambda y, one: y + one * y.tanh() / 1200, own.weights, x), weights=weights)


DEEP: dict[str, Any] = {"make": _residual, "steps": 1, "bucket_cap_mb": 25.0, "what": "1,200 residual blocks"}
"""Arguments of `trains`: no recursion is too deep, and no search tries every way through the blocks."""


def _under_autocast(module: nn.Module, step: int, rank: int) -> Tensor:
    """Return a loss in half precision, scaled as a `GradScaler` does."""
    with torch.autocast(rank_device().type, torch.bfloat16):
        loss = mean_square(module, step, rank)
    return loss.float() * 2**16


AUTOCAST: dict[str, Any] = {"run": _under_autocast, "what": "autocast and a scaled loss"}
"""Arguments of `trains`."""

# Hooks of the script


def _with_collectives() -> nn.Module:
    """Build a perceptron whose backward pass makes a collective after each layer, as of a synchronised batch norm."""
    module = mlp()
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: dist.all_reduce(torch.ones(3, device=gradient.device)))
    return module


def _with_hooks() -> nn.Module:
    module = mlp()
    weight, bias, *_ = module.parameters()
    weight.register_hook(Tensor.sign)
    bias.register_post_accumulate_grad_hook(_to_sign)
    return module


def _to_sign(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.sign_()


def with_script_hooks(_rank: int, _world_size: int, subject: Subject, *, late: bool, **options: Any) -> str:
    """Train with hooks of the script that replace gradients by their signs, before they are averaged.

    Two hooks are registered before construction, one after it. `late`: and a post-accumulate hook after it too.
    """
    training = Training(subject, _with_hooks, **options)
    for module in (training.module, training.twin):
        *_, weight, bias = module.parameters()
        weight.register_hook(Tensor.sign)
        if late:
            bias.register_post_accumulate_grad_hook(_to_sign)
    problem = training.train()
    return problem and f"hooks of the script that replace gradients by their signs: {problem}"


def check_hooks(bench: Bench) -> str:
    """What hooks of the script make of a gradient is averaged.

    Returns what becomes of a post-accumulate hook that is registered after construction; empty if it counts too.
    """
    for options in bench.variants({}, VIEWS):
        bench.try_body(with_script_hooks, late=False, **options)
    bench.try_body(trains, make=_with_collectives, what="collectives of the script in the backward pass")
    try:
        bench.try_body(with_script_hooks, late=True)
    except FindingError:
        return "post-accumulate hooks that a script registers after construction run too late to count"
    return ""


# Parameters in one piece of memory


def _flattened() -> nn.Module:
    module = mlp()
    flat = parameters_to_vector(module.parameters()).detach()
    vector_to_parameters(flat, module.parameters())  # whose memory the parameters then are
    return module


def in_one_memory(rank: int, _world_size: int, subject: Subject) -> str:
    """Train views of one flat tensor, as fused optimisers make them; they stay so until the script separates them."""
    training = Training(subject, _flattened)
    first = training.train()
    pieces = {parameter.untyped_storage().data_ptr() for parameter in training.module.parameters()}
    for parameter in training.module.parameters():
        parameter.data = parameter.data.clone()
    later = training.train()
    if len(pieces) > 1:
        return f"rank {rank}: parameters that shared one piece of memory now have {len(pieces)}"
    return (first or later) and f"parameters that share memory, or did so at first: {first or later}"


# Ranks that are interpreters of their own

WORLD_SIZE, NEW = 5, 3
"""Number of ranks, and how many of them are new interpreters, each of which takes seconds to start."""
IMPORT_TIMEOUT_S = 180.0


def check_interpreters(bench: Bench) -> None:
    """Five ranks, most with hash seeds and addresses of their own, as under torchrun: no order may be a set's."""
    if launched_ranks() is not None:  # they are interpreters of their own
        _train_separately(bench, bench.offer)
        return
    size = WORLD_SIZE if bench.pool.backend == "gloo" else bench.world_size
    where: dict[str, Any] = {"backend": bench.pool.backend, "device": bench.device}
    with RankPool(size, new_interpreters=NEW, only_data=True, **where) as pool:
        try:
            pool.run(methods_of, bench.subject, timeout_s=patient(IMPORT_TIMEOUT_S))
            _train_separately(Bench(bench.subject, pool, bench.effort), bench.offer)
        except (FindingError, RankError, HangError) as fault:
            seeds = f"on {size} ranks, of which {NEW} are new interpreters, so that their sets have other orders"
            raise FindingError(f"{seeds}: {cause_of(fault)}") from fault


def _train_separately(bench: Bench, offer: Offer) -> None:
    bench.offer = offer
    options = {"bucket_cap_mb": 1e-6}
    bench.try_body(trains, **options)
    if not offer.is_adapter:  # which may refuse these parameters
        bench.try_program(program_of(SPECIAL, ["train"] * 3, bench.world_size, options=options))
        dtypes = "layers of four dtypes"
        bench.try_body(trains, make=real_models.REAL_MODELS[dtypes], what=dtypes, bucket_cap_mb=25.0)
