"""Records: flat, typed, immutable pieces of a file, and how a broken one is told in one line."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Record(BaseModel):
    """A flat, typed, immutable record; a field that the schema does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def first_problem(error: ValidationError) -> str:
    """One line for the first problem that pydantic found: the field, then the reason."""
    first = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    reason = first["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return (f"{field}: " if field else "") + reason[:1].lower() + reason[1:] + more
