"""Checks: what is asked of a data-parallel class, one by one, fixed scenarios before random programs.

A check that needs a method or an option which the class does not offer reports that it is not supported. Each check
stops at its first finding.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from ..reference.bucketing import MIB
from ..reference.errors import RankError
from . import (
    backward_passes,
    bucket_layouts,
    comm_hooks,
    lost_ranks,
    real_models,
    several_modules,
    training_programs,
    uneven_inputs,
    unused_parameters,
    usual_scripts,
)
from .check_outcomes import SEEDED
from .check_runner import OF_PASSES, VIEWS, Bench, Check, HangError, cause_of
from .class_under_test import IGNORE, NotSupportedError, RefusalError
from .local_training import HABITS, FindingError, differences, run_locally
from .timing_and_overlap import EmulatedSchedule, check_overlap, check_timing, not_slower
from .training_programs import PLAIN, SPECIAL, Program, Seen, StepKind, Weight, Zero, program_of, unusual

# Fixed scenarios

SMALL_CAP = {"bucket_cap_mb": 5e-5}
"""A cap that gives `PLAIN` several buckets."""
MANY = (Weight((1,)),) * 300
"""More weights than a byte can count."""


def run_program(
    bench: Bench, weights: Sequence[Weight] = PLAIN, kinds: Sequence[StepKind] = ("train",) * 3, **further: Any
) -> None:
    """Run a program; arguments as for `program_of`."""
    bench.try_program(program_of(weights, kinds, bench.world_size, **further))


def construction(bench: Bench) -> None:
    """Ranks that were initialised differently start from rank 0's parameters and buffers, and keep their seeds."""
    has_buffers = any(name in bench.offer.options for name in training_programs.BUFFER_OPTIONS)
    weights = PLAIN if bench.offer.is_adapter else SPECIAL
    program = program_of(weights, ["evaluate"], bench.world_size, buffer=has_buffers)
    seen = bench.run(training_programs.around_construction, bench.subject, program)
    (own, first, _), *_ = seen
    for rank, (_, after, _) in enumerate(seen):
        for kind, name, how in differences(after, first):
            raise FindingError(f"iteration 0: {kind} {name!r} on rank {rank} is not that of rank 0: {how}")
    for kind, name, how in differences(first, own):
        raise FindingError(f"{kind} {name!r} of rank 0 changed: {how}")
    if any(len({*drawn}) < len(seen) for drawn in zip(*(numbers for *_, numbers in seen), strict=True)):
        raise FindingError("ranks with seeds of their own draw equal random numbers afterwards, as for dropout")


def special_parameters(bench: Bench) -> str:
    """Frozen, tied, empty and scalar parameters, of two dtypes, in any order of memory, and of subclasses of Tensor.

    Parameters that share one piece of memory go on to do so. A class may refuse a subclass with an error, and
    gradients that autograd leaves as conjugate or negative views.
    """
    if bench.offer.is_adapter:
        return _special_alone(bench)
    for cap_mb in (1e-6, 25.0):
        run_program(bench, SPECIAL, options={"bucket_cap_mb": cap_mb})
    make, what = real_models.with_subclasses, "parameters of a subclass of Tensor"
    bench.averages_or_refuses("subclass|type", real_models.trains, make=make, what=what)
    for options in bench.variants(real_models.LAZY, VIEWS):
        bench.averages_or_refuses("conjugate|negative", real_models.trains, **options)
    bench.try_body(usual_scripts.in_one_memory)
    bench.try_body(real_models.trains, make=real_models.overlapping, what="parameters that overlap in memory")
    return ""


def _special_alone(bench: Bench) -> str:
    """Each special parameter beside a usual one, for an adapter, which may refuse it; returns what it refuses."""
    refused, problems = [], []
    for weight in SPECIAL[1:]:
        program = program_of((SPECIAL[0], weight), ["train"] * 3, bench.world_size)
        what = ", ".join(unusual(training_programs.in_one_order(program)))
        try:
            bench.try_program(program, words="type|scalar|shape|empty|contiguous|shared|tied")
        except RefusalError as refusal:
            refused.append(f"refuses {what}: {refusal}")
        except (FindingError, HangError) as error:
            problems.append(f"{what}: {error}".partition("\n")[0])
            if isinstance(error, HangError):
                break
    if len(refused) == len(SPECIAL) - 1:
        raise NotSupportedError(f"it {refused[0]}; and all others")
    if problems:
        raise FindingError("; ".join(dict.fromkeys(problems + refused)))
    return "; ".join(dict.fromkeys(refused))


