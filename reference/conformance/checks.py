"""Checks: what is asked of a data-parallel class, one by one, fixed scenarios before random programs.

A check that needs a method or an option which the class does not offer reports that it is not supported. Each check
stops at its first finding.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import RankError
from ..launch import RankPool
from . import bodies, comm_hooks, faults, layouts, torch_options, uneven_inputs
from .local_training import (
    FindingError,
    WeakProgramError,
    check_program,
    check_ranks_equal,
    describe_difference,
    same,
)
from .programs import BUFFER_OPTIONS, Kind, Program, Step, Weight, Zero
from .subject import NotSupportedError, Subject

if TYPE_CHECKING:
    from hypothesis import settings

Outcome = Literal["passed", "failed", "not supported"]
TIMEOUT_S = 10.0
"""Time-out of each program on the ranks; a class that hangs is reported then."""
SHRINK_S = 20.0
"""How long smaller programs with the same fault are sought; an error ends the ranks, and new ones take seconds."""
START_TIMEOUT_S = 60.0
"""Time-out of the first program, which starts the ranks."""


class HangError(BaseException):
    """A program hung. Not an `Exception`, so that Hypothesis does not repeat it to find a smaller one."""


class _ShrunkError(BaseException):
    """The time for smaller programs is over. Not an `Exception`, so that Hypothesis stops."""


class Effort(NamedTuple):
    """How much is tried.

    Attributes:
        examples: Random programs of each kind.
        derandomized: Whether every run tries the same ones.
    """

    examples: int
    derandomized: bool


QUICK, FULL = Effort(60, derandomized=True), Effort(1000, derandomized=True)


@dataclass(frozen=True)
class Result:
    """Outcome of a check.

    Attributes:
        check: Name of the check.
        outcome: Whether the class passed.
        message: What was found, or why the check does not apply; empty if it passed.
        program: The program that shows the fault. None: there is none.
    """

    check: str
    outcome: Outcome
    message: str = ""
    program: Program | None = None


class Bench:
    """The subject, the ranks on which it is tried, and the effort.

    Args:
        subject: The class under test.
        pool: Ranks.
        effort: How much is tried.
        against: A class whose results must be equal. None: none.
        scratch: Folder for files of checks.
    """

    def __init__(
        self, subject: Subject, pool: RankPool, effort: Effort, *, against: Subject | None = None, scratch: Path
    ) -> None:
        self.subject, self.pool, self.effort, self.against, self.scratch = subject, pool, effort, against, scratch
        self.methods: frozenset[str] = frozenset()

    def start(self) -> None:
        """Start the ranks and find out which methods the class has."""
        found = self.run(bodies.methods_of, self.subject, timeout_s=START_TIMEOUT_S)
        self.methods = frozenset(found[0])

    def run(self, body: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Run a body on all ranks.

        Raises:
            HangError: It did not end in time.
            RankError: A rank failed.
        """
        first = not self.pool._processes
        try:
            return self.pool.run(body, *arguments, timeout_s=timeout_s or (START_TIMEOUT_S if first else TIMEOUT_S))
        except RankError as error:
            if "still running at the time-out" in str(error):
                raise HangError(str(error)) from None
            raise

    def needs(self, *names: str) -> None:
        """Check that the class has these methods and options.

        Raises:
            NotSupportedError: It lacks one.
        """
        for name in names:
            if name not in self.methods and name not in self.subject.options:
                raise NotSupportedError(f"it has no {name}")

    def try_program(self, program: Program) -> None:
        """Run a program and compare it with local training.

        Raises:
            FaultyProgramError: The class is wrong, or a rank failed.
            HangError: It did not end in time.
            WeakProgramError: The program could not show a fault.
        """
        try:
            check_program(self.subject, program, _Guarded(self))  # type: ignore[arg-type]
        except (FindingError, RankError) as error:
            raise FaultyProgramError(str(error), program) from None

    def try_random(self, **how: Any) -> None:
        """Run random programs, and shrink the first one that shows a fault; arguments as for `programs`.

        Raises:
            FaultyProgramError: The class is wrong.
        """
        from hypothesis import assume, given

        from .strategies import programs

        found: list[tuple[FaultyProgramError, float]] = []

        def run(program: Program) -> None:
            if found and time.monotonic() - found[0][1] > SHRINK_S:
                raise _ShrunkError
            try:
                self.try_program(program)
            except WeakProgramError:
                assume(condition=False)
            except FaultyProgramError as fault:
                found.append((fault, time.monotonic()))
                raise

        try:
            self.settings()(given(programs(self.pool.world_size, **how))(run))()
        except _ShrunkError:
            raise found[-1][0] from None

    def settings(self, **further: Any) -> "settings":
        """Return settings of Hypothesis for a random check; `further` replaces single ones."""
        from hypothesis import HealthCheck, Phase, settings

        usual: dict[str, Any] = {
            "max_examples": self.effort.examples,
            "derandomize": self.effort.derandomized,
            "deadline": None,
            "database": None,
            "phases": [Phase.generate, Phase.shrink],
            "report_multiple_bugs": False,
            "suppress_health_check": list(HealthCheck),
        }
        return settings(**usual | further)


