"""One run of `make demo`: two models with 13 bucket configurations each, predicted and then measured."""

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
    """The `report.json` of the run."""
    loaded: dict[str, Any] = json.loads(gzip.decompress((DATA / "demo.json.gz").read_bytes()))
    return loaded


@cache
def panels() -> list[pd.DataFrame]:
    """Rows of the report, one table for each model."""
    rows = pd.DataFrame(report()["rows"]).fillna({"cap_mb": float("inf")})
    return [of_model for _, of_model in rows.groupby("model", sort=False)]


def draw(data: pd.DataFrame, ax: Axes) -> Axes:
    """Plot measured and predicted time of each configuration, as `make demo` does."""
    return draw_validation(data, ax)


def table() -> str:
    """Markdown table of the configurations in ready order, for the README."""
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
    """Caption whose numbers are computed from the data."""
    run, models = report(), len(panels())
    low, high = max((row["quartiles_ns"] for row in run["rows"]), key=lambda quartiles: quartiles[1] / quartiles[0])
    return (
        f"Measured: {len(run['rows'])} configurations on two real Gloo ranks on two shared cores, with a speed check "
        "beside each turn. Predicted: beforehand, from one trace and one calibration for each model. Mean absolute "
        f"error {run['paired_mape']:.1%} paired, {run['mape']:.1%} by the clock. The speed check changed by "
        f"{run['drift']:+.1%} since the calibration (median); the quartiles of the noisiest configuration were "
        f"{low / 1e6:.0f} and {high / 1e6:.0f} ms. Of {run['pairs_apart']} pairs that differ by more than noise "
        f"{run['sign_errors']} were ranked wrongly. For {round(models * run['fastest_found'])} of {models} models no "
        f"configuration was faster than the predicted fastest by more than noise. {run['coverage']:.0%} of the "
        "iterations lie inside the 90 % interval."
    )


def main() -> None:
    """Draw the figure and write its files."""
    save("demo", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
    print(table())
