"""Iteration time on 1 to 256 emulated V100s (figure 9 of the paper)."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes

from ddplab.simulator.plot_colours import COMPUTATION, EXPOSED, INK

from .drawing import Label, label_lines, plain, render, save
from .emulated_runs import Run
from .traces_and_fabrics import FABRICS, MODELS

TITLE = "Scaling to 256 GPUs"
SIZE = (5.0, 3.4)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TICKS = (1, 2, 5, 10, 20, 50, 100)


class Scaling(NamedTuple):
    """Multiples of one GPU's iteration by fabric and GPUs: lower end of the 90 % interval, emulated, upper end."""

    model: str
    by_fabric: dict[str, list[tuple[float, float, float]]]


def runs() -> Iterator[Run]:
    """All runs in virtual time."""
    for model in MODELS:
        for fabric in FABRICS:
            for gpus in GPUS:
                yield Run(model, fabric, gpus)


@cache
def panels() -> list[Scaling]:
    """One panel for each model."""
    return [Scaling(model, {fabric: _line(model, fabric) for fabric in FABRICS}) for model in MODELS]


def _line(model: str, fabric: str) -> list[tuple[float, float, float]]:
    one_gpu_ms = Run(model, fabric, 1).iteration_ms
    line = []
    for gpus in GPUS:
        run = Run(model, fabric, gpus)
        low, high = run.predict().interval_ns
        line.append((low / 1e6 / one_gpu_ms, run.iteration_ms / one_gpu_ms, high / 1e6 / one_gpu_ms))
    return line


def draw(data: Scaling, ax: Axes) -> Axes:
    """Plot one line for each fabric, with intervals as a band."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(0.9, 900)
    ax.set_ylim(0.8, 150)
    ax.axhline(1, color=INK, linewidth=0.6)
    labels = [Label("linear scaling", 64, 0.88, INK)]
    for (fabric, rows), colour in zip(data.by_fabric.items(), (COMPUTATION, EXPOSED), strict=True):
        lows, middles, highs = zip(*rows, strict=True)
        ax.fill_between(GPUS, lows, highs, color=colour, alpha=0.2, linewidth=0)
        ax.plot(GPUS, middles, "o-", color=colour, markersize=4)
        labels.append(Label(f"{fabric}: {middles[-1]:.3g} times", GPUS[-1], middles[-1], colour))
    label_lines(labels, ax)
    ax.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
    ax.set_yticks(TICKS, [str(tick) for tick in TICKS])
    ax.minorticks_off()
    ax.set_xlabel("GPUs")
    ax.set_ylabel("iteration, times that of one GPU")
    ax.set_title(data.model, loc="left", fontsize=10)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    at_256 = {(panel.model, fabric): rows[-1][1] for panel in panels() for fabric, rows in panel.by_fabric.items()}
    ratios = ", ".join(f"{model} {fabric} {ratio:.2f}" for (model, fabric), ratio in at_256.items())
    return (
        f"On {GPUS[-1]} GPUs with NVLink and 100 Gbit/s adapters an iteration of ResNet-50 takes "
        f"{at_256['ResNet-50', 'NCCL-like']:.2f} times as long as on one GPU; over the slow ring it takes "
        f"{at_256['ResNet-50', 'Gloo-like']:.0f} times as long. Our reducer on emulated V100s in virtual time, with "
        "the traces and networks of the figures above and buckets of 25 MiB; bands: predicted 90 % intervals. Times "
        f"that of one GPU, where 1 is linear scaling: {ratios}. We could not measure {GPUS[-1]} GPUs by the "
        "clock. The paper calls its scaling near-linear at 256 GPUs (figure 9). The Gloo-like ring is flat and has a "
        "high latency, which adds up over all ranks: beyond 32 GPUs it is slower than any library would be."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE, shared="y")


if __name__ == "__main__":
    save("scaling", files())
