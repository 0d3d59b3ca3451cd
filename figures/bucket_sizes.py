"""Iteration time against bucket cap, on 16 and on 32 GPUs (figures 7 and 8 of the paper)."""

from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes

from simulator import predict

from .drawing import COMPUTATION, EXPOSED, plain, render, save
from .traces_and_fabrics import FABRICS, MODELS

TITLE = "Latency against bucket size"
SIZE = (4.2, 3.4)
GPUS = (16, 32)
CAPS_MB = {"ResNet-50": (1e-6, 5.0, 10.0, 25.0, 50.0), "BERT-Large": (1e-6, 10.0, 25.0, 50.0, 100.0, 200.0)}
"""Caps of the paper; its 0 is one bucket for each gradient."""
TICKS_MS = (80, 100, 120, 160, 200, 250, 300, 400, 600, 1_000, 2_000, 4_000)


class Latencies(NamedTuple):
    """Milliseconds of an iteration by GPUs and cap: lower end of the 90 % interval, median, upper end."""

    title: str
    caps_mb: tuple[float, ...]
    by_gpus: dict[int, list[tuple[float, float, float]]]


@cache
def panels() -> list[Latencies]:
    """One panel for each model and fabric."""
    return [_latencies(model, fabric) for fabric in FABRICS for model in MODELS]


def _latencies(model: str, fabric: str) -> Latencies:
    by_gpus = {}
    for gpus in GPUS:
        predictions = [
            predict(MODELS[model](), FABRICS[fabric](), world_size=gpus, bucket_cap_mb=cap) for cap in CAPS_MB[model]
        ]
        by_gpus[gpus] = [
            (one.interval_ns[0] / 1e6, one.iteration_ns / 1e6, one.interval_ns[1] / 1e6) for one in predictions
        ]
    return Latencies(f"{model}, {fabric}", CAPS_MB[model], by_gpus)


def draw(data: Latencies, ax: Axes) -> Axes:
    """Plot one line for each number of GPUs, with intervals as bars."""
    for (gpus, rows), colour in zip(data.by_gpus.items(), (COMPUTATION, EXPOSED), strict=True):
        lows, middles, highs = zip(*rows, strict=True)
        below = [middle - low for low, middle in zip(lows, middles, strict=True)]
        above = [high - middle for middle, high in zip(middles, highs, strict=True)]
        ax.errorbar(
            range(len(rows)), middles, yerr=[below, above], fmt="o-", color=colour, capsize=3, markersize=4,
            label=f"{gpus} GPUs",
        )  # fmt: skip
    ax.set_xticks(range(len(data.caps_mb)), [f"{cap:.0f}" for cap in data.caps_mb])
    ax.set_yscale("log")
    ax.set_yticks(TICKS_MS, [str(tick) for tick in TICKS_MS])
    ax.minorticks_off()
    ax.set_ylim(*_limits(data))
    ax.set_xlabel("bucket cap, MiB (0: a bucket for each gradient)")
    ax.set_ylabel("iteration, ms")
    ax.set_title(data.title, loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def _limits(data: Latencies) -> tuple[float, float]:
    """Limits of the vertical axis, with space below the shortest and above the longest time."""
    shown = [ms for rows in data.by_gpus.values() for row in rows for ms in row]
    return min(shown) / 1.6, max(shown) * 1.2


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    fastest = []
    for panel in panels():
        middles = [middle for _, middle, _ in panel.by_gpus[GPUS[-1]]]
        best = min(range(len(middles)), key=middles.__getitem__)
        fastest.append(f"{panel.title} {panel.caps_mb[best]:.0f} MiB ({max(middles) / min(middles):.2f} times)")
    return (
        "Simulated with the traces and fabrics of the previous figure. Bars contain 90 % of iterations, from the "
        "variation of the trace and the uncertainty of the fabric (synthesised BERT does not vary). The fastest cap "
        f"on {GPUS[-1]} GPUs, and how many times as long the slowest cap takes: {'; '.join(fastest)}. The paper "
        "finds that the bucket size alone can change latency by more than 2 times."
    )


def main() -> None:
    """Draw the figure and write its files."""
    save("bucket_sizes", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
