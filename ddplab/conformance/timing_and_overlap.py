"""Virtual time: a class must not depend on timing, and must overlap communication with the backward pass.

Any timing: collectives take any time and end in any order, between ranks that compute for any time. A seed determines
the time of each collective and gradient, so a failure repeats exactly, and a rank that hangs is named at once.

Overlap: when the class launches its all-reduces, and how much communication is exposed, for several models on several
networks. There is no clock and so no noise: a schedule that is slower by a nanosecond is slower. `compare` names the
first bucket that is late.
"""

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._C._distributed_c10d import Reducer as TorchReducer

from ..emulation.emulate import emulate
from ..emulation.modelled_network import ModelledGroup, ModelledNetwork, NotModelledError, run_on_network
from ..emulation.virtual_time import NoTurnError, VirtualRank, VirtualTime
from ..reference.errors import RankError
from ..reference.files.reading import Schema, read_schema
from ..reference.files.value_ranges import Bytes, Moment, Nanoseconds
from ..reference.files.writing import write_atomically
from ..reference.recording.reducer_observer import Future
from ..reference.trace import Iteration, Parameter, RankTrace, Trace, Workload
from ..simulator import Prediction
from ..simulator.engines.event_replay import Cluster, CollectiveCost
from ..simulator.fabric import Fabric, LinkShare
from ..simulator.schedule.schedule import Compute
from .check_outcomes import is_unmatched
from .check_runner import QUICK, Bench, HangError, cause_of, run_alone
from .class_under_test import NotSupportedError, Subject
from .local_training import FindingError, findings, run_locally
from .training_programs import PLAIN, Net, Program, Script, Seen, Weight, in_one_order, program_of

# Any timing

DURATIONS_NS = (0, 1, 10, 1000)
"""Times of collectives, and of gradients; so that any of them may be the longest."""
MOST_AT_A_TIME = 3
SLOWEST, YEAR_NS = -1, 365 * 24 * 3600 * 10**9
"""Seed with which each collective takes a year: a class that waits for a limited time must raise an error."""
WORLD_SIZES = (1, 2, 4, 5, 6, 7, 8, 12, 16)
"""Further numbers of ranks; 1/7 rounds so much that averages are not exact."""
MORE_THAN_A_BYTE = 256
"""Number of ranks that a byte cannot count: for classes that count uses, if a rank has not used all parameters."""

IN_ONE_ORDER = "wrong with ready orders that differ between ranks, right with one order"
HAZARD = "each rank sends in its own ready order, so ranks whose orders differ launch different collectives"
SEARCH = "find_unused_parameters"
LARGE, LATE_FIRST = (Weight((3,)), Weight((800, 800))), (5, 6)
"""Weights that a class may send in several pieces, and seeds with which the first piece ends after the last one."""


@contextmanager
def as_modelled() -> Iterator[None]:
    """Around virtual time: what the modelled network does not have is "not supported"."""
    try:
        yield
    except RankError as error:
        if isinstance(error.__cause__, NotModelledError):
            raise NotSupportedError(f"virtual time: {cause_of(error)}") from None
        raise


@as_modelled()
def run_in_virtual_time(subject: Subject, program: Program, zero: float = 0.0) -> list[list[Seen]]:
    """Run a program on ranks in virtual time, each a thread; returns what each rank saw, by rank and step.

    Gradients that are all zero become `zero`. Raises RankError if a rank raised an error, the ranks wait for each
    other, or launch different collectives; it says if the class keeps state for all ranks, or skips such gradients.
    """
    chosen, ranks = random.Random(program.seed), range(len(program.steps[0].used))
    zeros, before = list[Tensor](), subject.state()
    cluster = partial(Cluster, concurrency=chosen.randint(1, MOST_AT_A_TIME))
    time: VirtualTime[list[Seen]] = VirtualTime(cluster, ranks)
    durations_ns = (YEAR_NS,) if program.seed == SLOWEST else DURATIONS_NS
    network = ModelledNetwork(time, ranks, lambda _: CollectiveCost(chosen.choice(durations_ns), LinkShare()))
    try:
        with warnings.catch_warnings():  # a class may choose the order of its averages in memory
            warnings.filterwarnings("ignore", message="grad and param do not obey")
            return run_on_network(time, network, partial(_train, subject, program, zero, zeros))
    except RankError as error:
        if changed := [name for name, parts in subject.state().items() if parts != before.get(name)]:
            error.cause += f"; class attribute {', '.join(changed)} is state that the ranks, here threads, share"
        elif zeros and not zero:
            with suppress(RankError):
                run_in_virtual_time(subject, program, zero=1.0)
                error.cause += "; with ones in gradients of zeros, all ranks go on: does a rank skip what is zero?"
        raise


