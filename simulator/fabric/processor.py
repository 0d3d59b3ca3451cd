"""What gradients and collectives cost the processor that also computes."""

from typing import Annotated

from pydantic import Field

from reference.records import Record

Factor = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]


class Linear(Record):
    """A cost that grows with the bytes handled."""

    fixed_ns: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    ns_per_byte: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def __call__(self, size_bytes: int) -> int:
        """Nanoseconds for `size_bytes`."""
        return round(self.fixed_ns + self.ns_per_byte * size_bytes)


class Processor(Record):
    """What running collectives costs the processor that also computes.

    The slow-downs are factors: 1.5 means that something takes 1.5 times as long while the other runs.
    """

    pack: Linear = Field(default=Linear(), description="copying one gradient into its bucket, once that is full")
    launch_ns: int = Field(default=0, ge=0, description="issuing one all-reduce")
    copy_out: Linear = Field(default=Linear(), description="copying one gradient back out of its bucket")
    compute_slowdown: Factor = Field(default=1.0, description="of computation while a collective runs")
    collective_slowdown: Factor = Field(default=1.0, description="of a collective while a rank computes")
