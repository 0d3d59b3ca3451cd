"""Checks of arguments: a wrong one is named in one line, whichever function it was given to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, PlainValidator, create_model

from ..reference.files.reading import SHORT, Schema, one_line_errors
from ..reference.files.value_ranges import Nanoseconds, WorldSize
from .workload.variation import Straggler

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it checks its arguments, other than settings, by their annotations.

    A wrong argument is a ValueError of one line that names the argument; `validate_call` would give its position.
    """
    parameters = signature(function)

    @cache
    def schema() -> type[BaseModel]:  # made at the first call, because that takes time
        fields: dict[str, Any] = {
            name: (one.annotation, None)
            for name, one in parameters.parameters.items()
            if one.kind is not one.VAR_KEYWORD
        }
        return create_model(function.__name__, __config__=ConfigDict(strict=True), **fields)

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        given = parameters.bind_partial(*arguments, **named).arguments  # a wrong one is named before a missing one
        settings = given.pop("settings", {})
        with one_line_errors():
            valid = schema()(**given)
        return function(**{name: getattr(valid, name) for name in given}, **settings)  # type: ignore[call-arg]

    return call


def one_or_several(kind: type) -> PlainValidator:
    """Check an argument that is one instance, or several by name."""

    def check(given: object) -> object:
        for name, one in given.items() if isinstance(given, Mapping) else [("", given)]:
            if not isinstance(one, kind):
                seen = SHORT.repr(one) + (f" as {name!r}" if name else "")
                raise ValueError(f"expected a {kind.__name__}, or several by name, got {seen}")
        return given

    return PlainValidator(check)


def _listed(values: object) -> list[Any]:
    if isinstance(values, str | Schema) or not isinstance(values, Iterable):
        raise ValueError(f"expected a list of values, got {SHORT.repr(values)}; write [...] around it")
    return list(values)


Listed = BeforeValidator(_listed)
"""Takes any collection as a list."""
NumpyToo = BeforeValidator(lambda number: number.item() if isinstance(number, np.integer) else number)
"""Takes whole numbers of numpy."""
Ranks = Annotated[WorldSize, NumpyToo]
Stragglers = Annotated[Sequence[InstanceOf[Straggler]], Listed]
Measured = Mapping[Ranks, Annotated[Nanoseconds, Field(gt=0), NumpyToo]]
"""Measured median iteration times, in nanoseconds, by number of ranks."""
Batches = Annotated[Sequence[Annotated[int, NumpyToo]], Listed]
