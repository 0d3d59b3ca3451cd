"""What gradients and collectives cost the processor that also computes."""

from typing import Self

from pydantic import Field

from reference.schema import Schema

from .contention import Contention


class Linear(Schema):
    """A cost that grows with the bytes handled."""

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
        """The same cost, `factor` times over."""
        return (
            self
            if factor == 1
            else type(self)(fixed_ns=factor * self.fixed_ns, ns_per_byte=factor * self.ns_per_byte)
        )


class HookCost(Schema):
    """What a comm hook computes for one bucket, by bytes of the bucket's gradients."""

    name: str = Field(description="of the hook, as `--hook` takes it; the user's")
    compress: Linear = Field(
        default=Linear(),
        description="before its first collective, nanoseconds; from `ddplab calibrate --hook`",
    )
    recompress: Linear = Field(
        default=Linear(),
        description="between its two collectives, nanoseconds; from `ddplab calibrate --hook`",
    )
    decompress: Linear = Field(
        default=Linear(),
        description="after its last collective, nanoseconds; from `ddplab calibrate --hook`",
    )
    world_size: int = Field(
        default=1,
        ge=1,
        description="ranks whose messages `decompress` takes, a count: gathered ones cost in proportion; "
        "from `ddplab calibrate --hook`",
    )


class Processor(Schema):
    """What running collectives costs the processor that also computes."""

    pack: Linear = Field(
        default=Linear(),
        description="copying one gradient into its bucket once that is full, nanoseconds; from `ddplab calibrate`",
    )
    launch_ns: int = Field(
        default=0, ge=0, description="issuing one all-reduce, nanoseconds; from `ddplab calibrate` or a profiler"
    )
    copy_out: Linear = Field(
        default=Linear(),
        description="copying one gradient back out of its bucket, nanoseconds; from `ddplab calibrate`",
    )
    contention: tuple[Contention, ...] = Field(
        default=(),
        description="how computation and collectives slow each other down, factors; from `ddplab calibrate`",
    )
    lingers_ns: int = Field(
        default=0,
        ge=0,
        description="how long computation stays slowed once the last collective in flight is done, nanoseconds; "
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
        description="allocating buckets and laying them out anew at the rebuild, nanoseconds; "
        "from `ddplab calibrate`, or from the second iteration of a profile against the third",
    )
    hooks: tuple[HookCost, ...] = Field(
        default=(), description="what comm hooks compute, nanoseconds; from `ddplab calibrate --hook`"
    )

    def slowed(self, widths: float) -> Self:
        """With contention that is `widths` half-widths of its bands above the measured one."""
        return self.model_copy(
            update={
                "contention": tuple(row.moved(widths) for row in self.contention),
                "lingers_ns": max(0, round(self.lingers_ns + widths * self.lingers_error_ns)),
            }
        )
