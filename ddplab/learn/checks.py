"""Checks of the ladder that the conformance kit lacks; each names the mistake in plain words.

Those about launches run the class in virtual time, on emulated devices. Gradients of one pass are compared with what
beginners get in place of the average: the sum, the rank's own gradient, a division by another number.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..conformance import timing_and_overlap
from ..conformance.all_checks import CHECKS, SMALL_CAP, check_of
from ..conformance.bucket_layouts import RULES
from ..conformance.check_runner import VIEWS, Bench, Check, run_alone
from ..conformance.class_under_test import Subject
from ..conformance.local_training import FindingError, compare, gradients_of_rank, run_locally, same
from ..conformance.real_models import REAL_MODELS, Training, mean_square, mlp, trains
from ..conformance.timing_and_overlap import MODELS, MS, EmulatedSchedule, Network, schedule_of, trace_of_layers
from ..conformance.training_programs import PLAIN, SPECIAL, Net, Program, Seen, Weight, program_of, run_on_rank
from ..memory_counter import LiveBytes
from ..reference.bucketing import MIB
from ..reference.trace import RankTrace
from .learner_file import LearnerClass

FAST = Network("8 ranks at 2400 Gbit/s", 8, 3_000, 300e9)
SLOW = Network("8 ranks with a latency of 50 ms", 8, 50 * MS, 1.25e9)
CAP_MB = 5 / 1024
"""Bucket cap of the models below, whose parameters have some KiB."""

# What the gradients are

OWN_GRADIENT = "it is still this rank's own: nobody has averaged it"


def possible_mistakes(
    got: Tensor | None, name: str, rank: int, alone: Sequence[Mapping[str, Tensor | None]]
) -> list[str]:
    """Say what a wrong gradient may be in place of the average, likely ones first; integers may fit several.

    `alone` has, by rank, the gradients that each rank has alone.
    """
    world_size = len(alone)
    if got is None:
        return ["it is missing: was it set to None, or to what dist.all_reduce returns, which is None?"]
    parts = [part for gradients in alone if (part := gradients[name]) is not None]
    total, own = torch.stack(parts).sum(dim=0), alone[rank][name]
    known = {
        "it is a sum, not an average: divide by the world size": total,
        OWN_GRADIENT: own,
        "it is rank 0's: a broadcast copies, an all-reduce adds up": alone[0][name],
        "it is this rank's own divided by the world size: the sum is missing, or was not copied back into "
        "parameter.grad, or was copied back before wait()": None if own is None else own / world_size,
        "it is divided by the world size twice": total / world_size**2,
        "it is the largest one: ReduceOp.SUM adds up": torch.stack(parts).amax(dim=0),
    }
    numbers = [number for number in range(2, 9) if number != world_size]
    known |= {f"it is divided by {one}, not by the world size {world_size}": total / one for one in numbers}
    for other in alone[0]:
        every = [gradients[other] for gradients in alone]
        if other != name and all(gradient is not None for gradient in every):
            known[f"it is the average of {other!r}: it was copied back into another parameter"] = (
                torch.stack(every).sum(dim=0) / world_size  # type: ignore[arg-type]
            )
    return [words for words, one in known.items() if one is not None and same(got.reshape(-1), one.reshape(-1))]


def try_alike(bench: Bench, weights: Sequence[Weight], **further: Any) -> None:
    """Train three iterations, in which all ranks use the weights in one order; name the mistake.

    Further arguments are those of `program_of`.
    """
    size = bench.world_size
    program = program_of(weights, ["train"] * 3, size, **{"used": lambda *_: range(len(weights))} | further)
    expected = run_locally(program, size)
    seen = bench.run(run_on_rank, bench.subject, program)
    for number, of_step in enumerate(expected):
        problems = [compare(seen[rank][number], of_step[rank], iteration=number, rank=rank) for rank in range(size)]
        if not any(problems):
            continue
        wrong = [rank for rank, problem in enumerate(problems) if problem]
        if number:
            raise FindingError(
                f"{problems[wrong[0]]}; iteration {number - 1} was right, so something is left of the pass before (a "
                "list that is never emptied, a counter that is never reset, a stale parameter), or used before wait()"
            )
        likely = _likely(program, {rank: seen[rank][0] for rank in wrong}, of_step)
        if 0 not in wrong:
            only = "rank 0 is right, so only rank 0 has the average: reduce, or `if rank == 0`?"
            likely = f"{only} {likely}" if likely else f"{only}; or it is used before wait()"
        elif likely == OWN_GRADIENT and not further.get("used"):
            likely = _why_own(bench)
        raise FindingError(f"{problems[wrong[0]]}; {likely}" if likely else problems[wrong[0]])


def _why_own(bench: Bench) -> str:
    """Say why all gradients are still a rank's own, after what an emulated iteration launches."""
    launches = run_alone(bench, schedule_of, bench.subject, SMALL_LAYERS, FAST).launches
    if not launches:
        return f"{OWN_GRADIENT}; {NO_LAUNCH if _calls_nothing(bench) else 'no all-reduce is launched'}"
    if launches[-1].launched_ns <= FORWARD_NS:
        return f"{OWN_GRADIENT}: the all-reduces come before the backward pass, when there are no gradients yet"
    return (
        "it is still this rank's own, although all-reduces run: nothing is copied back into parameter.grad (a flat "
        "tensor or a clone is a copy, and a parameter is not its gradient)"
    )


