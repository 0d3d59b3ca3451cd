"""Iteration time against bucket cap, on up to 32 emulated V100s (figures 7 and 8 of the paper)."""

from collections.abc import Iterator
from functools import cache
from math import inf
from typing import NamedTuple

from matplotlib.axes import Axes

from ddplab.simulator.plot_colours import COMPUTATION, EXPOSED

from .drawing import Label, label_lines, plain, render, save
from .emulated_runs import BY_CLOCK, CLOCK_RUNS, Run, clock_rows
from .traces_and_fabrics import FABRICS

TITLE = "Latency against bucket size"
SIZE = (4.4, 3.6)
GPUS = (16, 32)
EACH_ALONE = 1e-6
"""Cap at which each gradient has a bucket; the paper's 0."""
CAPS_MB = {
    "ResNet-50": (EACH_ALONE, 5.0, 10.0, 25.0, 50.0),
    "BERT-Large": (EACH_ALONE, 10.0, 25.0, 50.0, 100.0, 200.0),
}
"""Caps of the paper."""
PLACES = (EACH_ALONE, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, inf)
"""Caps along the horizontal axis, evenly spaced."""
NAMES = {EACH_ALONE: "0", inf: "one"}
LIMITS = (0.93, 24.0)
TICKS = (1, 1.5, 2, 3, 5, 10, 20)
STYLES = ("-", "--", ":")
COLOURS = {"ResNet-50": EXPOSED, "BERT-Large": COMPUTATION}


class Line(NamedTuple):
    """Milliseconds of an iteration by bucket cap in MiB; `gpus` distinguishes lines of one model."""

    model: str
    gpus: str
    ms: dict[float, float]

    @property
    def slowest(self) -> float:
        """How many times as long the slowest cap takes as the fastest."""
        return max(self.ms.values()) / min(self.ms.values())

    @property
    def best_cap_mb(self) -> float:
        """The fastest cap."""
        return min(self.ms, key=self.ms.__getitem__)


class Caps(NamedTuple):
    """The lines of one panel."""

    title: str
    lines: tuple[Line, ...]
    is_by_clock: bool


def runs() -> Iterator[Run]:
    """All runs in virtual time."""
    for fabric in FABRICS:
        for model, caps_mb in CAPS_MB.items():
            for gpus in GPUS:
                for cap_mb in caps_mb:
                    yield Run(model, fabric, gpus, cap_mb)


@cache
def panels() -> list[Caps]:
    """Committed runs by the clock, and one panel in virtual time for each fabric."""
    by_clock = [
        Line("ResNet-50", ranks, {cap: row.measured_ns / 1e6 for cap, row in clock_rows(ranks).items()})
        for ranks in CLOCK_RUNS
    ]
    return [
        Caps("Gloo over links, by the clock", tuple(by_clock), is_by_clock=True),
        *(Caps(f"{fabric}, virtual time", _lines(fabric), is_by_clock=False) for fabric in FABRICS),
    ]


def _lines(fabric: str) -> tuple[Line, ...]:
    return tuple(
        Line(model, str(gpus), {cap: Run(model, fabric, gpus, cap).iteration_ms for cap in caps})
        for model, caps in CAPS_MB.items()
        for gpus in GPUS
    )


def draw(data: Caps, ax: Axes) -> Axes:
    """Plot each line over the caps, as a multiple of its fastest cap's time, on a logarithmic axis."""
    ax.set_yscale("log")
    ax.set_ylim(LIMITS)
    ax.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    ax.minorticks_off()
    ax.set_xlim(-0.5, len(PLACES) + 0.6)
    labels = []
    for number, line in enumerate(data.lines):
        fastest = min(line.ms.values())
        places = [PLACES.index(cap) for cap in sorted(line.ms)]
        times = [line.ms[cap] / fastest for cap in sorted(line.ms)]
        colour, is_named = COLOURS[line.model], line.gpus != str(GPUS[0])
        style = STYLES[number] if data.is_by_clock else "-" if is_named else "--"
        ax.plot(places, times, "o", linestyle=style, color=colour, markersize=4, linewidth=1.4)
        if data.is_by_clock:
            labels.append(Label(line.gpus, places[-1], times[-1], colour))
        elif is_named:
            labels.append(Label(line.model, places[-1], times[-1], colour))
    label_lines(labels, ax)
    ax.set_xticks(range(len(PLACES)), [NAMES.get(cap, f"{cap:g}") for cap in PLACES], fontsize=8)
    ax.set_xlabel("bucket cap, MiB (0: a bucket for each gradient)")
    ax.set_ylabel("iteration, times that of the fastest cap")
    ax.set_title(data.title, loc="left", fontsize=10)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    clock, *virtual = panels()
    lines = {
        (panel.title, line.model): line for panel in virtual for line in panel.lines if line.gpus == str(GPUS[-1])
    }
    widest = max(lines.values(), key=lambda line: line.slowest)
    narrowest = min(lines.values(), key=lambda line: line.slowest)
    fastest = "; ".join(
        f"{model}, {title.partition(',')[0]} {line.best_cap_mb:g} MiB ({line.slowest:.2f} times)"
        for (title, model), line in lines.items()
    )
    by_clock = "; ".join(f"{line.gpus}, {line.best_cap_mb:g} MiB ({line.slowest:.2f} times)" for line in clock.lines)
    return (
        f"The slowest bucket cap takes between {narrowest.slowest:.2f} and {widest.slowest:.0f} times as long as the "
        f"fastest one on {GPUS[-1]} GPUs, depending on the network. Left: measured; {BY_CLOCK}. Fastest cap, and how "
        f"many times as long the slowest takes: {by_clock}. Middle and right: our reducer on emulated V100s in "
        f"virtual time, over modelled networks (solid: {GPUS[-1]} GPUs, dashed: {GPUS[0]}; traces "
        f"and networks as in the previous figure): {fastest}. NCCL is modelled, because it runs on GPUs only. The "
        "paper finds (figures 7 and 8) that the bucket size alone can change latency by more than 2 times."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE, shared="y")


if __name__ == "__main__":
    save("bucket_sizes", files())
