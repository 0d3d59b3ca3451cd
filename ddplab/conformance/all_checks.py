"""Checks: what is asked of a data-parallel class, one by one, fixed scenarios before random programs.

A check that needs a method or an option which the class does not offer reports that it is not supported. Each check
stops at its first finding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reference.errors import RankError

from . import (
    another_class,
    backward_passes,
    bucket_layouts,
    comm_hooks,
    lost_ranks,
    number_formats,
    random_step_sequences,
    real_models,
    several_modules,
    uneven_inputs,
    unused_parameters,
)
from . import groups_and_ignored_parameters as groups
from .check_runner import VIEWS, Bench, Check, first_lines
from .class_under_test import NotSupportedError
from .local_training import HABITS, FindingError, differences
from .overlap import late_launches, schedules_of
from .random_timing import check_timing
from .training_programs import BUFFER_OPTIONS, Kind, Program, ProgramStep, Weight, Zero, before_and_after_construction

# Fixed scenarios

W = tuple[Weight, ...]
PLAIN: W = (Weight((2, 3)), Weight((4,), depth=2), Weight((5,)), Weight((3, 2)))


SPECIAL: W = (
    Weight((3,)),
    Weight((2,), dtype="float64", depth=1),
    Weight((), frozen=True),
    Weight((3,), tied_to=0),
    Weight((0,)),
    Weight(()),
    Weight((2, 2), dtype="float64"),
    Weight((3, 4), layout="transposed"),
    Weight((2, 3, 2, 2), layout="channels last"),
)
"""Parameters of which each has something unusual."""


def program_of(
    weights: W,
    kinds: Sequence[Kind],
    world_size: int,
    *,
    used: Callable[[int, int], Sequence[int]] | None = None,
    zeros: Sequence[Zero] = (),
    **further: Any,
) -> Program:
    """Make a program whose steps use all weights, in an order that differs from rank to rank.

    Args:
        weights: The model.
        kinds: Kind of each step.
        world_size: Number of ranks.
        used: Returns what a step uses on a rank. None: everything.
        zeros: What happens to the gradients before each step. Empty: they are set to None.
        further: Other fields of the program.
    """

    def order(_step: int, rank: int) -> Sequence[int]:
        indices = range(len(weights))
        return [*indices[rank % len(weights) :], *indices[: rank % len(weights)]]

    steps = tuple(
        ProgramStep(
            kind,
            tuple(tuple((used or order)(number, rank)) for rank in range(world_size)),
            tuple(1 + (rank + number) % 3 for rank in range(world_size)),
            zeros[number] if zeros else "none",
        )
        for number, kind in enumerate(kinds)
    )
    return Program(weights=weights, steps=steps, **further)


def overlap(bench: Bench) -> None:
    """All-reduces of several buckets are launched in one order, the first ones before the backward pass ends."""
    try:
        bench.schedules = list(schedules_of(bench.subject))
    except RankError as error:
        if "modelled network: expected" in str(error) or "not implemented" in str(error).lower():
            raise NotSupportedError(f"virtual time: {error}") from None
        raise
    for schedule in bench.schedules:
        if problem := late_launches(schedule):
            raise FindingError(f"{schedule.model} on {schedule.network}: {problem}")


def one_weight(bench: Bench) -> None:
    """One parameter, three iterations."""
    bench.try_program(program_of((Weight((3,)),), ["train"] * 3, bench.world_size))


def construction(bench: Bench) -> None:
    """Ranks that were initialised differently start from rank 0's parameters and buffers."""
    has_buffers = any(name in bench.subject.options for name in BUFFER_OPTIONS)
    program = program_of(SPECIAL, ["evaluate"], bench.world_size, buffer=has_buffers)
    seen = bench.run(before_and_after_construction, bench.subject, program)
    (own, first), *_ = seen
    for rank, (_, after) in enumerate(seen):
        for kind, name, how in differences(after, first):
            raise FindingError(f"iteration 0: {kind} {name!r} on rank {rank} is not that of rank 0: {how}")
    for kind, name, how in differences(first, own):
        raise FindingError(f"{kind} {name!r} of rank 0 changed: {how}")


def bucket_caps(bench: Bench) -> None:
    """Every bucket cap gives the same result, from one parameter a bucket to a single bucket."""
    for cap_mb in (1e-6, 5e-5, 25.0):
        kinds: list[Kind] = ["train"] * 4
        bench.try_program(program_of(PLAIN, kinds, bench.world_size, options={"bucket_cap_mb": cap_mb}))


def special_parameters(bench: Bench) -> None:
    """Frozen, tied, empty and scalar parameters, of two dtypes, in any order of memory, and of subclasses of Tensor.

    A class may refuse a subclass with an error.
    """
    for cap_mb in (1e-6, 25.0):
        program = program_of(SPECIAL, ["train"] * 3, bench.world_size, options={"bucket_cap_mb": cap_mb})
        bench.try_program(program)
    bench.averages_or_raises(real_models.subclassed_parameters)


