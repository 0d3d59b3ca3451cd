"""Part (d): committed reports of `ddplab validate`, one folder of `validation/runs` each."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reference.bucketing import cap_name
from reference.records import first_problem

from .rows import RULES, Contest, Row, Scored, winner

RUNS = Path(__file__).parent / "runs"
YARDSTICKS = ("perfect scaling", "no overlap", "naive overlap")


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RunRow(_Read):
    """What the score shows of a `simulator.report.Row`."""

    model: str
    cap_mb: float | None
    order: str
    hook: str
    buckets: int
    measured_ns: int
    paired_ns: int
    paired_quartiles_ns: tuple[int, int]
    predicted_ns: int
    perfect_scaling_error: float
    no_overlap_error: float
    naive_overlap_error: float

    @property
    def name(self) -> str:
        """Of the configuration."""
        hook = "" if self.hook == "none" else f", {self.hook}"
        return f"{cap_name(float('inf') if self.cap_mb is None else self.cap_mb)} {self.order}{hook}"

    def yardstick_ns(self, name: str) -> float:
        """What a yardstick says; the report has its error against the paired time."""
        error: float = getattr(self, f"{name.replace(' ', '_')}_error")
        return (1 + error) * self.paired_ns


class RunReport(_Read):
    """What the score shows of a `simulator.report.Report`; its other fields are left alone."""

    mape: float
    paired_mape: float
    worst_error: float
    pairs_apart: int
    sign_errors: int
    coverage: float
    rows: tuple[RunRow, ...] = Field(min_length=1)


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


def score(run: Run) -> Scored:
    """Its predictions beside what the clock said, and of each model which configuration is the fastest."""
    rows = [
        Row(
            part="d",
            case=run.name,
            group=row.model,
            what=row.name,
            calibrated="trace and calibration before",
            predicted_ns=row.predicted_ns,
            measured_ns=row.measured_ns,
            yardsticks_ns={name: row.yardstick_ns(name) for name in YARDSTICKS},
        )
        for row in run.report.rows
    ]
    models = dict.fromkeys(row.model for row in run.report.rows)
    return Scored(tuple(rows), tuple(_contest(run, model) for model in models))


def _contest(run: Run, model: str) -> Contest:
    """Paired times: the configurations had their turns one after the other."""
    entrants = {row.name: row for row in run.report.rows if row.model == model}
    times = {
        name: {
            "measured": row.paired_ns,
            "predicted": row.predicted_ns,
            **{rule: row.yardstick_ns(rule) for rule in RULES},
        }
        for name, row in entrants.items()
    }
    fastest = winner(times, "measured")
    others = {name: row for name, row in entrants.items() if name != fastest}
    first = entrants[fastest]
    return Contest(
        part="d",
        case=run.name,
        what=model,
        predicted=winner(times, "predicted"),
        measured=fastest,
        lead=min((row.paired_ns / first.paired_ns - 1 for row in others.values()), default=0.0),
        is_tie=any(row.paired_quartiles_ns[0] <= first.paired_quartiles_ns[1] for row in others.values())
        or not others,
        yardsticks={rule: winner(times, rule) for rule in RULES},
    )
