"""One run of `make demo`: two models, each under 13 bucket configurations, predicted and then measured."""

import gzip
import json
from functools import cache
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from reference.bucketing import cap_name
from simulator.measure.report import draw_validation

from .drawing import DATA, render, save

TITLE = "One run of `make demo`"
SIZE = (8, 3.6)
ERRORS = ("error", "paired_error", "perfect_scaling_error", "no_overlap_error", "naive_overlap_error")
HEAD = """\
| model | bucket cap | measured | predicted | error | paired: error | perfect scaling | no overlap | naive overlap |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


@cache
def report() -> dict[str, Any]:
    """The `report.json` that `make demo` left."""
    loaded: dict[str, Any] = json.loads(gzip.decompress((DATA / "demo.json.gz").read_bytes()))
    return loaded


@cache
def panels() -> list[pd.DataFrame]:
    """The report's rows by model."""
    rows = pd.DataFrame(report()["rows"]).fillna({"cap_mb": float("inf")})
    return [of_model for _, of_model in rows.groupby("model", sort=False)]


def draw(data: pd.DataFrame, ax: Axes) -> Axes:
    """A configuration a place, as the demo itself draws it."""
    return draw_validation(data, ax)


def table() -> str:
    """The configurations in ready order, as the README shows them."""
    lines = [_line(row) for row in report()["rows"] if row["order"] == "ready"]
    rows = pd.concat(panels())
    means = " | ".join(f"{rows[error].abs().mean():.1%}" for error in ERRORS)
    lines.append(f"| all {len(rows)} configurations | mean of absolute values | | | {means} |")
    return HEAD + "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    cap = cap_name(row["cap_mb"] or float("inf"))
    times = [f"{row[column] / 1e6:.0f} ms" for column in ("measured_ns", "predicted_ns")]
    return "| " + " | ".join([row["model"], cap, *times, *(f"{row[error]:+.0%}" for error in ERRORS)]) + " |"


def caption() -> str:
    """In numbers."""
    told, models = report(), len(panels())
    low, high = max((row["quartiles_ns"] for row in told["rows"]), key=lambda quartiles: quartiles[1] / quartiles[0])
    return (
        f"Measured: {len(told['rows'])} configurations on two real Gloo ranks on two shared cores, paired with a "
        "reference beside each turn; predicted: before, from one trace and one calibration a model. Mean absolute "
        f"error {told['paired_mape']:.1%} paired, {told['mape']:.1%} by the clock. The reference took "
        f"{told['drift']:+.1%} compared with the calibration (median); the quartiles of the most restless "
        f"configuration lay at {low / 1e6:.0f} and {high / 1e6:.0f} ms. Of {told['pairs_apart']} pairs that differ "
        f"by more than noise {told['sign_errors']} were ranked wrongly; for {round(models * told['fastest_found'])} "
        f"of {models} models none beat the predicted fastest by more than noise; {told['coverage']:.0%} of the "
        "iterations lie inside the 90 % interval."
    )


def main() -> None:
    """Draw it again."""
    save("demo", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
    print(table())