def optimizers(bench: Bench) -> None:
    """SGD with momentum and Adam; the learning rate changes, evaluation in between."""
    for optimizer in ("sgd", "adam"):
        kinds: list[Kind] = ["train", "evaluate", "train", "change_lr", "train"]
        further: dict[str, Any] = {"optimizer": optimizer, "options": {"bucket_cap_mb": 5e-5}}
        bench.try_program(program_of(PLAIN, kinds, bench.world_size, **further))


def kept_gradients(bench: Bench) -> None:
    """Gradients that are not cleared, or set to zeros, also in another order of memory, before the next pass."""
    cleared: tuple[Zero, ...] = ("zeros", "restrided", "keep")
    for zero in cleared:
        options = {"bucket_cap_mb": 5e-5}
        bench.try_program(program_of(PLAIN, ["train"] * 3, bench.world_size, zeros=[zero] * 3, options=options))


def large_gradients(bench: Bench) -> None:
    """Gradients large enough that a class may copy each alone, between small ones."""
    shapes = ((4,), (150, 150), (3,), (300, 300), (2,), (2, 2))
    weights = tuple(Weight(shape) for shape in shapes)
    world_size = bench.world_size
    orders = tuple(tuple((index * 5 + rank) % len(weights) for index in range(6)) for rank in range(world_size))
    rows = (1,) * world_size
    for options in bench.variants({"bucket_cap_mb": 25.0}, VIEWS):
        bench.try_program(Program(weights, (ProgramStep("train", orders, rows),) * 3, options))
    if "find_unused_parameters" in bench.subject.options:
        some = tuple((rank % 2, 2, 3 + rank % 2) for rank in range(world_size))
        for options in bench.variants({"bucket_cap_mb": 25.0, "find_unused_parameters": True}, VIEWS):
            bench.try_program(Program(weights, (ProgramStep("train", some, rows),) * 3, options))


# Capabilities


def _accumulation(world_size: int, **options: Any) -> Program:
    kinds: list[Kind] = ["accumulate", "accumulate", "train", "train", "accumulate", "train"]
    zeros: list[Zero] = ["none", "keep", "keep", "none", "none", "keep"]
    return program_of(PLAIN, kinds, world_size, zeros=zeros, options={"bucket_cap_mb": 5e-5} | options)


def accumulation(bench: Bench) -> None:
    """Several passes under no_sync, then one with averaging, equal one large batch."""
    bench.needs("no_sync")
    bench.try_program(_accumulation(bench.world_size))
    bench.try_random(kinds=("train", "accumulate"), keep=True)


def unused(bench: Bench) -> None:
    """Ranks use different parameters, and some parameter is used by no rank."""
    bench.needs("find_unused_parameters")
    options = {"find_unused_parameters": True, "bucket_cap_mb": 5e-5}
    world_size = bench.world_size

    def one_each(step: int, rank: int) -> list[int]:
        return [0, 1 + (rank + step) % 2]  # the last one is never used

    bench.try_program(program_of(PLAIN, ["train"] * 4, world_size, used=one_each, options=options))
    from hypothesis import strategies as st

    bench.try_random(any_use=True, options=st.sampled_from(bench.variants({"find_unused_parameters": True}, VIEWS)))


def static_graph(bench: Bench) -> None:
    """A graph that never changes, with a parameter that is never used."""
    bench.needs("static_graph")
    world_size = bench.world_size
    kinds: list[Kind] = ["train"] * 4
    if "no_sync" in bench.methods:
        kinds += ["accumulate", "train", "train"]  # not at first, where torch's class fails
    zeros: list[Zero] = ["none", "none", "none", "none", "none", "keep", "none"]
    everywhere: list[Callable[[int, int], list[int]]] = [lambda *_: [2, 0, 1], lambda *_: [3, 0, 1]]
    for used in (*everywhere, lambda _step, rank: [2, 0] if rank else [1, 0]):
        for cap_mb in (5e-5, 25.0):
            for options in bench.variants({"static_graph": True, "bucket_cap_mb": cap_mb}, VIEWS):
                bench.try_program(program_of(PLAIN, kinds, world_size, used=used, zeros=zeros, options=options))
    from hypothesis import strategies as st

    every = st.sampled_from(bench.variants({"static_graph": True}, VIEWS))
    bench.try_random(static=True, kinds=("train", "evaluate", "change_lr"), options=every)


def gradient_views(bench: Bench) -> None:
    """Gradients that are views of the buckets."""
    bench.needs("gradient_as_bucket_view")
    options = {"gradient_as_bucket_view": True}
    world_size = bench.world_size
    for cap_mb in (5e-5, 25.0):
        every = {"bucket_cap_mb": cap_mb, **options}
        bench.try_program(program_of(PLAIN, ["train"] * 4, world_size, options=every))
        if "no_sync" in bench.methods:
            bench.try_program(_accumulation(world_size, **every))
    from hypothesis import strategies as st

    bench.try_random(options=st.just(options))


