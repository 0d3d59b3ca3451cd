"""Iteration time with buckets assigned in turn to 1, 3 and 5 process groups (figure 12 of the paper)."""

from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from simulator import predict

from .drawing import COMPUTATION, EXPOSED, SECOND, plain, render, save
from .traces_and_fabrics import FABRICS, MODELS

TITLE = "Round-robin process groups"
SIZE = (3.6, 3.4)
GROUPS = (1, 3, 5)
GPUS = (8, 16, 32)
CAP_MB = 5.0
"""Small enough for several buckets in each process group."""


class Grouped(NamedTuple):
    """Iteration times in milliseconds by number of process groups, one for each of `GPUS`."""

    title: str
    by_groups: dict[int, list[float]]


@cache
def panels() -> list[Grouped]:
    """One panel for each model and fabric."""
    return [_grouped(model, fabric) for fabric in FABRICS for model in MODELS]


def _grouped(model: str, fabric: str) -> Grouped:
    return Grouped(
        f"{model}, {fabric}",
        {
            groups: [
                predict(
                    MODELS[model](), FABRICS[fabric](), world_size=gpus, bucket_cap_mb=CAP_MB, process_groups=groups
                ).iteration_ns
                / 1e6
                for gpus in GPUS
            ]
            for groups in GROUPS
        },
    )


def draw(data: Grouped, ax: Axes) -> Axes:
    """Draw one bar for each number of process groups, grouped by number of GPUs."""
    places = np.arange(len(GPUS))
    for number, ((groups, times), colour) in enumerate(
        zip(data.by_groups.items(), (COMPUTATION, SECOND, EXPOSED), strict=True)
    ):
        ax.bar(places + 0.27 * (number - 1), times, 0.25, color=colour, label=f"{groups} group" + "s" * (groups > 1))
    ax.set_xticks(places, [str(gpus) for gpus in GPUS])
    ax.set_ylim(0, 1.3 * max(max(times) for times in data.by_groups.values()))
    ax.set_xlabel("GPUs")
    ax.set_ylabel("iteration, ms")
    ax.set_title(data.title, loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8, ncols=3, loc="upper center")
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    savings = [f"{panel.title} {1 - panel.by_groups[5][-1] / panel.by_groups[1][-1]:.1%}" for panel in panels()]
    return (
        f"Simulated with the same traces and fabrics, and buckets of {CAP_MB:g} MiB assigned to the process groups "
        f"in turn. Five groups save this fraction of the iteration with one group on {GPUS[-1]} GPUs: "
        f"{'; '.join(savings)}. In the simulator collectives that run at the same time share the bandwidth of the "
        "links, so more groups can only hide latency. The paper measured 1, 3 and 5 such groups."
    )


def main() -> None:
    """Draw the figure and write its files."""
    save("process_groups", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
