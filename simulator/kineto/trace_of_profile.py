"""Import: files of torch's profiler, one per rank, become a trace, and a report of what they show."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reference.errors import TraceError
from reference.files import first_problem
from reference.trace import BucketTimes, Iteration, Parameter, RankTrace, Trace, Workload

from .events import ProfilerFile, read_profiler_file
from .gradients import ModelGradients, model_gradients
from .steps import FORWARD, Gradient, Step, read_steps, slow_down_beside_collectives

HOST_BOUND = 0.1
"""Fraction of a step in which the GPU waits for the host above which the run counts as host-bound."""


@dataclass(frozen=True)
class ImportedProfile:
    """What files of torch's profiler show.

    Attributes:
        trace: The trace.
        steps: The steps of the first file that are in the trace.
        gpu: Name of the GPU; None: there was none, or its name was not noted.
        slow_down: How many times as long kernels take beside collectives, and the number of kernels compared; None:
            there were no equal kernels to compare.
        notes: What could not be determined, was derived or left out; one sentence each.
    """

    trace: Trace
    steps: tuple[Step, ...]
    gpu: str | None
    slow_down: tuple[float, int] | None
    notes: tuple[str, ...]

    @property
    def host_bound(self) -> float:
        """Fraction of the steps in which the GPU waits for the host to launch something."""
        return sum(one.host_bound_ns for one in self.steps) / max(
            1, sum(one.end_ns - one.start_ns for one in self.steps)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document: durations in nanoseconds, moments from the start of their step."""
        steps = self.steps
        return {
            "gpu": self.gpu,
            "world_size": self.trace.workload.world_size,
            "ranks": [rank.rank for rank in self.trace.ranks],
            "steps": len(steps),
            "gradients": len(self.trace.workload.parameters),
            "buckets_bytes": [one.size_bytes for one in steps[-1].buckets],
            "iteration_ns": [one.end_ns - one.start_ns for one in steps],
            "forward_ns": [one.forward_end_ns - one.start_ns for one in steps],
            "backward_ns": [one.last_ready_ns - one.backward_start_ns for one in steps],
            "backward_start_ns": [one.backward_start_ns - one.start_ns for one in steps],
            "backward_end_ns": [one.last_ready_ns - one.start_ns for one in steps],
            "backward_computing_ns": [one.computing_ns for one in steps],
            "all_reduce_ns": [[each.end_ns - each.start_ns for each in one.all_reduces] for one in steps],
            "all_reduce_bytes": [[each.size_bytes for each in one.all_reduces] for one in steps],
            "last_all_reduce_end_ns": [
                max((each.end_ns - one.start_ns for each in one.all_reduces), default=None) for one in steps
            ],
            "copies_out": [len(one.copies) for one in steps],
            "copied_out_ns": [
                max((each.end_ns - one.start_ns for each in one.copies), default=None) for one in steps
            ],
            "optimizer_ns": [None if one.optimizer is None else one.optimizer[1] - one.optimizer[0] for one in steps],
            "host_bound": self.host_bound,
            "host_bound_ns": [one.host_bound_ns for one in steps],
            "backward_host_bound_ns": [one.backward_host_bound_ns for one in steps],
            "slow_down_beside_collectives": None if self.slow_down is None else self.slow_down[0],
            "notes": list(self.notes),
        }


