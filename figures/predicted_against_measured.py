"""Errors of the predictions of every configuration of the committed runs, beside those of simpler predictions."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from matplotlib.axes import Axes

from ddplab.prediction_errors import BASELINES, ValidationRow
from validation.part_fg_runs import CommittedRun, committed_runs
from validation.residual_plot import SMALL_ERROR, Residual, draw_residuals

from .drawing import render, save

TITLE = "Predicted against measured"
SIZE = (8.0, 8.6)
NAMES = {
    "h100": "H100,", "v100": "V100,", "resnet18": "ResNet-18", "resnet50": "ResNet-50", "gru": "GRU", "mlp": "MLP",
    "unet": "U-Net",
}  # fmt: skip

Runs = Mapping[str, Sequence[Residual]]
"""The errors of each run's configurations, by the name of the run."""


@cache
def panels() -> list[Runs]:
    """Current predictions from each run's own trace and calibration, beside its measurements by the clock."""
    runs = sorted(committed_runs(), key=lambda run: run.part)
    return [{_name(run): [residual(row) for row in run.current.rows] for run in runs}]


def residual(row: ValidationRow) -> Residual:
    """Return the errors of a row's predictions."""
    low, high = (ns / row.measured_ns - 1 for ns in row.interval_ns)
    baselines = {name.replace("_", " "): getattr(row, f"{name}_error") for name in BASELINES}
    return Residual(error=row.error, baselines=baselines, interval=(low, high))


def _name(run: CommittedRun) -> str:
    """Name of the run in words, in two lines: what ran, on which network."""
    *what, network, ranks = run.name.replace("nodes-of-2", "nodes of 2").split("-")
    words = " ".join(NAMES.get(word, word) for word in what)
    return f"{words},\n{network.replace('gbit', ' Gbit/s')}, {ranks.replace('ranks', ' ranks')}"


def draw(data: Runs, ax: Axes) -> Axes:
    """Draw one line for each configuration, in one group for each run."""
    return draw_residuals(data, ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    (runs,) = panels()
    residuals = [one for of_run in runs.values() for one in of_run]
    errors = [one.error for one in residuals]
    small = sum([abs(error) <= SMALL_ERROR for error in errors])
    baselines = ", ".join(
        f"{name} {np.mean([abs(one.baselines[name]) for one in residuals]):.1%}" for name in residuals[0].baselines
    )
    emulated = sum(name.startswith("emulated") for name in runs)
    return (
        f"Predictions are {np.mean(np.abs(errors)):.1%} off on average and {max(errors, key=abs):+.1%} at worst, by "
        f"the clock; {small} of {len(errors)} configurations are within 10 % (grey). Mean absolute errors of "
        f"simpler predictions from the same inputs: {baselines}. Each line is a bucket cap and a bucket order; each "
        f"group is one of {len(runs)} committed runs on two to sixteen real Gloo ranks, over loopback and virtual "
        f"links, on two cores. In {emulated} of them the devices are emulated and sleep for the times of a GPU; in "
        "the others the models compute. Predicted from one trace and one calibration for each run, recorded "
        "beforehand; bars are predicted 90 % intervals. The full score, with published measurements on GPUs, is in "
        "[validation/score.md](../validation/score.md)."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE)


if __name__ == "__main__":
    save("predicted_against_measured", files())