def _likely(program: Program, got: Mapping[int, Seen], expected: Sequence[Seen]) -> str:
    """Say what the gradients of the first iteration are on all wrong ranks, and whether only some are wrong."""
    net, size = Net(program), len(expected)
    alone = [gradients_of_rank(net, program, 0, rank, size) for rank in range(size)]
    possible: list[list[str]] = []
    right: list[tuple[str, list[str]]] = []
    for rank, seen in got.items():
        for name, want in expected[rank].gradients.items():
            gradient = seen.gradients.get(name)
            if want is None and gradient is None:
                continue
            mistakes = possible_mistakes(gradient, name, rank, alone)
            if same(gradient, want):
                right.append((name, mistakes))
            else:
                possible.append(mistakes)
    if not possible:
        return "the gradients are right, so the parameters were changed by something else than the optimiser"
    words = next((words for words in possible[0] if all(words in others for others in possible)), "")
    # Other right gradients than these fit both.
    if words == OWN_GRADIENT and (telling := [name for name, mistakes in right if words not in mistakes]):
        return f"{words}, but {min(telling)!r} is right: is the last bucket, or the last parameter, left out?"
    return words or next((one for one in possible[0] if "another parameter" in one), "")


def averages(bench: Bench, **options: bool) -> None:
    """Three iterations of a model with four parameters, in several buckets if the class has buckets.

    In virtual time before, where a collective that some ranks launch is found without a time-out.
    """
    ranks = tuple(RankTrace(rank=one, iterations=SMALL_LAYERS.ranks[0].iterations) for one in range(3))
    _schedule(bench, SMALL_LAYERS.model_copy(update={"ranks": ranks}), SLOW._replace(world_size=3), **options)
    try_alike(bench, PLAIN, options=SMALL_CAP | options)
    what = "with real numbers (does forward() change the output, or is something rounded?)"
    bench.try_body(trains, make=REAL_MODELS["multi-layer perceptron"], what=what)


def special_alike(bench: Bench) -> None:
    """Frozen, tied, empty and transposed parameters of two dtypes, and layers of four, in one order on all ranks."""
    try_alike(bench, SPECIAL)
    bench.try_body(trains, make=REAL_MODELS[FOUR], what=FOUR)  # ranks may order a set of dtypes differently


# When all-reduces are launched

FOUR = "layers of four dtypes"
_LAYERS = [(64, 64)] * 12
FORWARD_NS = 6 * MS
SMALL_LAYERS = trace_of_layers("12 small layers", _LAYERS, FORWARD_NS, MS)
NO_LAUNCH = (
    "no all-reduce is launched in an emulated backward pass: register a hook on each parameter (one on a module "
    "runs before the gradients of its parameters are there), which must see its own parameter (a lambda in a loop "
    "sees the last one); or nothing waits to be launched: fill the list of buckets when a pass begins"
)


def _schedule(bench: Bench, trace: Any, network: Network, **settings: Any) -> EmulatedSchedule:
    """Emulate, and check that the class waits for all that it launches."""
    schedule: EmulatedSchedule = run_alone(bench, schedule_of, bench.subject, trace, network, **settings)
    for number, launch in enumerate(schedule.launches):
        if launch.done_ns > schedule.iteration_ns:
            where = "the script calls nothing after loss.backward(): a function that the first hook queues must "
            where = f"{where}wait for all" if _calls_nothing(bench) else "call wait() before you use the result"
            raise FindingError(
                f"the optimiser steps while all-reduce {number} is still under way, on an emulated network with a "
                f"latency of {network.latency_ns / MS:g} ms: the class does not wait for it; {where}"
            )
    return schedule