def import_profile(
    paths: Sequence[str | Path], *, parameters: Sequence[Parameter] | None = None, model: str | None = None
) -> ImportedProfile:
    """Make a trace from files of torch's profiler, one per rank of a training under DDP or of a plain module.

    Args:
        paths: The files, in any order; ranks that have no file are not in the trace.
        parameters: The parameters of the model in registration order, which give names and shapes. None: unknown.
        model: The model's name in the trace. None: the name of the first file.

    Raises:
        TraceError: A file is damaged or holds no training steps, or the files do not belong together.
        ValueError: The sizes of the gradients cannot be determined, or `parameters` do not match the files.
    """
    files = _in_order([read_profiler_file(Path(path)) for path in paths])
    first = files[0]
    notes: list[str] = []
    steps_by_rank = [_alike(file, read_steps(file), notes) for file in files]
    last = steps_by_rank[0][-1]
    try:
        found = model_gradients(steps_by_rank[0], parameters)
    except ValueError as error:
        raise type(error)(f"{first.path}: {error}") from None
    notes += found.derived
    for file, steps in zip(files[1:], steps_by_rank[1:], strict=True):
        if _signature(steps[-1]) != _signature(last):
            raise TraceError(
                f"{file.path}: expected the {len(last.gradients)} gradients and {len(last.buckets)} buckets of "
                f"{first.path}, got {len(steps[-1].gradients)} and {len(steps[-1].buckets)}, or of other sizes; give "
                "files of one training run"
            )
    count = min(len(steps) for steps in steps_by_rank)
    steps_by_rank = [steps[-count:] for steps in steps_by_rank]
    offsets = [_clock_offset(steps_by_rank[0], steps) for steps in steps_by_rank]
    under_ddp = bool(last.buckets) or FORWARD in first.by_name
    try:
        ranks = tuple(
            RankTrace(
                rank=file.rank or 0,
                clock_offset_ns=offset,
                clock_uncertainty_ns=uncertainty,
                iterations=tuple(_iteration(step, last, found) for step in steps),
            )
            for file, steps, (offset, uncertainty) in zip(files, steps_by_rank, offsets, strict=True)
        )
        workload = Workload(
            model=model or first.path.name.partition(".")[0],
            source="torch" if under_ddp else "module",
            parameters=found.parameters,
            device="cuda" if first.activities else "cpu",
            device_name=first.gpu or "unknown",
            backend=first.backend,
            world_size=first.world_size or 1,
            torch_version="unknown",
        )
        trace = Trace(workload=workload, layouts=(found.buckets,) if found.buckets else (), ranks=ranks)
    except ValidationError as error:
        raise TraceError(
            f"{first.path}: the events contradict each other: {first_problem(error)}; export the file again"
        ) from None
    slow_down = slow_down_beside_collectives(first)
    profile = ImportedProfile(trace, tuple(steps_by_rank[0]), first.gpu, slow_down, ())
    return ImportedProfile(
        trace, profile.steps, first.gpu, slow_down, (*notes, *_observations(files, profile, under_ddp=under_ddp))
    )


def _in_order(files: Sequence[ProfilerFile]) -> list[ProfilerFile]:
    """Return the files by rank, after a check that they belong together."""
    if not files:
        raise TraceError("import: expected at least one file of torch's profiler, got none")
    sizes = {file.world_size for file in files}
    if len(sizes) > 1:
        raise TraceError(f"import: expected files of one training run, got world sizes {sorted(map(str, sizes))}")
    by_rank: dict[int, ProfilerFile] = {}
    for file in files:
        rank = file.rank or 0
        if rank in by_rank:
            raise TraceError(
                f"{file.path}: expected one file per rank, got another one of rank {rank}: {by_rank[rank].path}"
            )
        if rank >= (file.world_size or 1):
            raise TraceError(f"{file.path}: expected a rank below the world size {file.world_size or 1}, got {rank}")
        by_rank[rank] = file
    return [by_rank[rank] for rank in sorted(by_rank)]


Signature = tuple[tuple[tuple[int, ...] | None, ...], tuple[int | None, ...]]
"""Shapes of the gradients, sorted, and bytes of the buckets."""


def _signature(step: Step) -> Signature:
    shapes = sorted((one.shape for one in step.gradients), key=str)
    return tuple(shapes), tuple(one.size_bytes for one in step.buckets)


def _alike(file: ProfilerFile, steps: Sequence[Step], notes: list[str]) -> list[Step]:
    """Return the steps that have the gradients and buckets that most steps have."""
    usual, _ = Counter(map(_signature, reversed(steps))).most_common(1)[0]
    kept = [step for step in steps if _signature(step) == usual]
    if len(kept) < len(steps):
        notes.append(
            f"{file.path.name}: {len(steps) - len(kept)} of {len(steps)} steps have other gradients or buckets than "
            "the others and were left out"
        )
    if file.lost:
        notes.append(
            f"{file.path.name}: {file.lost} activities of the GPU were left out, because the file does not say what "
            "launched them"
        )
    return kept


def _clock_offset(reference: Sequence[Step], steps: Sequence[Step]) -> tuple[int, int]:
    """Return what to add to the times of `steps` to get those of `reference`, and its uncertainty.

    Collectives end on all ranks at about the same moment. Without any, steps begin at the same moment.
    """
    differences = [
        theirs.end_ns - mine.end_ns
        for one, other in zip(reference, steps, strict=True)
        for theirs, mine in zip(one.all_reduces, other.all_reduces, strict=False)
    ] or [one.start_ns - other.start_ns for one, other in zip(reference, steps, strict=True)]
    middle = round(statistics.median(differences))
    return middle, round(max(abs(one - middle) for one in differences))