class _Guarded(NamedTuple):
    """A pool whose runs have the time-out of conformance checks."""

    bench: Bench

    @property
    def world_size(self) -> int:
        return self.bench.pool.world_size

    def run(self, *arguments: Any) -> list[Any]:
        return self.bench.run(*arguments)


class FaultyProgramError(Exception):
    """A program that shows a fault.

    Attributes:
        program: The program.
    """

    def __init__(self, message: str, program: Program) -> None:
        super().__init__(message)
        self.program = program


Check = Callable[[Bench], None]
"""Returns if the class passed; raises FindingError, FaultyProgramError, RankError, HangError or NotSupportedError."""


def run_check(name: str, check: Check, bench: Bench) -> Result:
    """Run one check."""
    try:
        check(bench)
    except NotSupportedError as reason:
        return Result(name, "not supported", str(reason))
    except FaultyProgramError as fault:
        return Result(name, "failed", first_lines(str(fault)), fault.program)
    except (FindingError, RankError, HangError) as fault:
        return Result(name, "failed", first_lines(str(fault)))
    return Result(name, "passed")


def first_lines(message: str) -> str:
    """Shorten the message of a failed rank: its cause without the traceback."""
    return message.partition(" Traceback:\n")[0]


# Fixed scenarios

W = tuple[Weight, ...]
PLAIN: W = (Weight((2, 3)), Weight((4,), depth=2), Weight((5,)), Weight((3, 2)))


def program_of(
    weights: W,
    kinds: Sequence[Kind],
    world_size: int,
    *,
    used: Callable[[int, int], Sequence[int]] | None = None,
    **further: Any,
) -> Program:
    """Make a program whose steps use all weights, in an order that differs from rank to rank.

    Args:
        weights: The model.
        kinds: Kind of each step.
        world_size: Number of ranks.
        used: Returns what a step uses on a rank. None: everything.
        further: Other fields of the program.
    """

    def order(_step: int, rank: int) -> Sequence[int]:
        indices = range(len(weights))
        return [*indices[rank % len(weights) :], *indices[: rank % len(weights)]]

    steps = tuple(
        Step(
            kind,
            tuple(tuple((used or order)(number, rank)) for rank in range(world_size)),
            tuple(1 + (rank + number) % 3 for rank in range(world_size)),
        )
        for number, kind in enumerate(kinds)
    )
    return Program(weights=weights, steps=steps, **further)


def one_weight(bench: Bench) -> None:
    """One parameter, three iterations."""
    bench.try_program(program_of((Weight((3,)),), ["train"] * 3, bench.pool.world_size))


def construction(bench: Bench) -> None:
    """Ranks that were initialised differently start from rank 0's parameters and buffers."""
    program = program_of(PLAIN, ["evaluate"], bench.pool.world_size, buffer=True)
    seen = bench.run(bodies.after_construction, bench.subject, program)
    check_ranks_equal([one for one, _ in seen], iteration=0)
    own = seen[0][1]
    for name, value in seen[0][0].parameters.items():
        if not same(value, own[name]):
            raise FindingError(f"parameter {name!r} of rank 0 changed: {describe_difference(value, own[name])}")


def bucket_caps(bench: Bench) -> None:
    """Every bucket cap gives the same result, from one parameter a bucket to a single bucket."""
    for cap_mb in (1e-6, 5e-5, 25.0):
        kinds: list[Kind] = ["train"] * 4
        bench.try_program(program_of(PLAIN, kinds, bench.pool.world_size, options={"bucket_cap_mb": cap_mb}))


def special_parameters(bench: Bench) -> None:
    """Frozen, tied, empty and scalar parameters, and parameters of two dtypes."""
    weights = (
        Weight((3,)),
        Weight((2,), dtype="float64", depth=1),
        Weight((), frozen=True),
        Weight((3,), tied_to=0),
        Weight((0,)),
        Weight(()),
        Weight((2, 2), dtype="float64"),
    )
    for cap_mb in (1e-6, 25.0):
        program = program_of(weights, ["train"] * 3, bench.pool.world_size, options={"bucket_cap_mb": cap_mb})
        bench.try_program(program)