def fixed(*cases: dict[str, Any]) -> Check:
    """Return a check that runs fixed programs; each case has arguments for `run_program`."""

    def check(bench: Bench) -> None:
        for case in cases:
            run_program(bench, **case)

    return check


one_weight = fixed({"weights": (Weight((3,)),)})
# Every cap gives the same result, from one parameter a bucket to a single bucket.
bucket_caps = fixed(
    *({"kinds": ["train"] * 4, "options": {"bucket_cap_mb": cap}} for cap in (1e-7, 5e-5, 25.0)),
    {"weights": MANY, "kinds": ["train"] * 2, "options": {"bucket_cap_mb": 1e-6}},
    {"weights": (Weight((8,)),) * 5, "options": {"bucket_cap_mb": 32 / MIB}},  # each gradient is as large as the cap
)
# SGD has momentum; the learning rate changes, with evaluation before training, in inference mode, and in between.
changing: Sequence[StepKind] = ("evaluate", "train", "evaluate", "train", "change_lr", "train")
optimizers = fixed(*({"kinds": changing, "optimizer": name, "options": SMALL_CAP} for name in ("sgd", "adam")))
# Gradients are set to zeros, also in another order of memory, or not cleared, or every other one is set to None.
kept_gradients = fixed(*({"zeros": [zero] * 3, "options": SMALL_CAP} for zero in get_args(Zero)[1:]))


def large_gradients(bench: Bench) -> None:
    """Gradients large enough that a class may copy each alone, between small ones."""
    weights = tuple(map(Weight, ((4,), (150, 150), (3,), (300, 300), (2,), (2, 2))))
    for options in bench.variants({"bucket_cap_mb": 25.0}, VIEWS):
        run_program(bench, weights, used=lambda _, rank: [(5 * n + rank) % 6 for n in range(6)], options=options)
        bench.try_body(real_models.trains, steps=2, **usual_scripts.LARGE, **options)
    if "find_unused_parameters" in bench.offer.options:
        for options in bench.variants({"bucket_cap_mb": 25.0, "find_unused_parameters": True}, VIEWS):
            run_program(bench, weights, used=lambda _, rank: [rank % 2, 2, 3 + rank % 2], options=options)


# Capabilities


def _accumulate(bench: Bench, **options: Any) -> None:
    kinds: list[StepKind] = ["accumulate", "accumulate", "train", "train", "accumulate", "train"]
    zeros: list[Zero] = ["none", "keep", "keep", "none", "none", "keep"]
    run_program(bench, PLAIN, kinds, zeros=zeros, options=SMALL_CAP | options)


def accumulation(bench: Bench) -> None:
    """Several passes under no_sync, then one with averaging, equal one large batch."""
    bench.needs("no_sync")
    _accumulate(bench)
    bench.try_random(kinds=("train", "accumulate"), keep=True)


def unused(bench: Bench) -> None:
    """Ranks use different parameters, and some parameter is used by no rank.

    Without an option for them, gradients are averaged, or the class raises an error; one by mistake is milder.
    """
    if not bench.offer.is_adapter:
        try:
            bench.averages_or_refuses(OF_PASSES, unused_parameters.used_by_no_rank)
        except RankError as error:
            raise FindingError(f"a parameter that no rank uses: {cause_of(error)}", milder=True) from error
    bench.needs("find_unused_parameters")
    options = {"find_unused_parameters": True}
    one_each: dict[str, Any] = {"used": lambda step, rank: [0, 1 + (rank + step) % 2]}  # the last one is never used
    run_program(bench, PLAIN, ["train"] * 4, options=SMALL_CAP | options, **one_each)
    if "no_sync" in bench.methods:  # a use counts across the evaluation
        how: dict[str, Any] = {"used": lambda step, _: [0] if step else [0, 1], "zeros": ["none", "keep", "keep"]}
        run_program(bench, PLAIN, ["accumulate", "evaluate", "train"], options=options, **how)
    run_program(bench, MANY, ["train"], used=lambda _, rank: range(200 + rank), options=options)
    bench.try_body(real_models.trains, **usual_scripts.FROZEN_IN_TURN, **options)
    bench.try_random(any_use=True, options=bench.variants(options, VIEWS))


