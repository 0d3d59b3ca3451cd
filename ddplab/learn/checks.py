"""Checks of the ladder that the conformance kit lacks; each names the mistake in plain words.

Those about launches run the class in virtual time, on emulated devices. Gradients of one pass are compared with what
beginners get in place of the average: the sum, the rank's own gradient, a division by another number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..conformance.all_checks import CHECKS, SMALL_CAP
from ..conformance.bucket_layouts import RULES
from ..conformance.check_runner import VIEWS, Bench, Check
from ..conformance.class_under_test import Subject
from ..conformance.local_training import FindingError, compare, gradients_of_rank, run_locally, same
from ..conformance.overlap import MODELS, MS, EmulatedSchedule, Network, late_launches, schedule_of, trace_of_layers
from ..conformance.real_models import REAL_MODELS, Training, mean_square, trains
from ..conformance.training_programs import PLAIN, SPECIAL, Net, Program, Seen, Weight, program_of, run_on_rank
from .learner_file import LearnerClass

FAST = Network("8 ranks at 2400 Gbit/s", 8, 3_000, 300e9)
SLOW = Network("8 ranks with a latency of 50 ms", 8, 50 * MS, 1.25e9)
CAP_MB = 5 / 1024
"""Bucket cap of the models below, whose parameters have some KiB."""

# What the gradients are


class FirstIterationError(FindingError):
    """The first iteration is wrong."""


def possible_mistakes(
    got: Tensor | None, name: str, rank: int, alone: Sequence[Mapping[str, Tensor | None]]
) -> list[str]:
    """Say what a wrong gradient may be in place of the average, likely ones first; integers may fit several.

    Args:
        got: The gradient after the backward pass.
        name: Its parameter.
        rank: The rank.
        alone: By rank, the gradients that the rank has alone.
    """
    world_size = len(alone)
    if got is None:
        return ["it is missing: who set it to None?"]
    parts = [part for one in alone if (part := one[name]) is not None]
    total = torch.stack(parts).sum(dim=0)
    known = {
        "it is a sum, not an average: divide by the world size": total,
        "it is still this rank's own: nobody has averaged it": alone[rank][name],
        "it is rank 0's: a broadcast copies, an all-reduce adds up": alone[0][name],
        "it is this rank's own divided by the world size, so the sum is missing, or its result was not copied back": (
            parts[rank] / world_size
        ),
        "it is divided by the world size twice": total / world_size**2,
    }
    known |= {
        f"it is divided by {number}, not by the world size {world_size}": total / number
        for number in range(2, 9)
        if number != world_size
    }
    for other in alone[0]:
        every = [one[other] for one in alone]
        if other != name and all(one is not None for one in every):
            known[f"it is the average of {other!r}: it was copied back into another parameter"] = (
                torch.stack(every).sum(dim=0) / world_size  # type: ignore[arg-type]
            )
    return [words for words, value in known.items() if same(got.reshape(-1), _flat(value))]


def _flat(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.reshape(-1)


def try_alike(bench: Bench, weights: Sequence[Weight], *, subject: Subject | None = None, **further: Any) -> None:
    """Train three iterations, in which all ranks use the weights in one order; name the mistake.

    Args:
        bench: The ranks.
        weights: The model.
        subject: The class. None: that of the bench.
        further: Further arguments for `program_of`.
    """
    size = bench.world_size
    program = program_of(weights, ["train"] * 3, size, used=lambda *_: range(len(weights)), **further)
    expected = run_locally(program, size)
    seen = bench.run(run_on_rank, subject or bench.subject, program)
    for number, of_step in enumerate(expected):
        problems = [compare(seen[rank][number], of_step[rank], iteration=number, rank=rank) for rank in range(size)]
        if not any(problems):
            continue
        wrong = [rank for rank, problem in enumerate(problems) if problem]
        if number:
            raise FindingError(
                f"{problems[wrong[0]]}; iteration {number - 1} was right, so something is left of the pass before, "
                "such as a list that is never emptied, a counter that is never reset, or a stale parameter"
            )
        likely = _likely(program, {rank: seen[rank][0] for rank in wrong}, of_step)
        if 0 not in wrong:
            likely = f"rank 0 is right, so only rank 0 has the average: reduce, or `if rank == 0`? {likely}"
        raise FirstIterationError(f"{problems[wrong[0]]}; {likely}" if likely else problems[wrong[0]])


def _likely(program: Program, got: Mapping[int, Seen], expected: Sequence[Seen]) -> str:
    """Say what the gradients of the first iteration are on all wrong ranks, and whether only some are wrong.

    Args:
        program: The program.
        got: What the wrong ranks saw.
        expected: What each rank must see.
    """
    net, size = Net(program), len(expected)
    alone = [gradients_of_rank(net, program, 0, rank, size) for rank in range(size)]
    possible: list[list[str]] = []
    right: set[str] = set()
    for rank, seen in got.items():
        for name, want in expected[rank].gradients.items():
            gradient = seen.gradients.get(name)
            if same(gradient, want):
                right |= {name} if want is not None else set()
            else:
                possible.append(possible_mistakes(gradient, name, rank, alone))
    if not possible:
        return "the gradients are right, so the parameters were changed by something else than the optimiser"
    words = next((one for one in possible[0] if all(one in others for others in possible)), "")
    if words and right:
        return f"{words}, but {min(right)!r} is right: is the last bucket, or the last parameter, left out?"
    return words or next(iter(possible[0]), "")


def averages(bench: Bench) -> None:
    """Three iterations of a model with four parameters, in several buckets if the class has buckets."""
    try_alike(bench, PLAIN, options=SMALL_CAP)


def special_alike(bench: Bench) -> None:
    """Frozen, tied, empty and transposed parameters of two dtypes, and layers of four, in one order on all ranks."""
    try_alike(bench, SPECIAL)
    bench.try_body(trains, make=REAL_MODELS[FOUR], what=FOUR)  # ranks may order a set of dtypes differently


def averages_alone(bench: Bench) -> None:
    """The gradients are averages when the backward pass returns; the script calls nothing."""
    subject = bench.subject
    if isinstance(subject, LearnerClass):
        subject = subject.alone()
    try:
        try_alike(bench, PLAIN, subject=subject, options=SMALL_CAP)
    except FindingError as error:
        traced = trace_of_layers("12 small layers", _LAYERS, 6 * MS, MS)
        if isinstance(error, FirstIterationError) and not schedule_of(subject, traced, FAST).launches:
            raise FindingError("backward() launched no all-reduce: register a hook on each parameter") from None
        words = "when loss.backward() returns; the script calls nothing after it from now on"
        raise FindingError(f"{words}: {error}") from None


# When all-reduces are launched

FOUR = "layers of four dtypes"
_LAYERS = [(64, 64)] * 12


def _schedule(bench: Bench, trace: Any, network: Network, **settings: Any) -> EmulatedSchedule:
    """Emulate, and check that the class waits for all that it launches."""
    schedule = schedule_of(bench.subject, trace, network, **settings)
    for number, launch in enumerate(schedule.launches):
        if launch.done_ns > schedule.iteration_ns:
            raise FindingError(
                f"the optimiser has stepped at {schedule.iteration_ns / MS:.1f} ms, but all-reduce {number} ends at "
                f"{launch.done_ns / MS:.1f} ms: nobody waits for it; call wait() before you use the result"
            )
    return schedule


def one_all_reduce(bench: Bench) -> None:
    """The gradients of a small model are in a single all-reduce."""
    schedule = _schedule(bench, trace_of_layers("12 small layers", _LAYERS, 6 * MS, MS), FAST)
    if len(schedule.launches) != 1:
        raise FindingError(
            f"{len(schedule.launches)} all-reduces for {len(_LAYERS)} gradients of 16 KiB, expected 1: each message "
            "pays the latency; copy the gradients into one flat tensor"
        )


def _two_dtypes(bench: Bench, network: Network) -> EmulatedSchedule:
    """Emulate a model whose last layers have another dtype."""
    dtypes = ["float32"] * 6 + ["float64"] * 6
    schedule = _schedule(bench, trace_of_layers("two dtypes", _LAYERS, 6 * MS, MS, dtypes=dtypes), network)
    if len(schedule.launches) != 2:
        raise FindingError(
            f"{len(schedule.launches)} all-reduces for small layers of two dtypes, expected 2: torch.cat converts to "
            "the wider dtype, so make a flat tensor for each"
        )
    return schedule


def one_for_each_dtype(bench: Bench) -> None:
    """Two dtypes are in two all-reduces."""
    _two_dtypes(bench, FAST)


def launched_together(bench: Bench) -> None:
    """On a slow network, the second all-reduce is launched before the first one is done."""
    first, second = _two_dtypes(bench, SLOW).launches
    if second.launched_ns >= first.done_ns:
        raise FindingError(
            f"all-reduce 1 is launched at {second.launched_ns / MS:.0f} ms, when all-reduce 0 is done: the launch "
            "blocks; pass async_op=True, launch all, and wait afterwards"
        )


def launched_early(bench: Bench) -> None:
    """The all-reduce of the last layers, of another dtype, is launched before the backward pass ends."""
    if problem := late_launches(_two_dtypes(bench, FAST)):
        raise FindingError(f"{problem}; launch in the hook of the last gradient that a bucket waits for")


# Which parameters are in which bucket

_SIZES = [640, 256, 512, 1024, 256, 768, 1280, 256, 512, 384, 896]
"""Elements of each layer; from the front and from the back, they fill different buckets."""


def _layout(bench: Bench, ready_order: Sequence[int] | None = None) -> tuple[list[int], dict[str, list[list[int]]]]:
    """Return the bytes of each all-reduce, and of each possible bucket by direction of the walk."""
    bench.needs("bucket_cap_mb")
    trace = trace_of_layers("unequal layers", [(one,) for one in _SIZES], 6 * MS, MS, ready_order=ready_order)
    schedule = _schedule(bench, trace, FAST, bucket_cap_mb=CAP_MB)
    walks = {"forward": range(len(_SIZES)), "reverse": range(len(_SIZES))[::-1], "ready": ready_order or ()}
    rules = {
        walk: [
            [4 * sum(_SIZES[index] for index in bucket) for bucket in rule(list(order), _SIZES, int(CAP_MB * 2**20))]
            for rule in RULES.values()
        ]
        for walk, order in walks.items()
        if order
    }
    return [launch.size_bytes for launch in schedule.launches], rules


def buckets_by_size(bench: Bench) -> None:
    """Buckets close at the cap, and the first ones are launched before the backward pass ends."""
    got, rules = _layout(bench)
    possible = [sorted(one) for walk in rules.values() for one in walk]
    if sorted(got) not in possible:
        cap = int(CAP_MB * 2**20)
        raise FindingError(
            f"buckets of {got} bytes with a cap of {cap} bytes; expected each to close when it reaches the cap, or "
            f"before it exceeds the cap: {rules['reverse'][0]} in launch order, for layers of "
            f"{[4 * one for one in _SIZES]} bytes"
        )
    if problem := late_launches(schedule_of(bench.subject, MODELS[0], FAST)):
        raise FindingError(problem)


def last_layers_first(bench: Bench) -> None:
    """Buckets are filled from the last layer on."""
    got, rules = _layout(bench)
    if got not in rules["reverse"]:
        filled = "buckets are filled from the first layer on" if sorted(got) in map(sorted, rules["forward"]) else ""
        raise FindingError(
            f"{filled or 'the buckets are in another order'}: {got} bytes in launch order, expected "
            f"{rules['reverse'][0]}; gradients arrive from the last layer on, so walk the parameters in reverse"
        )


def ready_order(bench: Bench) -> None:
    """From the second iteration on, buckets follow the order in which gradients became ready."""
    order = [3, 8, 0, 10, 5, 1, 9, 2, 7, 4, 6]
    got, rules = _layout(bench, order)
    if got not in rules["ready"]:
        raise FindingError(
            f"gradients become ready in the order {order}, but after four iterations the buckets have {got} bytes in "
            f"launch order, expected {rules['ready'][0]}: note the ready order of the first pass, and assign again "
            "before the second forward pass"
        )


# Options


def _memory(_rank: int, _world_size: int, subject: Subject) -> str:
    """Compare the memory of the gradients of a bucket after two iterations."""
    training = Training(subject, bucket_cap_mb=25.0, gradient_as_bucket_view=True)
    for step in range(2):
        training.backward(mean_square, step)
        training.optimizer.step()
    gradients = [one.grad for one in training.module.parameters() if one.grad is not None]
    pieces = {one.untyped_storage().data_ptr() for one in gradients}
    if len(pieces) > 1:
        return (
            f"{len(gradients)} gradients of one bucket have {len(pieces)} pieces of memory, expected 1: they are "
            "copies; set parameter.grad to a view of the flat tensor"
        )
    return ""


def one_memory(bench: Bench) -> None:
    """The gradients of a bucket are in the bucket's memory."""
    bench.needs(VIEWS)
    bench.try_body(_memory)


