"""Part (d): committed reports of `ddplab validate`, one folder of `validation/runs` each."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reference.records import first_problem

RUNS = Path(__file__).parent / "runs"


class RunReport(BaseModel):
    """What the score shows of a `simulator.report.Report`; its other fields are left alone."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    mape: float
    paired_mape: float
    worst_error: float
    sign_errors: int
    coverage: float
    yardsticks: dict[str, float] = {}
    rows: tuple[dict[str, object], ...] = Field(min_length=1)


@dataclass(frozen=True)
class Run:
    """A report and the name of its folder."""

    name: str
    report: RunReport


def load_runs(folder: Path = RUNS) -> list[Run]:
    """All reports, by name; none where there are none.

    Raises:
        ValueError: One that cannot be used; one line, which names file, field and reason.
    """
    return [Run(path.parent.name, _load(path)) for path in sorted(folder.glob("*/report.json"))]


def _load(path: Path) -> RunReport:
    try:
        return RunReport.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: not a report of `ddplab validate`: {first_problem(error)}") from None
