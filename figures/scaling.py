"""Iteration time on 1 to 256 GPUs (figure 9 of the paper)."""

from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes

from simulator import predict

from .drawing import COMPUTATION, EXPOSED, plain, render, save
from .traces_and_fabrics import FABRICS, MODELS

TITLE = "Scaling to 256 GPUs"
SIZE = (5.0, 3.4)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TICKS_MS = (100, 200, 500, 1_000, 2_000, 5_000)


class Scaling(NamedTuple):
    """Milliseconds of an iteration by fabric and GPUs: lower end of the 90 % interval, median, upper end."""

    model: str
    by_fabric: dict[str, list[tuple[float, float, float]]]


@cache
def panels() -> list[Scaling]:
    """One panel for each model."""
    return [
        Scaling(
            model,
            {
                fabric: [
                    (one.interval_ns[0] / 1e6, one.iteration_ns / 1e6, one.interval_ns[1] / 1e6)
                    for one in (predict(trace(), make_fabric(), world_size=gpus) for gpus in GPUS)
                ]
                for fabric, make_fabric in FABRICS.items()
            },
        )
        for model, trace in MODELS.items()
    ]


def draw(data: Scaling, ax: Axes) -> Axes:
    """Plot one line for each fabric, with intervals as a band."""
    for (fabric, rows), colour in zip(data.by_fabric.items(), (COMPUTATION, EXPOSED), strict=True):
        lows, middles, highs = zip(*rows, strict=True)
        ax.fill_between(GPUS, lows, highs, color=colour, alpha=0.2, linewidth=0)
        ax.plot(GPUS, middles, "o-", color=colour, markersize=4, label=fabric)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
    ax.set_yticks(TICKS_MS, [str(tick) for tick in TICKS_MS])
    ax.minorticks_off()
    ax.set_xlabel("GPUs")
    ax.set_ylabel("iteration, ms")
    ax.set_title(data.model, loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    ratios = []
    for panel in panels():
        for fabric, rows in panel.by_fabric.items():
            ratios.append(f"{panel.model} {fabric} {rows[-1][1] / rows[0][1]:.2f}")
    return (
        "Simulated with the same traces and fabrics, and buckets of 25 MiB; bands contain 90 % of iterations. "
        f"Iteration time on 256 GPUs over that on one GPU, where 1 is linear scaling: {', '.join(ratios)}. The paper "
        "calls its scaling near-linear at 256 GPUs. The Gloo-like ring is flat and has a high latency, which adds up "
        "over all ranks: beyond 32 GPUs it is slower than any library would be."
    )


def main() -> None:
    """Draw the figure and write its files."""
    save("scaling", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
