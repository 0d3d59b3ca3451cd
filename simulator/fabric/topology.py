"""Topology: levels of links one around the other, and which of them a world size uses."""

from math import inf, prod
from typing import Self

from pydantic import Field, model_validator

from reference.records import Record

from .level import Level


class Topology(Record, strict=False):
    """Levels, innermost first: the first joins ranks, each further one joins groups of the one before."""

    levels: tuple[Level, ...] = Field(
        min_length=1, description="links, innermost first; no unit; from the machine's data sheet"
    )
    source: str = Field(
        default="", description="where the figures come from, such as a data sheet's title; no unit; from the user"
    )

    @model_validator(mode="after")
    def _is_bounded_inside(self) -> Self:
        for level in self.levels[:-1]:
            if level.members is None:
                raise ValueError(
                    f"levels.{level.name}.members: expected a count, got none; only the outermost may have none"
                )
        return self

    @property
    def capacity(self) -> float:
        """Ranks that it holds; infinite where the outermost level grows as needed."""
        return prod(level.members or inf for level in self.levels)

    def in_use(self, world_size: int) -> tuple[Level, ...]:
        """The levels with the members that `world_size` ranks use; groups are filled one after another.

        A world that fits into one group of a level leaves the levels above with one member.

        Raises:
            ValueError: More ranks than the topology holds, or the last group of a level would be partly filled.
        """
        if world_size > self.capacity:
            raise ValueError(f"world_size: expected at most {self.capacity} ranks ({self}), got {world_size}")
        levels, groups = [], world_size
        for level in self.levels:
            members = min(groups, level.members or groups)
            if groups % members:
                filled = world_size // groups * members
                raise ValueError(
                    f"world_size: past {filled} ranks expected a multiple of {filled}, "
                    f"as level {level.name} joins that many ({self}), got {world_size}"
                )
            levels.append(level.model_copy(update={"members": members}))
            groups //= members
        return tuple(levels)

    def __str__(self) -> str:
        return " of ".join(f"{level.name} x {level.members or 'any number'}" for level in reversed(self.levels))
