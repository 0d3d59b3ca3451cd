"""Costs of gradients, collectives and comm hooks to the processor that also computes."""

from typing import Self

from pydantic import Field

from reference.files import Schema

from .contention import Contention


class Linear(Schema):
    """A cost that grows linearly with the bytes handled."""

    fixed_ns: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="cost of each call, nanoseconds; from a line through times",
    )
    ns_per_byte: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="cost of a byte, nanoseconds; from the same line's slope"
    )

    def __call__(self, size_bytes: int) -> int:
        """Nanoseconds for `size_bytes`."""
        return round(self.fixed_ns + self.ns_per_byte * size_bytes)

    def times(self, factor: float) -> Self:
        """This cost multiplied by `factor`."""
        return (
            self
            if factor == 1
            else type(self)(fixed_ns=factor * self.fixed_ns, ns_per_byte=factor * self.ns_per_byte)
        )


class HookCost(Schema):
    """Cost of what a comm hook computes for one bucket, by bytes of the bucket's gradients."""

    name: str = Field(description="name of the hook, as for `--hook`; chosen by the user")
    compress: Linear = Field(
        default=Linear(),
        description="computed before its first collective, nanoseconds; from `ddplab calibrate --hook`",
    )
    recompress: Linear = Field(
        default=Linear(),
        description="computed between its two collectives, nanoseconds; from `ddplab calibrate --hook`",
    )
    decompress: Linear = Field(
        default=Linear(),
        description="computed after its last collective, nanoseconds; from `ddplab calibrate --hook`",
    )
    world_size: int = Field(
        default=1,
        ge=1,
        description="ranks when `decompress` was measured, a count; gathered messages cost in proportion to it; "
        "from `ddplab calibrate --hook`",
    )


class Processor(Schema):
    """Costs of collectives to the processor that also computes."""

    pack: Linear = Field(
        default=Linear(),
        description="copying one gradient into its ready bucket, nanoseconds; from `ddplab calibrate`",
    )
    launch_ns: int = Field(
        default=0, ge=0, description="issuing one all-reduce, nanoseconds; from `ddplab calibrate` or a profiler"
    )
    copy_out: Linear = Field(
        default=Linear(),
        description="copying one gradient out of its bucket, nanoseconds; from `ddplab calibrate`",
    )
    contention: tuple[Contention, ...] = Field(
        default=(),
        description="how computation and collectives slow each other down, factors; from `ddplab calibrate`",
    )
    lingers_ns: int = Field(
        default=0,
        ge=0,
        description="how long computation stays slowed after the last collective in flight is done, nanoseconds; "
        "from `ddplab calibrate`",
    )
    lingers_error_ns: int = Field(
        default=0,
        ge=0,
        description="half-width of the band that holds 90 % of repeated measurements of `lingers_ns`, nanoseconds; "
        "from `ddplab calibrate`, 0 where they were not kept",
    )
    search_ns_per_parameter: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="searching the autograd graph for unused parameters, nanoseconds a parameter; "
        "from `ddplab calibrate`, or from steps with and without find_unused_parameters",
    )
    rebuild_ns: int = Field(
        default=0,
        ge=0,
        description="allocating new buckets and assigning parameters to them at the rebuild, nanoseconds; "
        "from `ddplab calibrate`, or from the second iteration of a profile against the third",
    )
    hooks: tuple[HookCost, ...] = Field(
        default=(), description="computation of comm hooks, nanoseconds; from `ddplab calibrate --hook`"
    )

    def slowed(self, half_widths: float) -> Self:
        """A copy whose contention is raised by this many half-widths of its error bands."""
        return self.model_copy(
            update={
                "contention": tuple(row.shifted(half_widths) for row in self.contention),
                "lingers_ns": max(0, round(self.lingers_ns + half_widths * self.lingers_error_ns)),
            }
        )