def optimizers(bench: Bench) -> None:
    """SGD with momentum and Adam; the learning rate changes, evaluation in between."""
    for optimizer in ("sgd", "adam"):
        kinds: list[Kind] = ["train", "evaluate", "train", "change_lr", "train"]
        further: dict[str, Any] = {"optimizer": optimizer, "options": {"bucket_cap_mb": 5e-5}}
        bench.try_program(program_of(PLAIN, kinds, bench.pool.world_size, **further))


def kept_gradients(bench: Bench) -> None:
    """Gradients that are not cleared, or set to zeros, before the next pass."""
    cleared: tuple[Zero, ...] = ("zeros", "keep")
    for zero in cleared:
        program = program_of(PLAIN, ["train"] * 3, bench.pool.world_size, options={"bucket_cap_mb": 5e-5})
        steps = tuple(replace(step, zero=zero) for step in program.steps)
        bench.try_program(replace(program, steps=steps))


def random_programs(bench: Bench) -> None:
    """Random models, caps, ready orders and steps."""
    bench.try_random()


# Capabilities


def _accumulation(world_size: int, **options: Any) -> Program:
    kinds: list[Kind] = ["accumulate", "accumulate", "train", "train", "accumulate", "train"]
    program = program_of(PLAIN, kinds, world_size, options={"bucket_cap_mb": 5e-5} | options)
    zeros: list[Zero] = ["none", "keep", "keep", "none", "none", "keep"]
    steps = (replace(step, zero=zero) for step, zero in zip(program.steps, zeros, strict=True))
    return replace(program, steps=tuple(steps))


def accumulation(bench: Bench) -> None:
    """Several passes under no_sync, then one with averaging, equal one large batch."""
    bench.needs("no_sync")
    bench.try_program(_accumulation(bench.pool.world_size))
    bench.try_random(kinds=("train", "accumulate"), keep=True)


def unused_parameters(bench: Bench) -> None:
    """Ranks use different parameters, and some parameter is used by no rank."""
    bench.needs("find_unused_parameters")
    options = {"find_unused_parameters": True, "bucket_cap_mb": 5e-5}
    world_size = bench.pool.world_size

    def one_each(step: int, rank: int) -> list[int]:
        return [0, 1 + (rank + step) % 2]  # the last one is never used

    bench.try_program(program_of(PLAIN, ["train"] * 4, world_size, used=one_each, options=options))
    from hypothesis import strategies as st

    bench.try_random(any_use=True, options=st.sampled_from(_with_views(bench, {"find_unused_parameters": True})))


def static_graph(bench: Bench) -> None:
    """A graph that never changes, with a parameter that is never used."""
    bench.needs("static_graph")
    world_size = bench.pool.world_size
    kinds: list[Kind] = ["train"] * 4
    if "no_sync" in bench.methods:
        kinds += ["accumulate", "train", "train"]  # not at first, where torch's class fails
    zeros: list[Zero] = ["none", "none", "none", "none", "none", "keep", "none"]
    everywhere: list[Callable[[int, int], list[int]]] = [lambda *_: [2, 0, 1], lambda *_: [3, 0, 1]]
    for used in (*everywhere, lambda _step, rank: [2, 0] if rank else [1, 0]):
        for cap_mb in (5e-5, 25.0):
            for options in _with_views(bench, {"static_graph": True, "bucket_cap_mb": cap_mb}):
                program = program_of(PLAIN, kinds, world_size, used=used, options=options)
                steps = (replace(step, zero=zero) for step, zero in zip(program.steps, zeros, strict=False))
                bench.try_program(replace(program, steps=tuple(steps)))
    from hypothesis import strategies as st

    every = st.sampled_from(_with_views(bench, {"static_graph": True}))
    bench.try_random(static=True, kinds=("train", "evaluate", "change_lr"), options=every)