def _train(
    subject: Subject, program: Program, zero: float, zeros: list[Tensor], rank: VirtualRank, group: ModelledGroup
) -> list[Seen]:
    chosen = random.Random(f"{program.seed} {rank.rank}")

    def computed(parameter: Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.any():
            zeros.append(parameter.grad.fill_(zero))
        rank.compute(chosen.choice(DURATIONS_NS), Compute("backward"))

    net = Net(program, rank.rank)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(computed)
    script = Script(subject, program, rank.rank, group.size(), net)
    if isinstance(getattr(script.wrapped, "reducer", None), TorchReducer):
        _wait_after_backward(script.wrapped, group)
    return list(script.run_all())


def _wait_after_backward(wrapped: nn.Module, group: ModelledGroup) -> None:
    """Let a rank wait for its all-reduces right before torch's reducer does, in C++, where no virtual time passes."""
    awaited: list[Future] = []
    queue = torch.autograd.Variable._execution_engine.queue_callback
    group.after_launch = lambda _number, future: awaited.append(future)

    def wait() -> None:
        while awaited:
            awaited.pop(0).wait()

    def after_forward(_wrapped: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _gradient: queue(wait))

    wrapped.register_forward_hook(after_forward)


def try_timing(bench: Bench, program: Program) -> None:
    """Run a program in virtual time, on as many ranks as it is for, and compare it with local training.

    Raises FindingError if they differ or a rank failed, and HangError if a rank did not come back.
    """
    if bench.subject.one_order:
        program = in_one_order(program)
    ranks = len(program.steps[0].used)
    expected = run_locally(program, ranks)
    at_fault = f"with seed {program.seed} in virtual time, on {ranks} rank{'s' * (ranks > 1)}"
    at_fault += ", where each collective takes a year" * (program.seed == SLOWEST)
    try:
        seen = run_alone(bench, run_in_virtual_time, bench.subject, program)
        rtol = 0.0 if ranks == bench.world_size else 1e-6
        _, problem = next(findings(seen, expected, program, bench.subject.tolerance, rtol), (0, ""))
    except NoTurnError as error:
        raise HangError(cause_of(error)) from None  # another program would take as long
    except RankError as error:
        if program.seed == SLOWEST and not is_unmatched(error):  # its wait has a limit, and the script learns of it
            return
        raise FindingError(f"{at_fault}: {cause_of(error)}", program) from error
    if problem:
        raise FindingError(f"{at_fault}: {problem}", program)


def check_timing(bench: Bench) -> None:
    """Results never depend on when collectives end and gradients become ready, on any number of ranks.

    If the results are right in one ready order, later checks have that order on all ranks. Adapters run on real ranks
    instead of in virtual time.
    """

    def try_all() -> None:
        search = {name: True for name in (SEARCH,) if name in bench.offer.options}
        if bench.offer.is_adapter:
            bench.try_program(program_of(PLAIN, ["train"] * 3, bench.world_size))
            return
        for size in (bench.world_size, *WORLD_SIZES):
            try_timing(bench, program_of(PLAIN, ["train"] * 2, size, options={"bucket_cap_mb": 5e-5} | search))
        if search and bench.effort > QUICK:
            how: dict[str, Any] = {"used": lambda _, rank: [rank % 2, 1 - rank % 2], "options": search}
            try_timing(bench, program_of(PLAIN[:3], ["train"], MORE_THAN_A_BYTE, **how))
        try_timing(bench, program_of(PLAIN, ["train"], bench.world_size, seed=SLOWEST))
        for seed in LATE_FIRST:
            try_timing(bench, program_of(LARGE, ["train"], bench.world_size, seed=seed))
        bench.try_random(partial(try_timing, bench), examples=bench.effort)

    as_given = bench.subject
    faults = (FindingError, HangError) if bench.offer.is_adapter else (FindingError,)
    try:
        try:
            try_all()
        except faults as fault:
            bench.subject = replace(as_given, one_order=True)
            try:
                try_all()
            except faults:
                bench.subject = as_given
                bench.pool.close()  # a class may keep state of the failed run in its rank
                raise fault from fault.__cause__
            told = HAZARD if is_unmatched(fault) else IN_ONE_ORDER
            raise FindingError(f"{told}: {fault}", getattr(fault, "program", None)) from fault.__cause__
    except HangError as error:
        if bench.offer.is_adapter:
            raise
        bench.not_in_virtual_time = str(error)
        raise NotSupportedError(str(error)) from None


# Overlap

US, MS = 1_000, 1_000_000
OF_GRADIENTS = ("all_reduce", "second_all_reduce", "join")
"""Kinds of collectives that average gradients; those after the backward pass look like the collectives of Join."""
CAP_MB = 5.0
"""Bucket cap of the models, which gives each of them several buckets."""


class Network(NamedTuple):
    """A network to emulate; each rank has a link to a ring."""

    name: str
    world_size: int
    latency_ns: int
    bytes_per_s: float


NETWORKS = (
    Network("8 ranks at 2400 Gbit/s", 8, 3 * US, 300e9),
    Network("64 ranks at 100 Gbit/s", 64, 10 * US, 12.5e9),
    Network("16 ranks at 10 Gbit/s", 16, 20 * US, 1.25e9),
)


def trace_of_layers(
    model: str,
    shapes: Sequence[tuple[int, ...]],
    forward_ns: int,
    gap_ns: int,
    *,
    dtypes: Sequence[str] | None = None,
    ready_order: Sequence[int] | None = None,
) -> Trace:
    """Make the trace of a model whose gradients become ready one after the other, each `gap_ns` after the one before.

    `dtypes` is the dtype of each parameter; None: float32. `ready_order` has the parameter indices in ready order,
    without those that are never used; None: the last parameter's gradient comes first.
    """
    parameters = []
    for number, (shape, dtype) in enumerate(zip(shapes, dtypes or ["float32"] * len(shapes), strict=True)):
        size = prod(shape) * getattr(torch, dtype).itemsize
        parameters.append(Parameter(name=f"layers.{number}.weight", shape=shape, dtype=dtype, size_bytes=size))
    order = list(range(len(shapes))[::-1]) if ready_order is None else list(ready_order)
    ready_of = {index: forward_ns + gap_ns * (1 + number) for number, index in enumerate(order)}
    end = max(ready_of.values()) + gap_ns
    iteration = Iteration(
        forward_start_ns=0,
        forward_end_ns=forward_ns,
        backward_start_ns=forward_ns,
        backward_end_ns=end,
        optimizer_start_ns=end,
        optimizer_end_ns=end + gap_ns,
        end_ns=end + gap_ns,
        synchronized=False,
        ready_ns=tuple(map(ready_of.get, range(len(shapes)))),
    )
    where: dict[str, Any] = {"device": "cpu", "device_name": "emulated", "backend": None, "world_size": 1}
    workload = Workload(model=model, source="module", parameters=tuple(parameters), torch_version="", **where)
    return Trace(workload=workload, ranks=(RankTrace(rank=0, iterations=(iteration,)),))


MODELS = (
    trace_of_layers("12 equal layers", [(1024, 512)] * 12, 6 * MS, MS),
    trace_of_layers("large last layers", [*[(64, 64)] * 30, *[(1024, 1024)] * 6], 4 * MS, 300 * US),
    trace_of_layers("a large embedding first", [(4096, 1024), *[(512, 512)] * 24], 8 * MS, 500 * US),
)


class EmulatedLaunch(Schema):
    """An all-reduce of a bucket, in nanoseconds from the start of the iteration."""

    size_bytes: Bytes = Field(description="bytes of its message")
    launched_ns: Moment = Field(description="when the class launched it")
    done_ns: Moment = Field(description="when it was done")


class EmulatedSchedule(Schema):
    """What a class does in one iteration of a model on a network."""

    model: str = Field(description="name of the model")
    network: str = Field(description="name of the network")
    iteration_ns: Nanoseconds = Field(gt=0, description="duration of the iteration")
    exposed_ns: Nanoseconds = Field(description="time in which the slowest rank waits for communication")
    last_ready_ns: Nanoseconds = Field(description="when the last gradient is ready")
    launches: tuple[EmulatedLaunch, ...] = Field(description="all-reduces in launch order")
    other_collectives: int = Field(ge=0, description="number of further collectives")

    def row(self) -> dict[str, str]:
        """Return the schedule as a row of a table."""
        return {
            "model": self.model,
            "network": self.network,
            "all-reduces": str(len(self.launches)),
            "launched early": str(sum(launch.launched_ns < self.last_ready_ns for launch in self.launches)),
            "others": str(self.other_collectives),
            "iteration ms": f"{self.iteration_ns / MS:.3f}",
            "exposed ms": f"{self.exposed_ns / MS:.3f}",
        }


class ScheduleFile(Schema):
    """Schedules of a class, as a file."""

    subject: str = Field(description="name of the class")
    schedules: tuple[EmulatedSchedule, ...] = Field(description="by model and network")


def schedules_of(subject: Subject) -> list[EmulatedSchedule]:
    """Emulate all models on all networks; errors are those of `schedule_of`."""
    return [schedule_of(subject, trace, network) for trace in MODELS for network in NETWORKS]


@as_modelled()
def emulated(subject: Subject, trace: Trace, network: Network, **settings: Any) -> Prediction:
    """Emulate one model on one network; arguments and errors are those of `schedule_of`."""
    fabric = Fabric.from_alpha_beta(alpha_ns=network.latency_ns, bytes_per_s=network.bytes_per_s)
    how: dict[str, Any] = {"bucket_cap_mb": CAP_MB, "assume": False} | settings
    return emulate(trace, fabric, world_size=network.world_size, reducer=partial(wrap_emulated, subject), **how)


def schedule_of(subject: Subject, trace: Trace, network: Network, **settings: Any) -> EmulatedSchedule:
    """Return what a class does with one model on one network; further settings are those of `emulate`.

    The cap is `CAP_MB` without one. Raises NotSupportedError if the class uses what the modelled network does not
    have, and RankError as `run_in_virtual_time` does.
    """
    prediction = emulated(subject, trace, network, **settings)
    timeline = prediction.timeline
    collectives = timeline.engine_input.schedule.collectives
    reduced = [number for number, one in enumerate(collectives) if one.kind in OF_GRADIENTS]
    launched_ns, done_ns = timeline.launched_ns.max(axis=0).tolist(), timeline.done_ns.tolist()
    iteration = trace.ranks[0].iterations[0]
    return EmulatedSchedule(
        model=trace.workload.model,
        network=network.name,
        iteration_ns=prediction.iteration_ns,
        exposed_ns=prediction.exposed_comm_ns,
        last_ready_ns=max(moment for moment in iteration.ready_ns if moment is not None),
        launches=tuple(
            EmulatedLaunch(size_bytes=collectives[one].size_bytes, launched_ns=launched_ns[one], done_ns=done_ns[one])
            for one in reduced
        ),
        other_collectives=len(collectives) - len(reduced),
    )


def averages_by_a_call(subject: Subject) -> bool:
    """Whether the class launches nothing until the script calls what must follow a backward pass."""
    return not schedule_of(replace(subject, is_finished=False), MODELS[0], NETWORKS[0]).launches


def wrap_emulated(subject: Subject, module: Any, **options: Any) -> nn.Module:
    """Wrap an emulated model, without options that are None; before its step, it calls what must follow a pass."""
    given = {name: value for name, value in options.items() if value is not None and name in subject.options}
    wrapped = subject.wrap(module, **given)
    step = module.step

    def finish_and_step() -> None:
        subject.finish(wrapped, None)  # type: ignore[arg-type]  # an emulated device has no optimiser
        step()

    module.step = finish_and_step
    return wrapped


def late_launches(schedule: EmulatedSchedule) -> str:
    """Say what keeps communication from overlapping with the backward pass; empty if nothing does."""
    if not schedule.launches:
        return "no all-reduce was launched"
    if all(launch.launched_ns >= schedule.last_ready_ns for launch in schedule.launches):
        exposed = f"{schedule.exposed_ns / MS:.2f} ms of {schedule.iteration_ns / MS:.2f} ms"
        late = f"all {len(schedule.launches)} all-reduces were launched after the last gradient was ready"
        return f"{late}; {exposed} are exposed communication"
    return ""


# Comparison with a baseline


def save(path: Path, subject: str, schedules: Sequence[EmulatedSchedule]) -> None:
    """Write schedules as JSON, for `load`."""
    document = ScheduleFile(subject=subject, schedules=tuple(schedules))
    write_atomically(path, (document.model_dump_json(indent=1) + "\n").encode())


def load(path: Path) -> tuple[EmulatedSchedule, ...]:
    """Read schedules that `save` wrote; a ValueError names a missing or damaged file, the field and the reason."""
    cure = "write it again with `ddplab conform --save-schedule`"
    return read_schema(ScheduleFile, path, what="a file of schedules", cure=cure).schedules


def compare(schedules: Sequence[EmulatedSchedule], baseline: Sequence[EmulatedSchedule]) -> list[str]:
    """Return one sentence for each schedule that is slower than the baseline's; it names the first late bucket."""
    before = {(schedule.model, schedule.network): schedule for schedule in baseline}
    sentences = []
    for now in schedules:
        if (then := before.get((now.model, now.network))) and now.iteration_ns > then.iteration_ns:
            slower = now.iteration_ns / then.iteration_ns - 1
            more = f"+{slower:.1%}" if slower >= 0.001 else f"+{now.iteration_ns - then.iteration_ns} ns"
            sentences.append(f"{_cause(now, then)}: {more} on {now.network} ({now.model})")
    return sentences


def _cause(now: EmulatedSchedule, then: EmulatedSchedule) -> str:
    """Describe the first difference between two schedules of one model on one network."""
    if now.other_collectives != then.other_collectives:
        return f"{now.other_collectives} collectives beside the all-reduces instead of {then.other_collectives}"
    if len(now.launches) != len(then.launches):
        return f"{len(now.launches)} buckets instead of {len(then.launches)}"
    for number, (launch, earlier) in enumerate(zip(now.launches, then.launches, strict=True)):
        if launch.size_bytes != earlier.size_bytes:
            return f"bucket {number} has {launch.size_bytes} bytes instead of {earlier.size_bytes}"
        if launch.launched_ns > earlier.launched_ns:
            together = [other for other, one in enumerate(now.launches) if one.launched_ns == launch.launched_ns]
            if others := [other for other in together if other != number]:
                return f"bucket {number} waits for bucket {max(others)}"
            if launch.launched_ns >= now.last_ready_ns > earlier.launched_ns:
                return f"bucket {number} waits for the end of the backward pass"
            return f"bucket {number} is launched {(launch.launched_ns - earlier.launched_ns) / MS:.3g} ms later"
    return "the same launches, but the iteration ends later"


def check_overlap(bench: Bench) -> None:
    """All-reduces of several buckets are launched in one order, the first ones before the backward pass ends."""
    for schedule in schedules(bench):
        if problem := late_launches(schedule):
            if run_alone(bench, averages_by_a_call, bench.subject):
                raise NotSupportedError("it averages after the backward pass, by a call of the script: no overlap")
            raise FindingError(f"{schedule.model} on {schedule.network}: {problem}")


def not_slower(bench: Bench, baseline: Sequence[EmulatedSchedule]) -> None:
    """No schedule in virtual time is slower than in the baseline."""
    if slower := compare(schedules(bench), baseline):
        raise FindingError("; ".join(slower))


def schedules(bench: Bench) -> Sequence[EmulatedSchedule]:
    """Return what the class does in virtual time, which is found out once."""
    if bench.not_in_virtual_time:
        raise NotSupportedError(bench.not_in_virtual_time)
    try:
        if not bench.schedules:
            bench.schedules += run_alone(bench, schedules_of, bench.subject)
    except NoTurnError as error:
        raise NotSupportedError(cause_of(error)) from None
    return bench.schedules