def _calls_nothing(bench: Bench) -> bool:
    return isinstance(bench.subject, LearnerClass) and not bench.subject.is_finished


def _two_dtypes(bench: Bench, network: Network) -> EmulatedSchedule:
    """Emulate a model whose last layers have another dtype."""
    dtypes = ["float32"] * 6 + ["float64"] * 6
    schedule = _schedule(bench, trace_of_layers("two dtypes", _LAYERS, FORWARD_NS, MS, dtypes=dtypes), network)
    if (number := len(schedule.launches)) == 2:
        return schedule
    if number < 2:
        why = "make a flat tensor for each dtype: one tensor has one dtype (torch.cat converts to the wider dtype)"
    elif number % 2 == 0 and number != len(dtypes):
        why = f"{number // 2} of each: is a dtype split, or is a hook registered in every forward pass?"
    else:
        why = "each message pays the latency; copy the gradients of a dtype into one flat tensor, launched once"
    raise FindingError(
        f"{number} all-reduce{'s' * (number != 1)} for {len(dtypes)} small layers of two dtypes, expected 2: {why}"
    )


def one_for_each_dtype(bench: Bench) -> None:
    """Two dtypes are in two all-reduces."""
    _two_dtypes(bench, FAST)


def launched_together(bench: Bench) -> None:
    """On a slow network, the second all-reduce is launched before the first one is done."""
    first, second = _two_dtypes(bench, SLOW).launches
    if second.launched_ns >= first.done_ns:
        raise FindingError(
            "all-reduce 1 is launched only when all-reduce 0 is done: the launch blocks (pass async_op=True), or "
            "wait() comes at once; launch all, and wait afterwards"
        )
    for seed in timing_and_overlap.LATE_FIRST:  # the first all-reduce ends last
        program = program_of(SPECIAL, ["train"], bench.world_size, seed=seed, used=lambda *_: range(len(SPECIAL)))
        timing_and_overlap.try_timing(bench, program)


def launched_early(bench: Bench) -> None:
    """The all-reduce of the last layers, of another dtype, is launched before the backward pass ends."""
    late = timing_and_overlap.late_launches(schedule := _two_dtypes(bench, FAST))
    if late or schedule.launches[0].launched_ns > FORWARD_NS + len(_LAYERS) // 2 * MS:
        raise FindingError(f"{late or 'all-reduce 0 is late'}; launch in the hook of the last gradient of a bucket")


# Which parameters are in which bucket

_SIZES = [1260, 330, 920, 820, 920, 300, 1050, 240, 270, 220, 550]
"""Elements of each layer; in each order of the walk they fill other buckets, and so do caps in other units."""
WRONG_CAPS = {
    "each gradient has a bucket of its own: a bucket stays open until it has as many MiB, 2**20 bytes, as the cap": 1,
    "the cap counts elements: count bytes, parameter.nbytes": 4 * MIB,
    "the cap is in MB, such as 10**6 bytes: bucket_cap_mb is in MiB, 2**20 bytes": 10**6,
    "all gradients of a dtype are in one bucket: is the cap not used, or another one for the first bucket?": 2**40,
}
"""Likely mistakes by the bytes in a unit of `bucket_cap_mb`."""


def _filled(order: Sequence[int], unit: int = MIB) -> list[list[int]]:
    """Return the bytes of each bucket by each of the two rules."""
    return [
        [4 * sum(_SIZES[index] for index in bucket) for bucket in rule(list(order), _SIZES, int(CAP_MB * unit))]
        for rule in RULES.values()
    ]


FORWARDS, BACKWARDS = range(len(_SIZES)), range(len(_SIZES))[::-1]


def _buckets(bench: Bench, ready_order: Sequence[int] | None = None) -> tuple[list[int], int]:
    """Return the bytes of each all-reduce in launch order, and the number of further collectives."""
    bench.needs("bucket_cap_mb")
    trace = trace_of_layers("unequal layers", [(size,) for size in _SIZES], FORWARD_NS, MS, ready_order=ready_order)
    schedule = _schedule(bench, trace, FAST, bucket_cap_mb=CAP_MB)
    return [launch.size_bytes for launch in schedule.launches], schedule.other_collectives


