"""Trace: the recording of a training run, its file format, and its consistency checks.

A `Trace` holds the `Workload` (the model and the set-up), the bucket layouts in force, and the times of every rank
and iteration. All times are int nanoseconds on the rank's own monotonic clock, whose zero is the start of its
recording; adding `RankTrace.clock_offset_ns` gives times on rank 0's clock.

    Trace
    ├── workload: Workload ── parameters: Parameter, buffers: Buffer
    ├── layouts: parameter indices by bucket, in launch order
    └── ranks: RankTrace ── iterations: Iteration ── buckets: BucketTimes
"""

import gzip
import os
from collections import Counter
from itertools import pairwise
from math import ceil, prod
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from .bucketing import check_partition
from .errors import TraceError
from .files.reading import Schema, read_schema
from .files.value_ranges import (
    EXABYTE,
    YEAR_NS,
    Batch,
    Bytes,
    BytesPerS,
    Flops,
    FlopsPerS,
    Moment,
    Nanoseconds,
    Rank,
    WorldSize,
)
from .files.writing import write_atomically

SCHEMA_VERSION: Literal[1] = 1
VERSION_FIELD = b'"schema_version"'
"""A field in the JSON of a trace."""
PROFILER_FIELD = b'"traceEvents"'
"""A field in the JSON of torch's profiler."""
PROFILER_ADVICE = (
    "expected a trace, got a file of torch's profiler; make a trace of it with `ddplab import kineto FILE --out "
    "trace.json.gz`"
)

PHASES = (
    *("forward_start_ns", "forward_end_ns", "backward_start_ns", "backward_end_ns"),
    *("optimizer_start_ns", "optimizer_end_ns", "end_ns"),
)
"""The moments of an iteration, in chronological order."""

Length = Annotated[int, Field(ge=0, le=EXABYTE)]
"""Length of a dimension of a tensor."""

WIDEST_BOUND = 100.0
"""Largest factor by which compute times may be off."""
Bound = Annotated[float, Field(ge=1 / WIDEST_BOUND, le=WIDEST_BOUND)]

BucketLayout = tuple[tuple[int, ...], ...]
"""Parameter indices by bucket, in launch order."""


class Parameter(Schema):
    """A trainable parameter; its position in `Workload.parameters` is its parameter index."""

    name: str
    shape: tuple[Length, ...]
    dtype: str
    size_bytes: Bytes
    sparse: bool = False

    @model_validator(mode="after")
    def _whole_elements(self) -> Self:
        elements = prod(self.shape)
        if (elements == 0) != (self.size_bytes == 0) or (elements and self.size_bytes % elements):
            raise ValueError(
                f"size_bytes: expected a multiple of the {elements} elements of shape {self.shape}, "
                f"got {self.size_bytes}"
            )
        return self

    def touched_rows(self, density: float) -> int:
        """Number of rows in the sparse gradient of a batch that touches this fraction of the rows, rounded up.

        A fraction such as 7 / 25 is not exact, and 25 times it is a little more than 7 but means 7 rows.
        """
        return ceil(round(self.shape[0] * density, 6))


class Buffer(Schema):
    """A module buffer that rank 0 broadcasts before each synchronised forward pass."""

    name: str
    dtype: str
    size_bytes: Bytes


class StepMemory(Schema):
    """Bytes that forward and backward hold beside parameters, buffers, states of the optimiser and buckets."""

    batch: Batch  #: samples for which the bytes hold
    batch_bytes: Bytes  #: bytes of the batch itself
    constant_bytes: Bytes = 0  #: bytes of the others that do not grow with the batch
    frozen_bytes: Bytes = 0  #: bytes of parameters that are not trained
    kept_bytes: Bytes  #: bytes of the activations that autograd keeps when forward ends
    peak_bytes: Bytes  #: most bytes at one time, without gradients of parameters
    peak_with_gradients_bytes: Bytes
    """Most bytes at one time, with the gradients that are there, if the step starts without any."""
    ready_bytes: tuple[Bytes, ...]  #: bytes without gradients when each gradient is ready, by parameter index

    def with_batch(self, batch: int) -> Self:
        """Return the bytes of another batch; what grows with the batch grows in proportion."""

        def scaled(size_bytes: int, constant_bytes: int) -> int:
            return constant_bytes + round((size_bytes - constant_bytes) * batch / self.batch)

        constant = self.constant_bytes
        # What gradients add to the peak does not grow with the batch.
        added = self.peak_with_gradients_bytes - self.peak_bytes
        return self.model_copy(
            update={
                "batch": batch,
                "batch_bytes": scaled(self.batch_bytes, 0),
                "kept_bytes": scaled(self.kept_bytes, constant),
                "peak_bytes": scaled(self.peak_bytes, constant),
                "peak_with_gradients_bytes": scaled(self.peak_bytes, constant) + added,
                "ready_bytes": tuple(scaled(one, min(one, constant)) for one in self.ready_bytes),
            }
        )