def static_graph(bench: Bench) -> None:
    """A graph that never changes, with a parameter that is never used."""
    bench.needs("static_graph")
    kinds: list[StepKind] = ["train"] * 4
    if "no_sync" in bench.methods:
        kinds += ["accumulate", "train", "train"]  # not at first, where torch's class fails
    zeros: list[Zero] = ["none", "none", "none", "none", "none", "keep", "none"]
    everywhere: list[Callable[[int, int], list[int]]] = [lambda *_: [2, 0, 1], lambda *_: [3, 0, 1]]
    for used in (*everywhere, lambda _step, rank: [2, 0] if rank else [1, 0]):
        for cap_mb in (5e-5, 25.0):
            for options in bench.variants({"static_graph": True, "bucket_cap_mb": cap_mb}, VIEWS):
                run_program(bench, PLAIN, kinds, used=used, zeros=zeros, options=options)
    every = bench.variants({"static_graph": True}, VIEWS)
    bench.try_random(static=True, kinds=("train", "evaluate", "change_lr"), options=every)


def gradient_views(bench: Bench) -> None:
    """Gradients that are views of the buckets."""
    bench.needs(VIEWS)
    for cap_mb in (5e-5, 25.0):
        options = {VIEWS: True, "bucket_cap_mb": cap_mb}
        for second in ("none", "keep"):  # where buckets are rebuilt
            zeros: list[Zero] = ["none", second, "alternate", "alternate"]
            run_program(bench, PLAIN, ["train"] * 4, zeros=zeros, options=options)
        if "no_sync" in bench.methods:
            _accumulate(bench, **options)
    bench.try_random(options=[{VIEWS: True}])


def buffers(bench: Bench) -> str:
    """Before synchronised forward passes, all ranks get rank 0's buffers, unless an option turns that off.

    Returns when the class broadcasts them.
    """
    names = [name for name in training_programs.BUFFER_OPTIONS if name in bench.offer.options]
    if not names:
        raise NotSupportedError("it has neither broadcast_buffers nor forward_sync_buffers")
    kinds: list[StepKind] = ["train", "train", "evaluate", "forward", "train", "train"]
    if "no_sync" in bench.methods:
        kinds[2:2] = ["accumulate", "accumulate", "train"]
    bench.try_body(real_models.compare_buffers)
    habits = list(HABITS)
    for options in ({}, {names[0]: False}):
        further: dict[str, Any] = {"zeros": ["keep"] * len(kinds), "buffer": True, "options": options}
        habits = bench.try_program(program_of(PLAIN, kinds, bench.world_size, **further), habits)
    return f"broadcast {habits[0]}"


def plans(bench: Bench) -> None:
    """Explicit buckets in any order."""
    bench.needs("plan")
    for plan in ([[0], [3], [1, 2]], [[3, 1, 0, 2]], [[2], [1], [0], [3]]):
        run_program(bench, options={"plan": plan})
        wanted = tuple(map(tuple, plan))
        for got in bucket_layouts.layouts(bench, (6, 4, 5, 6), {"plan": plan}):
            if got not in (wanted, None):
                raise FindingError(f"plan {wanted}: after 3 iterations the buckets are {got}")


def real(bench: Bench) -> str:
    """Convolutions, an LSTM, an embedding, shared layers: equal up to the rounding of the average.

    An adapter may refuse shared layers with an error; returns it.
    """
    refused = ""
    for what, make in real_models.REAL_MODELS.items():
        if not bench.offer.is_adapter:
            for options in bench.variants({}, VIEWS):
                bench.try_body(real_models.trains, make=make, what=what, **options)
        elif what not in real_models.RARE:
            refused = bench.averages_or_refuses("shared|tied", real_models.trains, make=make, what=what) or refused
    if bench.offer.is_adapter:
        bench.try_body(real_models.trains, what="SGD with nesterov and weight_decay", **real_models.NESTEROV)
    return refused and f"refuses shared layers: {refused}"


