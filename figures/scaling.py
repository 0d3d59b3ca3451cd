"""Figure 9 of the paper: an iteration on 1 to 256 GPUs."""

from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes

from simulator import predict

from .drawing import COMPUTATION, EXPOSED, plain, render, save
from .setting import FABRICS, MODELS

TITLE = "Scaling to 256 GPUs"
SIZE = (5.0, 3.4)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TICKS_MS = (100, 200, 500, 1_000, 2_000, 5_000)


class Scaling(NamedTuple):
    """Milliseconds by fabric, one for each of `GPUS`: lower end, median and upper end."""

    model: str
    by_fabric: dict[str, list[tuple[float, float, float]]]


@cache
def panels() -> list[Scaling]:
    """One panel a model."""
    return [
        Scaling(
            model,
            {
                fabric: [
                    (one.interval_ns[0] / 1e6, one.iteration_ns / 1e6, one.interval_ns[1] / 1e6)
                    for one in (predict(trace(), described(), world_size=gpus) for gpus in GPUS)
                ]
                for fabric, described in FABRICS.items()
            },
        )
        for model, trace in MODELS.items()
    ]


def draw(data: Scaling, ax: Axes) -> Axes:
    """A line a fabric, with the interval as a band."""
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
    """In numbers."""
    told = []
    for panel in panels():
        for fabric, rows in panel.by_fabric.items():
            told.append(f"{panel.model} {fabric} {rows[-1][1] / rows[0][1]:.2f}")
    return (
        "Simulated, traces and fabrics as above, buckets of 25 MiB; bands hold 90 % of iterations. An iteration "
        f"on 256 GPUs over one on a single GPU, where 1 is linear scaling: {', '.join(told)}. The paper calls its "
        "scaling near-linear at 256 GPUs. The Gloo-like ring is a flat one with a slow start, whose latency adds "
        "up over all ranks: past 32 it is worse than any library would be."
    )


def main() -> None:
    """Draw it again."""
    save("scaling", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