def _with_views(bench: Bench, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return options without and, if the class has them, with gradients that are views of the buckets."""
    views = "gradient_as_bucket_view" in bench.subject.options
    return [options, {**options, "gradient_as_bucket_view": True}] if views else [options]


def gradient_views(bench: Bench) -> None:
    """Gradients that are views of the buckets."""
    bench.needs("gradient_as_bucket_view")
    options = {"gradient_as_bucket_view": True}
    world_size = bench.pool.world_size
    for cap_mb in (5e-5, 25.0):
        every = {"bucket_cap_mb": cap_mb, **options}
        bench.try_program(program_of(PLAIN, ["train"] * 4, world_size, options=every))
        if "no_sync" in bench.methods:
            bench.try_program(_accumulation(world_size, **every))
    from hypothesis import strategies as st

    bench.try_random(options=st.just(options))


def buffers(bench: Bench) -> None:
    """Before each forward pass, all ranks get rank 0's buffers, unless an option turns that off."""
    names = [name for name in BUFFER_OPTIONS if name in bench.subject.options]
    if not names:
        raise NotSupportedError("it has neither broadcast_buffers nor forward_sync_buffers")
    world_size = bench.pool.world_size
    kinds: list[Kind] = ["train", "train", "evaluate", "forward", "train", "train"]
    if "no_sync" in bench.methods:
        kinds[2:2] = ["accumulate", "accumulate", "train"]
    for options in ({}, {names[0]: False}):
        program = program_of(PLAIN, kinds, world_size, buffer=True, options=options)
        steps = (replace(step, zero="keep") for step in program.steps)
        bench.try_program(replace(program, steps=tuple(steps)))


def plans(bench: Bench) -> None:
    """Explicit buckets in any order."""
    bench.needs("plan")
    for plan in ([[0], [3], [1, 2]], [[3, 1, 0, 2]], [[2], [1], [0], [3]]):
        bench.try_program(program_of(PLAIN, ["train"] * 3, bench.pool.world_size, options={"plan": plan}))
        wanted = tuple(map(tuple, plan))
        for got in bench.run(bodies.layout_of, bench.subject, (6, 4, 5, 6), {"plan": plan}, 3):
            if got not in (wanted, None):
                raise FindingError(f"plan {wanted}: after 3 iterations the buckets are {got}")


def real_models(bench: Bench) -> None:
    """Convolutions with batch norm, an LSTM, an embedding, shared layers: equal up to the rounding of the average."""
    for name in bodies.REAL_MODELS:
        problem = next((one for one in bench.run(bodies.compare_real, bench.subject, name, {}) if one), None)
        if problem:
            raise FindingError(f"{name}: {problem}")


def sparse_gradients(bench: Bench) -> None:
    """Embeddings and bags of embeddings with sparse gradients; a class may refuse them with an error."""
    for name in bodies.SPARSE_MODELS:
        try:
            problems = bench.run(bodies.compare_real, bench.subject, name, {})
        except RankError as error:
            raise NotSupportedError(f"it refuses them: {first_lines(str(error))}") from None
        for problem in problems:
            if problem:
                raise FindingError(f"{name}: {problem}")


def special_values(bench: Bench) -> None:
    """NaN and infinity on one rank come out as from a local average, and nothing else changes."""
    for problem in bench.run(bodies.compare_special_values, bench.subject):
        if problem:
            raise FindingError(problem)


def bucket_layout(bench: Bench) -> None:
    """Buckets follow one of the two rules: close a bucket when it reaches the cap, or keep it at most the cap."""
    layouts.check(bench)


def same_as_another(bench: Bench) -> None:
    """The same gradients, missing gradients and errors as another class, on random programs."""
    if bench.against is None:
        raise NotSupportedError("--against names no other class")
    layouts.check_against(bench, bench.against)


def a_failing_rank(bench: Bench) -> None:
    """An error in one rank's backward pass reaches the caller in time."""
    faults.check(bench, "raises", bodies.FAULTS if bench.effort == FULL else bodies.FAULTS[1:2])


def a_lost_rank(bench: Bench) -> None:
    """A killed rank ends the others with an error in time, wherever it dies."""
    faults.check(bench, "killed", bodies.FAULTS if bench.effort == FULL else bodies.FAULTS[1:2])


def state_machine(bench: Bench) -> None:
    """Any sequence of training steps, against plain lists."""
    from .state_machine import check

    check(bench)


CHECKS: Mapping[str, Check] = {
    "one weight": one_weight,
    "construction": construction,
    "bucket caps": bucket_caps,
    "special parameters": special_parameters,
    "optimizers": optimizers,
    "kept gradients": kept_gradients,
    "buffers": buffers,
    "real models": real_models,
    "special values": special_values,
    **torch_options.CHECKS,
    "plans": plans,
    **comm_hooks.CHECKS,
    **uneven_inputs.CHECKS,
    "sparse gradients": sparse_gradients,
    "bucket layout": bucket_layout,
    "accumulation": accumulation,
    "unused parameters": unused_parameters,
    "static graph": static_graph,
    "gradient views": gradient_views,
    "same as another": same_as_another,
    "random programs": random_programs,
    "state machine": state_machine,
    "a failing rank": a_failing_rank,
    "a lost rank": a_lost_rank,
}
"""All checks on real ranks, by name, in the order in which they run."""
