"""Import: files of torch's profiler, one per rank, become a trace, and a report of what they show."""

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...reference.errors import TraceError
from ...reference.files.writing import milliseconds
from ...reference.trace import BucketTimes, Iteration, Parameter, RankTrace, Trace, Workload
from ..workload.compute_times import HOST_BOUND, host_bound
from .gradient_sizes import ModelGradients, model_gradients, shapeless_outside_buckets, with_shapes
from .profiler_events import ProfilerFile, grouped, read_profiler_file
from .training_steps import FORWARD, ProfiledStep, read_steps, slow_down_beside_collectives


class ImportedProfile(NamedTuple):
    """What files of torch's profiler show."""

    trace: Trace
    steps: tuple[ProfiledStep, ...]  #: the steps of the first file that are in the trace
    all_reduces_ns: tuple[int, ...]
    """Of several files: duration of each bucket's all-reduce without the wait for the other ranks, in launch order;
    see `_all_reduces_ns`. Empty for one file, whose all-reduces contain the wait."""
    gpu: str | None  #: name of the GPU; None: there was none, or its name was not noted
    slow_down: tuple[float, int] | None  #: see `slow_down_beside_collectives`
    notes: tuple[str, ...]  #: values that are missing, derived or left out; one sentence each

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document: durations in nanoseconds, moments from the start of their step."""
        steps = self.steps
        all_reduced_ns = [[each.end_ns - one.start_ns for each in one.all_reduces] for one in steps]
        copied_ns = [[each.end_ns - one.start_ns for each in one.copies] for one in steps]
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
            "all_reduce_without_wait_ns": list(self.all_reduces_ns),
            "all_reduce_bytes": [[each.size_bytes for each in one.all_reduces] for one in steps],
            "last_all_reduce_end_ns": [max(moments_ns, default=None) for moments_ns in all_reduced_ns],
            "copies_out": [len(one.copies) for one in steps],
            "copied_out_ns": [max(moments_ns, default=None) for moments_ns in copied_ns],
            "optimizer_ns": [None if one.optimizer is None else one.optimizer[1] - one.optimizer[0] for one in steps],
            "host_bound": host_bound(self.trace),
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
    if isinstance(paths, str | Path):
        raise ValueError(f"paths: expected a list of files, got {str(paths)!r}; write [...] around it")
    files = _in_order([read_profiler_file(Path(path)) for path in paths])
    first = files[0]
    notes: list[str] = []
    steps_by_rank = _of_all_ranks(files, [_alike(file, read_steps(file, notes), notes) for file in files], notes)
    if parameters is None and (outside := shapeless_outside_buckets(steps_by_rank[0][-1])):
        why = "in no bucket, by its bytes" if steps_by_rank[0][-1].buckets else "averaging them is not predicted"
        notes.append(f"{_plural(outside, 'gradient')} without a shape, as sparse ones: {why}; left out")
        steps_by_rank = [[with_shapes(step) for step in steps] for steps in steps_by_rank]
    steps, last = steps_by_rank[0], steps_by_rank[0][-1]
    try:
        found = model_gradients(steps, parameters)
    except ValueError as error:
        raise ValueError(f"{first.path}: {error}") from None
    under_ddp = bool(last.buckets) or FORWARD in first.by_name
    try:
        iterations = [tuple(_iteration(step, last, found) for step in of_rank) for of_rank in steps_by_rank]
        ranks = tuple(
            RankTrace(rank=file.rank or 0, **_clock_offset(steps, of_rank), iterations=own)
            for file, of_rank, own in zip(files, steps_by_rank, iterations, strict=True)
        )
        workload = Workload(
            model=model or first.path.name.partition(".")[0],
            source="torch" if under_ddp else "module",
            parameters=found.parameters,
            device="cuda" if first.activities else "cpu",
            device_name=first.gpu or "unknown",
            backend=first.backend,
            world_size=first.world_size or 1 + max(file.rank or 0 for file in files),
            torch_version="unknown",
        )
        trace = Trace(workload=workload, layouts=(found.buckets,) if found.buckets else (), ranks=ranks)
    except ValueError as error:
        raise TraceError(f"{first.path}: the events contradict each other: {error}; export the file again") from None
    slow_down = slow_down_beside_collectives(first)
    notes += found.derived
    all_reduces_ns = _all_reduces_ns(files, steps_by_rank) if len(files) > 1 else ()
    notes += _observations(files, trace, steps, slow_down, all_reduces_ns, under_ddp=under_ddp)
    return ImportedProfile(trace, tuple(steps), all_reduces_ns, first.gpu, slow_down, tuple(notes))


def _all_reduces_ns(
    files: Sequence[ProfilerFile], steps_by_rank: Sequence[Sequence[ProfiledStep]]
) -> tuple[int, ...]:
    """Return the duration of each bucket's all-reduce, without the wait for ranks that arrive later.

    Ranks of one host share its clock, so there it lasts from the last arrival to the last completion. Between hosts,
    which have no common clock, the shortest of these times counts, because the others contain a wait. A rank whose
    host is unknown counts as a host of its own. Returns the median over the steps.
    """
    hosts = [file.host or file.path for file in files]
    every_step = []
    for ranks in zip(*steps_by_rank, strict=True):
        durations = []
        for same in zip(*(step.buckets for step in ranks), strict=True):
            starts: dict[object, int] = {}
            ends: dict[object, int] = {}
            for host, file, one in zip(hosts, files, same, strict=True):
                starts[host] = max(starts.get(host, 0), file.first_ns + one.start_ns)
                ends[host] = max(ends.get(host, 0), file.first_ns + one.end_ns)
            durations.append(min(ends[host] - starts[host] for host in starts))
        every_step.append(durations)
    return tuple(round(statistics.median(of_steps)) for of_steps in zip(*every_step, strict=True))


def _in_order(files: Sequence[ProfilerFile]) -> list[ProfilerFile]:
    """Return the files by rank, after a check that they belong together."""
    if not files:
        raise TraceError("import: expected at least one file of torch's profiler, got none")
    sizes = {file.world_size for file in files}
    if len(sizes) > 1:
        raise TraceError(f"import: expected files of one training run, got {len(sizes)} different numbers of ranks")
    by_rank: dict[int, ProfilerFile] = {}
    for file in files:
        rank = file.rank or 0
        if rank in by_rank:
            raise TraceError(
                f"{file.path}: expected one file per rank, got another one of rank {rank}: {by_rank[rank].path}; "
                "files of processes that do not use torch.distributed have no rank"
            )
        if file.world_size and rank >= file.world_size:
            raise TraceError(f"{file.path}: expected a rank below the world size {file.world_size}, got {rank}")
        by_rank[rank] = file
    return [by_rank[rank] for rank in sorted(by_rank)]


def _signature(step: ProfiledStep) -> tuple[int | str | None, ...]:
    """Return the bytes of the buckets and the shapes of the gradients up to the last bucket, sorted."""
    count = step.buckets[-1].gradients if step.buckets else len(step.gradients)
    return *(one.size_bytes for one in step.buckets), *sorted(str(one.shape) for one in step.gradients[:count])


def _alike(file: ProfilerFile, steps: Sequence[ProfiledStep], notes: list[str]) -> list[ProfiledStep]:
    """Return the steps with all-reduces, if there are any, that have the gradients and buckets of most of them."""
    averaging = [step for step in steps if step.buckets] or list(steps)
    usual, _ = Counter(map(_signature, reversed(averaging))).most_common(1)[0]
    kept = [step for step in averaging if _signature(step) == usual]
    if alone := len(steps) - len(averaging):
        notes.append(
            f"{file.path.name}: {alone} of {len(steps)} steps have no all-reduce, as with no_sync; left out, so if "
            f"gradients are accumulated, predict with --set sync_every={round(len(steps) / len(averaging))}"
        )
    if differing := len(averaging) - len(kept):
        notes.append(f"{file.path.name}: {differing} of {len(steps)} steps have other gradients or buckets; left out")
    if file.lost:
        notes.append(f"{file.path.name}: {file.lost} activities of the GPU have no recorded launch; left out")
    return kept


def _of_all_ranks(
    files: Sequence[ProfilerFile], steps_by_rank: Sequence[Sequence[ProfiledStep]], notes: list[str]
) -> list[list[ProfiledStep]]:
    """Return the steps that all ranks have, by their numbers; other gradients or no common step is a TraceError."""
    first, reference = files[0], steps_by_rank[0][-1]
    for file, steps in zip(files[1:], steps_by_rank[1:], strict=True):
        if _signature(steps[-1]) != _signature(reference):
            raise TraceError(
                f"{file.path}: expected the {len(reference.gradients)} gradients and {len(reference.buckets)} "
                f"buckets of {first.path}, got {len(steps[-1].gradients)} and {len(steps[-1].buckets)}, or of other "
                "sizes; give files of one training run"
            )
    common = set.intersection(*({step.name for step in steps} for steps in steps_by_rank))
    if not common:
        raise TraceError(f"{first.path}: expected a step whose number the files of all ranks have, got none")
    if missing := max(map(len, steps_by_rank)) - len(common):
        notes.append(f"{_plural(missing, 'step')} that not all ranks have; left out")
    return [[step for step in steps if step.name in common] for steps in steps_by_rank]


def _clock_offset(reference: Sequence[ProfiledStep], steps: Sequence[ProfiledStep]) -> dict[str, int]:
    """Return what to add to the times of `steps` to get those of `reference`, and its uncertainty, as fields.

    Collectives end on all ranks at about the same moment. Without any, steps begin at the same moment.
    """
    differences = [
        theirs.end_ns - mine.end_ns
        for one, other in zip(reference, steps, strict=True)
        for theirs, mine in zip(one.all_reduces, other.all_reduces, strict=False)
    ] or [one.start_ns - other.start_ns for one, other in zip(reference, steps, strict=True)]
    middle = round(statistics.median(differences))
    return {"clock_offset_ns": middle, "clock_uncertainty_ns": round(max(abs(one - middle) for one in differences))}


def _iteration(step: ProfiledStep, last: ProfiledStep, found: ModelGradients) -> Iteration:
    count = len(found.places)
    waiting = grouped(reversed(step.gradients[:count]), lambda one: one.shape)
    gradients = [waiting[one.shape].pop() for one in last.gradients[:count]]  # in the order of the last step
    ready_ns = [gradients[place].ready_ns for place in found.places]
    buckets = tuple(_bucket_times(step, found, ready_ns))
    computed_ns = step.last_ready_ns
    averaged_ns = [bucket.done_ns for bucket in buckets] or [one.end_ns for one in step.buckets]
    backward_end_ns = max([computed_ns, *averaged_ns])
    optimizer = None
    if step.optimizer is not None and step.optimizer[1] >= backward_end_ns:
        optimizer = max(step.optimizer[0], backward_end_ns), step.optimizer[1]
    return Iteration(
        forward_start_ns=step.start_ns,
        forward_end_ns=step.forward_end_ns,
        backward_start_ns=step.backward_start_ns,
        computed_ns=computed_ns,
        backward_end_ns=backward_end_ns,
        optimizer_start_ns=None if optimizer is None else optimizer[0],
        optimizer_end_ns=None if optimizer is None else optimizer[1],
        end_ns=max([step.end_ns, backward_end_ns, *(optimizer or ())]),
        host_bound_ns=step.host_bound_ns if step.on_gpu else None,
        synchronized=bool(buckets),
        layout=0 if buckets else None,
        ready_ns=tuple(ready_ns),
        buckets=buckets,
    )


def _bucket_times(step: ProfiledStep, found: ModelGradients, ready_ns: Sequence[int]) -> list[BucketTimes]:
    """Return the times of the buckets.

    Without a GPU, an all-reduce is over at the latest when the first gradient of its bucket is copied out or the
    optimiser begins: Gloo's threads note its end later than the reducer goes on.
    """
    if not found.buckets:
        return []
    times = []
    launched_ns = copied = 0
    for members, all_reduce in zip(found.buckets, step.buckets, strict=True):
        last_ns = max(ready_ns[index] for index in members)
        launched_ns = max(launched_ns, last_ns, all_reduce.issued_ns)
        copies = step.copies[copied : copied + len(members)] if len(step.copies) == len(ready_ns) else ()
        done_ns = max(launched_ns, min(all_reduce.end_ns, step.end_ns))
        if not step.on_gpu:
            went_on_ns = copies[0].start_ns if copies else step.optimizer[0] if step.optimizer else done_ns
            done_ns = max(launched_ns, min(done_ns, went_on_ns))
        copied += len(members)
        copied_out_ns = max((done_ns, *(copy.end_ns for copy in copies))) if copies else None
        moments = {"ready_ns": last_ns, "launched_ns": launched_ns, "done_ns": done_ns}
        times.append(BucketTimes(**moments, copied_out_ns=copied_out_ns))
    return times


def _observations(
    files: Sequence[ProfilerFile],
    trace: Trace,
    steps: Sequence[ProfiledStep],
    slow_down: tuple[float, int] | None,
    all_reduces_ns: Sequence[int],
    *,
    under_ddp: bool,
) -> list[str]:
    """Return what a reader of the result must know, one sentence each."""
    notes = []
    last, world_size = steps[-1], trace.workload.world_size
    if not files[0].activities:
        notes.append("the file has no activities of a GPU; times are those of the host")
    if files[0].world_size is None and last.all_reduces:
        notes.append(f"the file does not contain the number of ranks; it counts as {world_size}")
    if len(files) < world_size:
        notes.append(f"{len(files)} of {world_size} ranks gave a file; the others are assumed to be the same")
    if len(files) > 1:
        uncertainty = milliseconds(max(rank.clock_uncertainty_ns for rank in trace.ranks), ".3f")
        notes.append(f"clocks of the ranks are aligned at the ends of all-reduces, to {uncertainty} ms")
    if all_reduces_ns:
        notes.append(
            f"without the wait for other ranks{' that have a file' * (len(files) < world_size)}, the all-reduces of "
            f"the buckets take {', '.join(milliseconds(ns, '.3f') for ns in all_reduces_ns)} ms"
        )
    elif world_size > 1 and last.all_reduces:
        notes.append("all-reduces include the wait for the other ranks, so no bandwidth follows from their durations")
    if others := len(last.all_reduces) - len(last.buckets):
        notes.append(
            f"{_plural(others, 'all-reduce')} of a step averaged no gradients from their hooks; the time that they "
            "take counts as computation"
        )
    if last.other_collectives:
        kinds = ", ".join(_plural(count, name) for name, count in sorted(last.other_collectives.items()))
        notes.append(f"other collectives of a step: {kinds}; the time that they take counts as computation")
    if last.all_reduces and not under_ddp:
        notes.append("the file shows no DistributedDataParallel; gradient times may include communication")
    if slow_down is not None:
        notes.append(
            f"beside collectives, kernels took {slow_down[0]:.2f} times as long as alone ({slow_down[1]} kernels); "
            "ready times include this"
        )
    if (share := host_bound(trace)) > HOST_BOUND:
        notes.append(
            f"the GPU waited for its host {share:.0%} of the time (host-bound); on a faster host or with larger "
            "batches, computation times would differ"
        )
    return notes


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
