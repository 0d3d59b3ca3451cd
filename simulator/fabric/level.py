"""One level of a network: what joins the members of a group, be they the GPUs of a node or the nodes of a cluster."""

from pydantic import Field

from reference.records import Record


class Level(Record):
    """Equal links, each from one member to a switch that joins them all.

    A member of the innermost level is a rank. A member of a level above is a whole group of the level below, with
    all its links: of a node with eight network cards the rate is that of the eight together.
    """

    name: str = Field(
        min_length=1, description="what the level is called, such as nvlink or nic; no unit; chosen by the user"
    )
    members: int | None = Field(
        default=None,
        ge=1,
        description="members joined, a count; none: as many as needed; from the machine's data sheet",
    )
    latency_ns: int = Field(
        ge=0, description="time of an empty message to another member, nanoseconds; half a measured ping-pong"
    )
    bytes_per_s: float = Field(
        gt=0,
        allow_inf_nan=False,
        description="rate at which one member sends to the others while it receives as much, bytes a second; "
        "from a measured large message, or the data sheet (a two-way rate halved), whose peak is 6-25 % too high",
    )
    reduces: bool = Field(
        default=False,
        description="whether its switches add up what passes (SHARP, NVLS), yes or no; from the switch's data sheet",
    )

    @property
    def size(self) -> int:
        """Members in use; 1 if none are: a level of unknown extent, alone, joins nothing."""
        return self.members or 1

    @property
    def ns_per_byte(self) -> float:
        """Time that a byte takes on a member's link."""
        return 1e9 / self.bytes_per_s