def nothing_beside(bench: Bench) -> None:
    """With a static graph, only buckets are sent after the first iteration."""
    bench.needs("static_graph")
    trace = trace_of_layers("12 small layers", _LAYERS, 6 * MS, MS)
    if others := _schedule(bench, trace, FAST, static_graph=True).other_collectives:
        raise FindingError(
            f"{others} collectives beside the buckets in a later iteration, expected 0: the graph is static, so the "
            "used parameters of the first pass are those of all passes"
        )


def _sharded(rank: int, world_size: int, subject: Subject) -> str:
    """Train with a sharded Adam, beside a whole one."""
    training = Training(subject)
    sharded = training.wrapped.shard_optimizer(torch.optim.Adam, lr=0.1)
    twin = [parameter.detach().clone().requires_grad_() for parameter in training.module.parameters()]
    whole = torch.optim.Adam(twin, lr=0.1)
    problem = ""  # returned at the end, because the other ranks go on
    for step in range(3):
        training.backward(mean_square, step)
        problem = problem or training.wrong(mean_square, step)
        for own, parameter in zip(twin, training.module.parameters(), strict=True):
            own.grad = None if parameter.grad is None else parameter.grad.clone()
        whole.step()
        sharded.step()
        for number, (own, parameter) in enumerate(zip(twin, training.module.parameters(), strict=True)):
            if not problem and not same(parameter.detach(), own.detach(), rtol=1e-5):
                problem = (
                    f"iteration {step}, rank {rank}: parameter {number} is not that of an unsharded step: does its "
                    "owner send it to the other ranks after the step?"
                )
    held = sum(
        value.numel()
        for state in sharded.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.numel() > 1
    )
    sizes = [2 * parameter.numel() for parameter in twin]
    share = sum(sizes) // world_size
    if not problem and held > share + max(sizes):
        problem = (
            f"rank {rank} keeps {held} numbers of the optimiser's state, expected about {share} of {sum(sizes)}: "
            "each parameter's state belongs on one rank"
        )
    return problem


def sharded_step(bench: Bench) -> None:
    """Each rank steps its share of the parameters only, and all ranks have the same parameters afterwards."""
    bench.needs("shard_optimizer")
    bench.try_body(_sharded)


OWN: Mapping[str, Check] = {
    "averages": averages,
    "special parameters in one order": special_alike,
    "one all-reduce": one_all_reduce,
    "one all-reduce for each dtype": one_for_each_dtype,
    "launched together": launched_together,
    "averages without a call": averages_alone,
    "launched early": launched_early,
    "buckets by size": buckets_by_size,
    "last layers first": last_layers_first,
    "buckets in ready order": ready_order,
    "memory of gradients": one_memory,
    "nothing beside the buckets": nothing_beside,
    "sharded step": sharded_step,
}
"""The checks of this module by name."""
ALL: Mapping[str, Callable[[Bench], str | None]] = {**CHECKS, **OWN}
"""These and the checks of the kit."""
