"""Case files of all-reduces: the tables of a system, and questions that make some inputs and others the truth."""

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from reference.schema import Schema

Positive = Field(gt=0, allow_inf_nan=False)
Gpus = Field(ge=1, description="ranks, a GPU each")
Name = Field(min_length=1)


class MeasuredTable(Schema):
    """All-reduces of one number of GPUs, as nccl-tests prints them (out of place)."""

    gpus: int = Field(ge=2)
    bytes: tuple[int, ...] = Field(min_length=2, description="sizes of messages, rising")
    us: tuple[float, ...] = Field(description="microseconds, one a size")

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        if len(self.us) != len(self.bytes):
            raise ValueError(f"us: expected {len(self.bytes)} times, one for each of bytes, got {len(self.us)}")
        if any(small >= large for small, large in pairwise(self.bytes)):
            raise ValueError("bytes: expected sizes that rise")
        if min(self.us) <= 0:
            raise ValueError("us: expected times above 0")
        return self


class Rate(Schema):
    """What a GPU's way to the others carries in one direction, with all links that so many GPUs use."""

    gpus: int = Gpus
    gb_per_s: float = Field(
        gt=0, allow_inf_nan=False, description="10^9 bytes a second; of a whole node, across nodes"
    )
    source: str = Name


class TreeLatency(Schema):
    """The start-up of a tree over nodes, by the formula of NCCL's tuning model; microseconds a hop."""

    node_gpus: int = Gpus
    base_us: float = Positive
    inside_us: float = Positive
    across_us: float = Positive
    source: str = Name


class Question(Schema):
    """Which tables are known, and which are to be foretold."""

    title: str = Name
    fit: tuple[int, ...] = Field(min_length=1, description="numbers of GPUs whose tables are inputs")
    predict: tuple[int, ...] = Field(min_length=1, description="numbers of GPUs whose tables are the truth")
    rates: tuple[Rate, ...] = Field(default=(), description="where links change; none: bytes go at one rate")
    tree: TreeLatency | None = Field(default=None, description="none: latency grows as the known tables say")
    counts: bool = Field(default=True, description="whether the target is held against it")

    @model_validator(mode="after")
    def _knows_no_truth(self) -> Self:
        if min(self.predict) <= max(self.fit):
            raise ValueError(f"predict: expected more GPUs than the {max(self.fit)} in fit, got {min(self.predict)}")
        return self


class AllReduceCase(Schema):
    """Tables of one system; each question makes some of them inputs and others the truth."""

    kind: Literal["all_reduce"]
    name: str = Name
    source: str = Name
    from_bytes: int = Field(default=262_144, ge=0, description="smaller messages are shown, but do not count")
    tables: tuple[MeasuredTable, ...] = Field(min_length=2)
    questions: tuple[Question, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_what_is_asked(self) -> Self:
        measured = [table.gpus for table in self.tables]
        if len(set(measured)) < len(measured):
            raise ValueError(f"tables: expected one for each number of GPUs, got {measured}")
        titles = [question.title for question in self.questions]
        if len(set(titles)) < len(titles):
            raise ValueError(f"questions: expected titles that differ, got {titles}")
        for number, question in enumerate(self.questions):
            for gpus in (*question.fit, *question.predict):
                if gpus not in measured:
                    raise ValueError(f"questions[{number}]: expected tables of {measured} GPUs, got {gpus}")
            rated = {rate.gpus for rate in question.rates}
            if rated and not rated >= {max(question.fit), *question.predict}:
                raise ValueError(f"questions[{number}].rates: expected the largest of fit and all of predict in them")
        return self