def sparse_gradients(bench: Bench) -> None:
    """Embeddings and bags of embeddings with sparse gradients; a class may refuse them with an error."""
    for what, make in real_models.SPARSE_MODELS.items():
        for options in bench.variants({"run": real_models.of_uneven_rows}, VIEWS):
            if refusal := bench.averages_or_refuses("sparse", real_models.trains, make=make, what=what, **options):
                raise NotSupportedError(f"it refuses them: {refusal}")


def missing_sparse_gradients(bench: Bench) -> None:
    """Sparse gradients that some ranks lack, under a search for unused parameters or Join; or a refusal."""
    if not {"find_unused_parameters", "join"} & (bench.offer.options | bench.methods):
        raise NotSupportedError("it has neither find_unused_parameters nor join")
    if "find_unused_parameters" in bench.offer.options:
        options = {"find_unused_parameters": True}
        bench.averages_or_refuses("sparse", real_models.trains, **unused_parameters.SPARSE_ON_SOME_RANKS, **options)
    if "join" in bench.methods:
        batches = tuple(range(0, 2 * bench.world_size, 2))
        bench.averages_or_refuses("sparse", uneven_inputs.compare, batches, sparse=True, what="two sparse Joins")


def long_programs(bench: Bench) -> None:
    """Any sequence of up to twelve training steps on one module."""
    kinds: list[StepKind] = ["train", "evaluate", "change_lr"]
    if "no_sync" in bench.methods:
        kinds.insert(1, "accumulate")
    bench.try_random(kinds=kinds, keep=True, most_steps=12, examples=max(3, bench.effort // 3))


def same_as_another(bench: Bench) -> None:
    """Another class sees the same on random programs, errors and missing gradients included."""
    if (other := bench.against) is None:
        raise NotSupportedError("--against names no other class")
    if bench.subject.tolerance:
        raise NotSupportedError("with a tolerance, two classes may differ")

    def attempt(program: Program) -> None:
        run_locally(program, bench.world_size, device=bench.device)  # raises an error if the program is weak
        mine, theirs = (bench.run(training_programs.run_until_error, one, program) for one in (bench.subject, other))
        for rank, (got, expected) in enumerate(zip(mine, theirs, strict=True)):
            if problem := difference_of_runs(got, expected):
                raise FindingError(f"rank {rank}, unlike {other.name}: {problem}", program)

    bench.try_random(attempt, examples=2 * bench.effort)


def difference_of_runs(got: tuple[list[Seen], str], expected: tuple[list[Seen], str]) -> str:
    """Say how two runs of a program on a rank differ; empty if they do not."""
    (mine, error), (theirs, other_error) = got, expected
    if error != other_error:
        return f"ended with {error or 'no error'}, the other with {other_error or 'no error'}"
    for number, (seen, others) in enumerate(zip(mine, theirs, strict=True)):
        for kind, name, how in differences(seen, others):
            return f"iteration {number}: {kind}s {name!r}: {how}"
        # torch orders the last buckets of different dtypes by a hash, so their order is no part of the layout.
        if seen.buckets and others.buckets and sorted(seen.buckets) != sorted(others.buckets):
            return f"iteration {number}: buckets {seen.buckets}, the other's {others.buckets}"
    return ""


def check_of(body: Callable[..., Any], *needs: str, variants: Sequence[str] = (), **keywords: Any) -> Check:
    """Return a check that runs a body on classes with these methods and options, also with each of the `variants`."""

    def check(bench: Bench) -> None:
        bench.needs(*needs)
        for options in bench.variants(keywords, *variants):
            bench.try_body(body, **options)

    return check


CHECKS: dict[str, Check] = {
    "any timing": check_timing,  # first: in virtual time, a rank that waits for ever is named at once
    "overlap": check_overlap,
    "one weight": one_weight,
    "construction": construction,
    "bucket caps": bucket_caps,
    "special parameters": special_parameters,
    "optimizers": optimizers,
    "kept gradients": kept_gradients,
    "accumulation": accumulation,  # before what has passes under no_sync, too
    "buffers": buffers,
    "real models": real,
    "special values": check_of(real_models.compare_special_values),
    "use as the module": usual_scripts.check_use,
    "half-precision sums": check_of(real_models.compare_large_values),
    "repeated forward passes": check_of(real_models.trains, **backward_passes.REPEATED_FORWARD),
    "nested no_sync": check_of(backward_passes.nested_no_sync, "no_sync"),
    "process group": several_modules.check_groups,
    "ignored parameters": check_of(unused_parameters.ignored_parameters, IGNORE),
    "nested outputs": check_of(
        real_models.trains, "find_unused_parameters", variants=[VIEWS], **unused_parameters.NESTED_OUTPUTS
    ),
    "untouched gradients": check_of(unused_parameters.untouched_gradients, "find_unused_parameters"),
    "mixed precision": real_models.check_mixed_precision,
    "gradients of another dtype": real_models.check_wide_gradients,
    "checkpoints": backward_passes.check_checkpoints,
    "hooks of the script": usual_scripts.check_hooks,
    "skipped all-reduces": unused_parameters.check_skipped,
    "list of bucket caps": bucket_layouts.check_list,
    "several backward passes": backward_passes.check_several,
    "gradients that nothing waits for": backward_passes.check_not_waited_for,
    "a backward pass that raises": backward_passes.check_raising,
    "first pass of a static graph": backward_passes.check_static_first,
    "several modules": several_modules.check_modules,
    "plans": plans,
    "comm hooks": comm_hooks.check,
    "compressing hooks": comm_hooks.check_compressing,
    "uneven inputs": uneven_inputs.check,
    "sparse gradients": sparse_gradients,
    "missing sparse gradients": missing_sparse_gradients,
    "bucket layout": bucket_layouts.check,
    "unused parameters": unused,
    "static graph": static_graph,
    "gradient views": gradient_views,
    "large gradients": large_gradients,  # after what has unused parameters, too
    "deep models": check_of(
        real_models.trains, variants=["find_unused_parameters", "static_graph"], **usual_scripts.DEEP
    ),
    "autocast": check_of(real_models.trains, **usual_scripts.AUTOCAST),
    "what training leaves behind": check_of(usual_scripts.left_behind, variants=["find_unused_parameters"]),
    "peak memory": usual_scripts.check_memory,
    "compiled modules": check_of(usual_scripts.compiled),
    "combined options": usual_scripts.check_combined,
    "a long run": usual_scripts.check_long,
    "new interpreters": usual_scripts.check_interpreters,
    "same as another": same_as_another,
    "random programs": Bench.try_random,
    "state machine": long_programs,
    "a failing rank": partial(lost_ranks.check, kind="raises"),
    "a lost rank": partial(lost_ranks.check, kind="killed"),
}
"""All checks by name, in the order in which they run: first those in virtual time, then those on real ranks."""
SLOW = (
    *("a backward pass that raises", "several backward passes", "first pass of a static graph", "uneven inputs"),
    *("compressing hooks", "a long run", "deep models", "new interpreters", "state machine", "overlap"),
    *("large gradients", "bucket layout", "list of bucket caps", "compiled modules", "checkpoints"),
    "what training leaves behind",
)
"""Checks that take seconds, which `--quick` leaves out."""


def chosen(only: str | None, baseline: Sequence[EmulatedSchedule] | None, *, quick: bool = False) -> dict[str, Check]:
    """Return the checks in a list of names, or all, or the quick ones; a baseline adds that no schedule is slower.

    Raises ValueError if there is no check of a name.
    """
    every = [name for name in CHECKS if not (quick and name in SLOW)]
    names = every if only is None else [name.strip() for name in only.split(",")]
    if unknown := sorted(set(names) - set(CHECKS)):
        raise ValueError(f"--only: expected names of checks, got {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    checks = {name: check for name, check in CHECKS.items() if name in names}
    return checks if baseline is None else checks | {"baseline": partial(not_slower, baseline=baseline)}


RANDOM = (
    *("any timing", "random programs", "state machine"),
    *("accumulation", "unused parameters", "static graph", "gradient views"),
)
"""Checks of random programs."""


def until(moment: float, checks: Mapping[str, Check], bench: Bench) -> Iterator[tuple[str, Check]]:
    """Yield checks and names; then those of random programs with other seeds, until a moment of `time.monotonic`."""
    yield from checks.items()
    again = [name for name in RANDOM if name in checks]
    while again and time.monotonic() < moment:
        bench.seed += 1
        yield from ((f"{name}{SEEDED}{bench.seed}", checks[name]) for name in again)
