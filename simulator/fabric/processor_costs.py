"""Processor costs: the time that copies, launches, comm hooks and collectives take from computation."""

from math import hypot, log2
from typing import Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ...reference.files.reading import Schema
from ...reference.files.value_ranges import (
    FractionalNanoseconds,
    Nanoseconds,
    NanosecondsPerByte,
    RelativeError,
    SlowdownFactor,
)

MODEL_ERROR = 0.066
"""The error of predicted medians in the committed runs of the public score."""


class Linear(Schema):
    """A cost that grows linearly with the bytes handled."""

    fixed_ns: FractionalNanoseconds = 0.0
    """fixed cost of each call, nanoseconds; from a line fitted to measured times"""
    ns_per_byte: NanosecondsPerByte = 0.0
    """cost per byte, nanoseconds; from the slope of the same line"""

    def __call__(self, size_bytes: int) -> int:
        """Return the cost of `size_bytes`, in nanoseconds."""
        return round(self.fixed_ns + self.ns_per_byte * size_bytes)

    def times(self, factor: float) -> Self:
        """Return this cost multiplied by `factor`."""
        return type(self)(fixed_ns=factor * self.fixed_ns, ns_per_byte=factor * self.ns_per_byte)


class HookCost(Schema):
    """Computing time of a comm hook for one bucket, by bytes of the bucket's gradients."""

    name: str
    """name of the hook, as for `--hook`; chosen by the user"""
    compress: Linear = Linear()
    """computation before the first collective, nanoseconds; from `ddplab calibrate --hook`"""
    recompress: Linear = Linear()
    """computation between the two collectives, nanoseconds; from `ddplab calibrate --hook`"""
    decompress: Linear = Linear()
    """computation after the last collective, nanoseconds, for each rank if the hook gathers the gradients of all;
    from `ddplab calibrate --hook`"""

    @model_validator(mode="before")
    @classmethod
    def _of_one_rank(cls, given: object) -> object:
        """Take the files that also state the number of ranks, 1, of a hook that does not depend on it."""
        if isinstance(given, dict) and given.get("world_size") == 1:
            return {name: value for name, value in given.items() if name != "world_size"}
        return given


class Processor(Schema):
    """Costs that data parallelism has for the processor that also computes the model; null: not measured."""

    pack: Linear = Linear()
    """copying one gradient into its ready bucket, nanoseconds; from `ddplab calibrate`"""
    launch_ns: Nanoseconds = 0
    """issuing one all-reduce, nanoseconds; from `ddplab calibrate` or a profiler"""
    stall_ns: Nanoseconds = 0
    """computation that an all-reduce holds up, because its blocks wait on the device for other ranks, nanoseconds for
    each doubling of the ranks; from iterations with few and with many buckets"""
    launch_error: RelativeError = 0.0
    """relative error e of `launch_ns` and `stall_ns`: nine in ten lie between 1 / (1 + e) and 1 + e times the value;
    from measurements on other machines"""
    copy_out: Linear = Linear()
    """copying one gradient out of its bucket, nanoseconds; from `ddplab calibrate`"""
    copy_error: RelativeError = 0.0
    """relative error e of `pack` and `copy_out`, as `launch_error`; from measurements on other machines"""
    slow_down: SlowdownFactor = 1.0
    """slow-down of computation beside collectives, a factor on its time alone; from `ddplab calibrate`"""
    slow_down_error: RelativeError = 0.0
    """half-width of the band of 90 % of the measurements of `slow_down`, a fraction of it; from `ddplab calibrate`"""
    search_ns_per_parameter: FractionalNanoseconds = 0.0
    """searching the autograd graph for unused parameters, nanoseconds per parameter; from `ddplab calibrate`, or from
    steps with and without find_unused_parameters"""
    rebuild_ns: Nanoseconds = 0
    """allocating new buckets and assigning parameters to them at the rebuild, nanoseconds; from `ddplab calibrate`,
    or from a profile, as the second iteration minus the third"""
    iteration_spread: RelativeError = 0.0
    """half-width of the band that holds 90 % of the iterations of one training run around their predicted median, a
    fraction; from a training run of `ddplab validate` and the errors of medians in the public score"""
    unexplained: RelativeError = 0.0
    """relative error e of predicted iterations that no other cost explains, on 2 ranks; it grows with the square root
    of the doublings; from published training, 0 if the costs were measured on this machine"""
    hooks: tuple[HookCost, ...] = Field(default=(), strict=False)  # the validator below gets the lists of a file
    """computation of comm hooks, nanoseconds; from `ddplab calibrate --hook`"""

    @model_validator(mode="before")
    @classmethod
    def _as_measured(cls, given: object) -> object:
        """Leave out nulls, and take the files that state the error of medians beside the spread around their own."""
        if not isinstance(given, dict):
            return given
        rest = {name: value for name, value in given.items() if value is not None}
        error, spread = rest.pop("model_error", 0.0), rest.get("iteration_spread")
        return rest | {"iteration_spread": hypot(spread, error)} if spread and error else rest

    @model_serializer(mode="wrap")
    def _null_if_not_measured(self, dump: SerializerFunctionWrapHandler) -> Any:
        return dump(self) | dict.fromkeys(type(self).model_fields.keys() - self.model_fields_set)

    def launch_on(self, world_size: int) -> int:
        """Return the nanoseconds of computation that one all-reduce costs on this many ranks."""
        return self.launch_ns + round(self.stall_ns * log2(world_size))

    def slowed(self, half_widths: float) -> Self:
        """Return a copy with the slow-down increased by this many half-widths of its error band, but at least 1."""
        slow_down = max(1.0, self.slow_down * (1 + half_widths * self.slow_down_error))
        return self.model_copy(update={"slow_down": slow_down})