class Workload(Schema):
    """The model and the set-up that were recorded."""

    model: str
    source: Literal["ddplab", "torch", "module"]
    """Which data parallelism ran: ddplab's, torch's, or none (a plain module: no communication)."""
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...] = ()
    device: str
    device_name: str
    backend: str | None
    world_size: WorldSize
    torch_version: str
    batch: Batch | None = None  #: samples per rank and iteration, where known
    input_shape: tuple[Length, ...] | None = None
    """Shape of the first tensor that the module took as input, where known."""
    tokens: Length | None = None  #: length of a sample's sequence, where the input has numbers of tokens
    flops: Flops | None = None
    """Floating-point operations of an iteration, without those that checkpoints repeat, where counted."""
    flops_per_s: FlopsPerS | None = None  #: peak rate of the GPU, where known
    memory_bytes_per_s: BytesPerS | None = None  #: peak bandwidth of the GPU's memory, where known
    memory: StepMemory | None = None  #: what a step holds, where it was counted
    compute_bounds: tuple[Bound, Bound] = (1.0, 1.0)
    """Multiples of the compute times between which nine in ten true ones lie; both 1: recorded."""

    @property
    def described(self) -> str:
        """The model's name with the shape of its input, where known."""
        shape = "" if self.input_shape is None else f", input {' x '.join(map(str, self.input_shape))}"
        return f"{self.model}{shape}"

    @property
    def doubt(self) -> str:
        """Why the measured step of a synthesised trace is doubtful, and what to check; "" if it is not."""
        return next((words for words in self.device_name.split("; ") if words.startswith("the step takes ")), "")

    @model_validator(mode="after")
    def _has_parameters(self) -> Self:
        if not self.parameters:
            raise ValueError("parameters: expected at least one trainable parameter")
        total = sum(one.size_bytes for tensors in (self.parameters, self.buffers) for one in tensors)
        if total > EXABYTE:
            raise ValueError(f"parameters: expected at most {EXABYTE} bytes of parameters and buffers, got {total}")
        ((name, count),) = Counter(parameter.name for parameter in self.parameters).most_common(1)
        if count > 1:
            raise ValueError(f"parameters: the name {name!r} occurs twice")
        return self


class BucketTimes(Schema):
    """One bucket in one iteration: ready <= launched <= done <= copied out."""

    ready_ns: Moment  #: when the last gradient of the bucket was ready
    launched_ns: Moment  #: when its all-reduce was issued
    done_ns: Moment  #: when its all-reduce had finished
    copied_out_ns: Moment | None = None  #: None: not recorded, because torch's reducer does not report it

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        moments = [self.ready_ns, self.launched_ns, self.done_ns, self.copied_out_ns]
        seen = [moment for moment in moments if moment is not None]
        if seen != sorted(seen):
            raise ValueError(f"expected ready <= launched <= done <= copied out, got {seen}")
        return self

    def shifted(self, by_ns: int) -> Self:
        """The same times, `by_ns` later."""
        return self.model_copy(update={name: ns + by_ns for name, ns in self.model_dump(exclude_none=True).items()})


class Iteration(Schema):
    """One training iteration of one rank.

    An iteration ends when the next one begins. The last one of a recording ends with its optimiser step or, without
    one, with its backward pass.
    """

    forward_start_ns: Moment
    forward_end_ns: Moment
    backward_start_ns: Moment  #: when the first gradient of the model's output was computed
    computed_ns: Moment | None = None
    """When a backward pass with communication had computed everything, parameters outside the data parallelism
    included. None: with its last gradient."""
    backward_end_ns: Moment
    optimizer_start_ns: Moment | None = None
    optimizer_end_ns: Moment | None = None
    end_ns: Moment
    host_bound_ns: Nanoseconds | None = None
    """How long a GPU waited for its host to launch something. None: not recorded."""
    synchronized: bool  #: whether gradients were averaged over the ranks
    layout: int | None = None  #: index into `Trace.layouts`; None: no buckets
    ready_ns: tuple[Moment | None, ...]  #: by parameter index; None: the parameter got no gradient
    buckets: tuple[BucketTimes, ...] = ()  #: in launch order

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        phases = {name: getattr(self, name) for name in PHASES if getattr(self, name) is not None}
        for (before, earlier), (after, later) in pairwise(phases.items()):
            if earlier > later:
                raise ValueError(f"{after}: expected at least {before} = {earlier}, got {later}")
        if self.duration_ns > YEAR_NS:
            raise ValueError(f"end_ns: expected an iteration of at most a year, got {self.duration_ns} ns")
        for index, moment in enumerate((*self.ready_ns, self.computed_ns)):
            if moment is not None and not self.backward_start_ns <= moment <= self.backward_end_ns:
                name = f"ready_ns[{index}]" if index < len(self.ready_ns) else "computed_ns"
                raise ValueError(
                    f"{name}: expected a time within the backward pass "
                    f"({self.backward_start_ns} to {self.backward_end_ns}), got {moment}"
                )
        launches = [bucket.launched_ns for bucket in self.buckets]
        if launches != sorted(launches):
            raise ValueError(f"buckets: expected launches in bucket order, got {launches}")
        return self

    @property
    def duration_ns(self) -> int:
        """Time from the start of the forward pass to the end of the iteration."""
        return self.end_ns - self.forward_start_ns

    def shifted(self, by_ns: int) -> Self:
        """The same iteration, `by_ns` later."""
        moments = self.model_dump(include={*PHASES, "computed_ns"}, exclude_none=True)
        update: dict[str, object] = {name: moment + by_ns for name, moment in moments.items()}
        update["ready_ns"] = tuple(None if moment is None else moment + by_ns for moment in self.ready_ns)
        update["buckets"] = tuple(bucket.shifted(by_ns) for bucket in self.buckets)
        return self.model_copy(update=update)