def buckets_by_size(bench: Bench) -> None:
    """Buckets close at the cap."""
    got, _ = _buckets(bench)

    def fits(unit: int) -> bool:
        return any(sorted(got) in map(sorted, _filled(walk, unit)) for walk in (FORWARDS, BACKWARDS))

    if not fits(MIB):
        why = next((words for words, unit in WRONG_CAPS.items() if fits(unit)), "")
        if len(got) > 7 and sum(sent not in [4 * size for size in _SIZES] for sent in got) == 1:
            why = "after one bucket, each gradient has its own: does a new bucket begin with a size of 0?"
        if sum(got) != (whole := 4 * sum(_SIZES)):
            why = f"all-reduces of {sum(got)} bytes for gradients of {whole}: is one in no bucket, or in two?"
        raise FindingError(
            why
            or f"buckets of {got} bytes with a cap of {CAP_MB * MIB:.0f} bytes; expected each to close when it "
            f"reaches the cap, or before it exceeds the cap, such as {_filled(BACKWARDS)[0]}, for layers of "
            f"{[4 * size for size in _SIZES]} bytes in the order of registration"
        )


def last_layers_first(bench: Bench) -> None:
    """Buckets are filled from the last layer on, and the first ones are launched before the backward pass ends."""
    got, _ = _buckets(bench)
    if got not in (*_filled(BACKWARDS), *(filled[::-1] for filled in _filled(FORWARDS))):  # torch reverses the list
        filled = "buckets are filled from the first layer on" if sorted(got) in map(sorted, _filled(FORWARDS)) else ""
        raise FindingError(
            f"{filled or 'the buckets are in another order'}: {got} bytes in launch order, expected "
            f"{_filled(BACKWARDS)[0]}; gradients arrive from the last layer on, so walk the parameters in reverse"
        )
    if problem := timing_and_overlap.late_launches(run_alone(bench, schedule_of, bench.subject, MODELS[0], FAST)):
        raise FindingError(problem)


def small_first_bucket(bench: Bench) -> None:
    """Without a cap, the first bucket closes at 1 MiB and the others at 25 MiB."""
    bench.needs("bucket_cap_mb")
    trace = trace_of_layers("40 layers of 0.75 MiB", [(384, 512)] * 40, FORWARD_NS, MS)
    sent = [one.size_bytes / MIB for one in _schedule(bench, trace, FAST, bucket_cap_mb=None).launches]
    closed_at_cap, closed_before = [1.5, 25.5, 3.0], [0.75, 24.75, 4.5]
    if sent in (closed_at_cap, closed_before):
        return
    misplaced = "the small bucket is not launched first" if sent[0] > sent[-1] else "the buckets have other sizes"
    why = "all buckets are large" if min(sent) > 2 else misplaced
    raise FindingError(
        f"without bucket_cap_mb, {trace.workload.model} are in buckets of {sent} MiB in launch order, expected "
        f"{closed_at_cap}: {why}; the first bucket closes when it has 1 MiB, each other one when it has 25 MiB"
    )


def ready_order(bench: Bench) -> None:
    """From the second iteration on, buckets follow the order in which gradients became ready."""
    order = [3, 8, 0, 10, 5, 1, 9, 2, 7, 4, 6]
    got, others = _buckets(bench, order)
    if got not in _filled(order):
        why = "the buckets follow another order"
        if got in _filled(BACKWARDS) or got in _filled(FORWARDS):
            why = "the buckets are in the order of registration: is nothing noted, or not assigned?"
        elif got in _filled(order[::-1]):
            why = "the ready order is walked backwards"
        raise FindingError(
            f"gradients become ready in the order {order}, but after four iterations the buckets have {got} bytes in "
            f"launch order, expected {_filled(order)[0]}: {why}; note the ready order of the first pass, and assign "
            "again before the second forward pass"
        )
    if others:
        raise FindingError(
            f"{others} collective beside the buckets in a later iteration, expected 0: rebuild once, before the "
            "second forward pass, and not in every one"
        )


# Options


def _memory(_rank: int, _world_size: int, subject: Subject) -> str:
    """Compare the memory of the gradients of a bucket after two iterations: that of the bucket."""
    training = Training(subject, bucket_cap_mb=25.0, gradient_as_bucket_view=True)
    training.train(steps=2)
    gradients = [parameter.grad for parameter in training.module.parameters() if parameter.grad is not None]
    pieces = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    if len(pieces) > 1:
        return (
            f"{len(gradients)} gradients of one bucket have {len(pieces)} pieces of memory, expected 1: they are "
            "copies; set parameter.grad to a view of the flat tensor"
        )
    return ""


