"""Figure 12 of the paper: buckets taken in turn by 1, 3 and 5 process groups."""

from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from simulator import predict

from .drawing import COMPUTATION, EXPOSED, SECOND, plain, render, save
from .setting import FABRICS, MODELS

TITLE = "Round-robin process groups"
SIZE = (3.6, 3.4)
GROUPS = (1, 3, 5)
GPUS = (8, 16, 32)
CAP_MB = 5.0
"""Enough buckets to share out."""


class Grouped(NamedTuple):
    """Milliseconds by number of process groups, one for each of `GPUS`."""

    title: str
    by_groups: dict[int, list[float]]


@cache
def panels() -> list[Grouped]:
    """One panel a model and fabric."""
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
    """Bars side by side."""
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
    """In numbers."""
    told = [f"{panel.title} {1 - panel.by_groups[5][-1] / panel.by_groups[1][-1]:.1%}" for panel in panels()]
    return (
        f"Simulated, traces and fabrics as above, buckets of {CAP_MB:g} MiB, which the process groups take in "
        f"turn. What five groups save over one on {GPUS[-1]} GPUs: {'; '.join(told)}. In the simulator collectives "
        "that run at the same time share the links' bytes a second, so more groups can only hide latency. The "
        "paper measured such groups of 1, 3 and 5."
    )


def main() -> None:
    """Draw it again."""
    save("process_groups", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