def _iteration(step: Step, last: Step, found: ModelGradients) -> Iteration:
    gradients = _in_order_of(last.gradients, step.gradients)
    ready_ns = [gradients[place].ready_ns for place in found.places]
    buckets = tuple(_bucket_times(step, found, ready_ns))
    computed_ns = step.last_ready_ns
    backward_end_ns = max([computed_ns, *(bucket.done_ns for bucket in buckets)])
    optimizer = None if step.optimizer is None else (max(step.optimizer[0], backward_end_ns), step.optimizer[1])
    if optimizer is not None and optimizer[1] < optimizer[0]:
        optimizer = None
    return Iteration(
        forward_start_ns=step.start_ns,
        forward_end_ns=step.forward_end_ns,
        backward_start_ns=step.backward_start_ns,
        computed_ns=computed_ns,
        backward_end_ns=backward_end_ns,
        optimizer_start_ns=None if optimizer is None else optimizer[0],
        optimizer_end_ns=None if optimizer is None else optimizer[1],
        end_ns=max([step.end_ns, backward_end_ns, *(optimizer or ())]),
        synchronized=bool(buckets),
        layout=0 if buckets else None,
        ready_ns=tuple(ready_ns),
        buckets=buckets,
    )


def _in_order_of(reference: Sequence[Gradient], gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return the gradients of a step in the order of those of another one, by their shapes."""
    waiting: dict[tuple[int, ...] | None, list[Gradient]] = {}
    for one in reversed(gradients):
        waiting.setdefault(one.shape, []).append(one)
    return [waiting[one.shape].pop() for one in reference]


def _bucket_times(step: Step, found: ModelGradients, ready_ns: Sequence[int]) -> list[BucketTimes]:
    """Return the times of the buckets.

    An all-reduce is over at the latest when the first gradient of its bucket is copied out or the optimiser begins:
    Gloo's threads note their ends later than the reducer goes on.
    """
    if not found.buckets:
        return []
    times = []
    launched_ns = copied = 0
    for members, all_reduce in zip(found.buckets, step.buckets, strict=True):
        last_ns = max(ready_ns[index] for index in members)
        launched_ns = max(launched_ns, last_ns, all_reduce.issued_ns)
        copies = step.copies[copied : copied + len(members)] if len(step.copies) == len(ready_ns) else ()
        over_ns = [copies[0].start_ns] if copies else [] if step.optimizer is None else [step.optimizer[0]]
        done_ns = max(launched_ns, min([all_reduce.end_ns, step.end_ns, *over_ns]))
        copied += len(members)
        copied_out_ns = max((done_ns, *(copy.end_ns for copy in copies))) if copies else None
        times.append(
            BucketTimes(ready_ns=last_ns, launched_ns=launched_ns, done_ns=done_ns, copied_out_ns=copied_out_ns)
        )
    return times


def _observations(files: Sequence[ProfilerFile], profile: ImportedProfile, *, under_ddp: bool) -> list[str]:
    """Return what a reader of the result must know, one sentence each."""
    notes = []
    last, world_size = profile.steps[-1], profile.trace.workload.world_size
    if not files[0].activities:
        notes.append("the file has no activities of a GPU; times are those of the host")
    if len(files) < world_size:
        notes.append(f"{len(files)} of {world_size} ranks have a file; the others count as equal to these")
    if world_size > 1 and last.all_reduces:
        notes.append("all-reduces include the wait for the other ranks, so no bandwidth follows from their durations")
    others = len(last.all_reduces) - len(last.buckets)
    if others:
        notes.append(
            f"{others} all-reduces of a step were not called from the hooks of gradients, so they belong to no "
            "bucket and count as computation"
        )
    if world_size > 1 and not under_ddp:
        notes.append("the file shows no DistributedDataParallel; gradient times may include communication")
    if profile.host_bound > HOST_BOUND:
        notes.append(
            f"the GPU waits for the host in {profile.host_bound:.0%} of the time (host-bound); on a faster host or "
            "with larger batches, computation takes another time"
        )
    return notes