def partly_used(bench: Bench) -> None:
    """Each rank leaves out a parameter of its own."""
    bench.needs("find_unused_parameters")
    options = SMALL_CAP | {"find_unused_parameters": True}
    try_alike(bench, PLAIN, used=lambda _, rank: sorted({*range(len(PLAIN))} - {rank}), options=options)


def sent_buffers(bench: Bench) -> None:
    """Buffers are rank 0's after each averaged forward pass begins, and each rank's own if that is turned off."""
    bench.needs("broadcast_buffers")
    program = program_of(PLAIN, ["train"] * 2, bench.world_size, buffer=True)
    first, second = (step.rows for step in program.steps)
    own = [sum(rows) for rows in zip(first, second, strict=True)]

    def samples(step: int, **options: Any) -> list[int]:
        seen = bench.run(run_on_rank, bench.subject, replace(program, options=options))
        return [int(of_rank[step].buffers["samples"]) for of_rank in seen]

    sent, unsent = samples(1), samples(1, broadcast_buffers=False)
    if samples(0) != list(first):
        why = "after one pass, a rank's buffers are not its own: send rank 0's before the module runs, not after it"
    elif sent == own:
        why = "each rank has buffers of its own: broadcast rank 0's before each averaged forward pass, integers too"
    elif sent != [first[0] + rows for rows in second]:
        why = (
            "before the second pass, ranks get other buffers than rank 0's: a broadcast copies, an all-reduce adds up"
        )
    elif unsent != own:
        why = "with broadcast_buffers=False each rank must keep its own buffers, but they are sent"
    else:
        return
    raise FindingError(why)


def nothing_beside(bench: Bench) -> None:
    """With a static graph, only buckets are sent after the first iteration; none waits for an unused parameter."""
    bench.needs("static_graph")
    trace = trace_of_layers("no use of the last layer", _LAYERS, FORWARD_NS, MS, ready_order=range(11)[::-1])
    schedule = _schedule(bench, trace, FAST, static_graph=True)
    if others := schedule.other_collectives:
        raise FindingError(
            f"{others} collectives beside the buckets in a later iteration, expected 0: the graph is static, so the "
            "used parameters of the first pass are those of all passes"
        )
    if schedule.launches[-1].launched_ns > schedule.last_ready_ns:
        raise FindingError("a bucket waits for a parameter that the first pass did not use, until the pass ends")


class _Backwards(nn.Sequential):
    """Layers that are registered from the last one to the first, so that a rebuild changes the buckets."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, the last registered one first."""
        for layer in reversed(self):
            x = layer(x)
        return x


def _sharded(rank: int, world_size: int, subject: Subject) -> str:
    """Train with a sharded SGD with momentum, beside a whole one; Adam would hide a wrong factor.

    Each rank steps its share of the parameters only, and all ranks have the same parameters afterwards.
    """
    # Several parameters are in a bucket.
    training = Training(subject, lambda: _Backwards(*reversed([*mlp().children()])), bucket_cap_mb=3e-4)
    sharded = training.wrapped.shard_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    twin = [parameter.detach().clone().requires_grad_() for parameter in training.module.parameters()]
    whole = torch.optim.SGD(twin, lr=0.1, momentum=0.9)
    problem = ""  # returned at the end, because the other ranks go on
    for step in range(3):
        local = training.local(mean_square, step)
        training.backward(mean_square, step)
        for own, name in zip(twin, local[0], strict=True):
            own.grad = torch.stack([of_rank[name] for of_rank in local]).mean(dim=0)  # type: ignore[misc]
        whole.step()
        sharded.step()
        for number, (own, parameter) in enumerate(zip(twin, training.module.parameters(), strict=True)):
            if not problem and not same(parameter.detach(), own.detach(), rtol=1e-4):
                problem = (
                    f"iteration {step}, rank {rank}: parameter {number} is not that of an unsharded step with "
                    "averaged gradients: does its owner send it after the step?"
                )
    values = [value for state in sharded.state.values() for value in state.values() if isinstance(value, Tensor)]
    held = sum(value.numel() for value in values if value.numel() > 1)
    sizes = [parameter.numel() for parameter in twin]
    share = sum(sizes) // world_size
    if not problem and held > share + max(sizes):
        problem = (
            f"rank {rank} keeps {held} numbers of the optimiser's state, expected about {share} of {sum(sizes)}: "
            "each parameter's state belongs on one rank"
        )
    return problem