class RankTrace(Schema):
    """The recording of one rank."""

    rank: Rank
    clock_offset_ns: Moment = 0  #: add to this rank's times to get rank 0's clock
    clock_uncertainty_ns: Nanoseconds = 0  #: estimated error of the offset
    iterations: tuple[Iteration, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_after_the_other(self) -> Self:
        for number, (before, after) in enumerate(pairwise(self.iterations)):
            if after.forward_start_ns < before.end_ns:
                raise ValueError(
                    f"iterations[{number + 1}].forward_start_ns: expected at least the end of the iteration before, "
                    f"{before.end_ns}, got {after.forward_start_ns}"
                )
        return self


class Trace(Schema):
    """The recording of all ranks, or of some of them; inconsistent fields are a validation error."""

    schema_version: Literal[1] = SCHEMA_VERSION
    workload: Workload
    layouts: tuple[BucketLayout, ...] = ()
    ranks: tuple[RankTrace, ...] = Field(min_length=1)

    @field_validator("schema_version", mode="before")
    @classmethod
    def _is_known(cls, version: object) -> object:
        if isinstance(version, int) and version != SCHEMA_VERSION:
            raise ValueError(
                f"expected {SCHEMA_VERSION}, got {version}; record it again, or read it with the release of ddplab "
                "that wrote it"
            )
        return version

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        for index, layout in enumerate(self.layouts):
            try:
                check_partition(layout, len(self.workload.parameters))
            except ValueError as error:
                raise ValueError(f"layouts[{index}]: {error}") from None
        ranks = [rank.rank for rank in self.ranks]
        if ranks != sorted(set(ranks)) or ranks[-1] >= self.workload.world_size:
            raise ValueError(
                f"ranks: expected ranks below {self.workload.world_size} in order, each once, got {ranks}"
            )
        for rank in self.ranks:
            for number, iteration in enumerate(rank.iterations):
                self._check_iteration(f"ranks[{rank.rank}].iterations[{number}]", iteration)
        return self

    def _check_iteration(self, where: str, iteration: Iteration) -> None:
        if iteration.layout is not None and not 0 <= iteration.layout < len(self.layouts):
            limit = f"expected an index into {len(self.layouts)} layouts"
            raise ValueError(f"{where}.layout: {limit}, got {iteration.layout}")
        layout = () if iteration.layout is None else self.layouts[iteration.layout]
        for name, part, times, expected in (
            ("ready_ns", "parameter", iteration.ready_ns, len(self.workload.parameters)),
            ("buckets", "bucket", iteration.buckets, len(layout) if iteration.synchronized else 0),
        ):
            if len(times) != expected:
                raise ValueError(
                    f"{where}.{name}: expected {expected} entries, one for each {part}, got {len(times)}"
                )

    @property
    def sizes_bytes(self) -> list[int]:
        """Size of every parameter, by parameter index."""
        return [parameter.size_bytes for parameter in self.workload.parameters]

    @property
    def keys(self) -> list[str]:
        """Key of every parameter, by parameter index: parameters in one bucket have equal keys."""
        return [parameter.dtype for parameter in self.workload.parameters]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, gzipped if the name ends in `.gz`; equal traces give equal bytes."""
        data = self.model_dump_json().encode()
        write_atomically(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a trace written by `save`.

        Raises:
            TraceError: The file is missing, corrupt, truncated, of an unknown version or inconsistent.
        """
        cure = "expected a trace as `ddplab record` writes it"
        try:
            trace = read_schema(cls, path, what="a trace", cure=cure, mistaken=(PROFILER_FIELD, PROFILER_ADVICE))
        except ValueError as error:
            raise TraceError(str(error)) from None
        if "schema_version" not in trace.model_fields_set:
            raise TraceError(f"{path}: schema_version: field required")
        return trace