def buffers(bench: Bench) -> str:
    """Before synchronised forward passes, all ranks get rank 0's buffers, unless an option turns that off.

    Returns:
        When the class broadcasts them.
    """
    names = [name for name in BUFFER_OPTIONS if name in bench.subject.options]
    if not names:
        raise NotSupportedError("it has neither broadcast_buffers nor forward_sync_buffers")
    world_size = bench.world_size
    kinds: list[Kind] = ["train", "train", "evaluate", "forward", "train", "train"]
    if "no_sync" in bench.methods:
        kinds[2:2] = ["accumulate", "accumulate", "train"]
    habits = list(HABITS)
    for options in ({}, {names[0]: False}):
        zeros: list[Zero] = ["keep"] * len(kinds)
        habits = bench.try_program(
            program_of(PLAIN, kinds, world_size, zeros=zeros, buffer=True, options=options), habits
        )
    return f"broadcast {habits[0]}"


def plans(bench: Bench) -> None:
    """Explicit buckets in any order."""
    bench.needs("plan")
    for plan in ([[0], [3], [1, 2]], [[3, 1, 0, 2]], [[2], [1], [0], [3]]):
        bench.try_program(program_of(PLAIN, ["train"] * 3, bench.world_size, options={"plan": plan}))
        wanted = tuple(map(tuple, plan))
        for got in bucket_layouts.layouts(bench, (6, 4, 5, 6), {"plan": plan}):
            if got not in (wanted, None):
                raise FindingError(f"plan {wanted}: after 3 iterations the buckets are {got}")


def real(bench: Bench) -> None:
    """Convolutions with batch norm, an LSTM, an embedding, shared layers: equal up to the rounding of the average."""
    for name in real_models.REAL_MODELS:
        problem = next((one for one in bench.run(real_models.compare_real, bench.subject, name) if one), None)
        if problem:
            raise FindingError(f"{name}: {problem}")


def sparse_gradients(bench: Bench) -> None:
    """Embeddings and bags of embeddings with sparse gradients, which only some ranks may have, or with inputs left.

    A class may refuse them with an error.
    """
    for name in real_models.SPARSE_MODELS:
        try:
            problems = bench.run(real_models.compare_real, bench.subject, name)
        except RankError as error:
            raise NotSupportedError(f"it refuses them: {first_lines(str(error))}") from None
        for problem in problems:
            if problem:
                raise FindingError(f"{name}: {problem}")
    if "find_unused_parameters" in bench.subject.options:
        bench.averages_or_raises(unused_parameters.sparse_on_some_ranks)
    if "join" in bench.methods:
        bench.averages_or_raises(uneven_inputs.sparse_under_join)


CHECKS: Mapping[str, Check] = {
    "any timing": check_timing,  # first: in virtual time, a rank that waits for ever is named at once
    "overlap": overlap,
    "one weight": one_weight,
    "construction": construction,
    "bucket caps": bucket_caps,
    "special parameters": special_parameters,
    "optimizers": optimizers,
    "kept gradients": kept_gradients,
    "buffers": buffers,
    "real models": real,
    "special values": number_formats.check_special_values,
    "large gradients": large_gradients,
    "repeated forward passes": backward_passes.check_repeated_forward,
    "nested no_sync": backward_passes.check_nested_no_sync,
    "process group": groups.check_group,
    "ignored parameters": groups.check_ignored,
    "nested outputs": unused_parameters.check_outputs,
    "untouched gradients": unused_parameters.check_untouched,
    "mixed precision": number_formats.check_mixed_precision,
    "checkpoints": backward_passes.check_checkpoints,
    "skipped all-reduces": unused_parameters.check_skipped,
    "list of bucket caps": bucket_layouts.check_list,
    "several backward passes": backward_passes.check_several,
    "a backward pass that raises": backward_passes.check_raising,
    "first pass of a static graph": backward_passes.check_static_first,
    "several modules": several_modules.check,
    "plans": plans,
    "comm hooks": comm_hooks.check,
    "compressing hooks": comm_hooks.check_compressing,
    "uneven inputs": uneven_inputs.check,
    "sparse gradients": sparse_gradients,
    "bucket layout": bucket_layouts.check,
    "accumulation": accumulation,
    "unused parameters": unused,
    "static graph": static_graph,
    "gradient views": gradient_views,
    "same as another": another_class.check,
    "random programs": Bench.try_random,
    "state machine": random_step_sequences.check,
    "a failing rank": lost_ranks.check_failing,
    "a lost rank": lost_ranks.check_lost,
}
"""All checks by name, in the order in which they run: first those in virtual time, then those on real ranks."""