class Stepping:
    """A class on an emulated device whose step is that of a sharded Adam; has what `wrap_emulated` uses of a subject.

    `held_bytes` is what the rank held beside the parameters at each step.
    """

    def __init__(self, subject: Subject) -> None:
        self.options, self.finish, self._subject = subject.options, subject.finish, subject
        self.held_bytes: list[int] = []

    def wrap(self, module: Any, **options: Any) -> Any:
        """Wrap the emulated device, and follow all memory that this thread allocates from now on."""
        given = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        live = LiveBytes([*module.parameters(), *module.buffers()])
        live.__enter__()  # type: ignore[no-untyped-call]
        wrapped: Any = self._subject.wrap(module, **options)
        device_step, optimizer = module.step, wrapped.shard_optimizer(torch.optim.Adam, lr=0.1)

        def step() -> None:
            gc.collect()
            storages = {one._cdata: one.nbytes() for one in map(Tensor.untyped_storage, module.parameters())}
            self.held_bytes.append(live.bytes - sum(size for own, size in storages.items() if own not in given))
            device_step()
            optimizer.step()

        module.step = step
        return wrapped


def _sharded_schedule(subject: Subject, network: Network) -> tuple[EmulatedSchedule, int]:
    """Return what a sharded Adam does with the first model, and the bytes that a rank holds at the last step."""
    stepping = Stepping(subject)
    schedule = schedule_of(stepping, MODELS[0], network)  # type: ignore[arg-type]
    return schedule, stepping.held_bytes[-1]


def scattered(bench: Bench) -> None:
    """Each rank gets its part of each bucket in the backward pass, holds no more, and sends it afterwards."""
    bench.needs("shard_optimizer")
    network = Network("8 ranks at 80 Gbit/s", 8, 10_000, 10e9)
    schedule, held_bytes = run_alone(bench, _sharded_schedule, bench.subject, network)
    whole = sum(parameter.size_bytes for parameter in MODELS[0].workload.parameters)
    share, sent = whole / 8 / MIB, sum(launch.size_bytes for launch in schedule.launches) / MIB
    if schedule.other_collectives or sent > 2.2 * share:
        raise FindingError(
            f"a model of {8 * share:.0f} MiB on 8 ranks: a rank gives collectives of {sent:.1f} MiB and "
            f"{schedule.other_collectives} broadcasts, expected reduce-scatters and all-gathers of {2 * share:.1f} "
            "MiB in all: a rank needs the sum of its part only"
        )
    if (held := held_bytes / MIB) > 4.5 * share:
        raise FindingError(
            f"when the optimiser steps, a rank holds {held:.1f} MiB beside the parameters, expected {4 * share:.1f} "
            "of gradients, weights and Adam's two numbers, each of its part only: set parameter.grad to None once "
            "the bucket has it, and keep no bucket"
        )
    gather_ns = whole * 7 / 8 / network.bytes_per_s * 1e9
    if schedule.exposed_ns > 1.5 * gather_ns:
        raise FindingError(
            f"{schedule.exposed_ns / MS:.1f} ms of communication are exposed, expected about {gather_ns / MS:.1f} of "
            "the all-gather: is a reduce-scatter launched late, or waited for in the backward pass?"
        )


ALL: Mapping[str, Check] = CHECKS | {
    "averages": averages,
    "averages with views": lambda bench: averages(bench, gradient_as_bucket_view=True),
    "special parameters in one order": special_alike,
    "one all-reduce for each dtype": one_for_each_dtype,
    "launched together": launched_together,
    "launched early": launched_early,
    "buckets by size": buckets_by_size,
    "last layers first": last_layers_first,
    "a small first bucket": small_first_bucket,
    "buckets in ready order": ready_order,
    "memory of gradients": check_of(_memory, VIEWS),
    "buffers of rank 0": sent_buffers,
    "averages of used parameters": partly_used,
    "nothing beside the buckets": nothing_beside,
    "sharded step": check_of(_sharded, "shard_optimizer"),
    "reduce-scattered buckets": scattered,
}
"""The checks of the kit, and those of the ladder."""
