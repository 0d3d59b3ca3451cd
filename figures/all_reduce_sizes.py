"""Time to all-reduce the same bytes in messages of different sizes, with NCCL and Gloo (figure 2 of the paper)."""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from ddplab.simulator.plot_colours import EXPOSED
from validation.cases import AllReduceCase, load_case

from .drawing import DATA, FOLDER, plain, render, save

TITLE = "All-reduce time against message size"
TOTAL_MIB = 16
SIZE = (5.0, 3.4)
CASE = FOLDER.parent / "validation" / "cases" / "all_reduce_echo_a100.toml"
GPUS = 16
TICKS_MS = (1, 10, 100, 1_000)
TICKS_KIB = (4, 16, 64, 256, 1_024, 4_096, 16_384)


class Sizes(NamedTuple):
    """Milliseconds to all-reduce `TOTAL_MIB`, by message size in KiB."""

    title: str
    ms: dict[float, float]


@cache
def panels() -> list[Sizes]:
    """Published times of NCCL, and times of Gloo measured by `python -m figures.measure messages`."""
    return [
        Sizes(f"NCCL, {GPUS} A100, published", _published(CASE)),
        Sizes("Gloo, 2 processes, measured here", _measured(DATA / "gloo_messages.csv")),
    ]


def _published(path: Path) -> dict[float, float]:
    case = load_case(path)
    assert isinstance(case, AllReduceCase)
    table = next(table for table in case.tables if table.gpus == GPUS)
    total = TOTAL_MIB * 2**20
    times = zip(table.bytes, table.us, strict=True)
    return {size / 1024: total / size * us / 1e3 for size, us in times if 4096 <= size <= total}


def _measured(path: Path) -> dict[float, float]:
    with path.open(newline="") as file:
        return {int(row["message_bytes"]) / 1024: float(row["median_ms"]) for row in csv.DictReader(file)}


def draw(data: Sizes, ax: Axes) -> Axes:
    """Plot one line on logarithmic axes."""
    ax.loglog(list(data.ms), list(data.ms.values()), "o-", color=EXPOSED, markersize=4)
    ax.set_xticks(TICKS_KIB, [str(tick) for tick in TICKS_KIB])
    ax.set_yticks(TICKS_MS, [f"{tick:,}" for tick in TICKS_MS])
    ax.minorticks_off()
    ax.set_ylim(0.2, 6_000)
    ax.margins(x=0.1)
    best = min(data.ms, key=data.ms.__getitem__)
    for size in (min(data.ms), best):
        ax.annotate(
            f"{data.ms[size]:,.1f} ms",
            (size, data.ms[size]),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    ax.set_xlabel("message size, KiB")
    ax.set_ylabel(f"{TOTAL_MIB} MiB in messages of this size, ms")
    ax.set_title(data.title, loc="left", fontsize=10)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    nccl_ms, gloo_ms = (panel.ms for panel in panels())
    return (
        f"A few large messages are up to {_gain(nccl_ms):.0f} times as fast as many small ones. Time to all-reduce "
        f"{TOTAL_MIB} MiB in messages of one size. Left: one NCCL all-reduce on {GPUS} A100s, as published with "
        f"Echo, times the number of messages; messages of {min(nccl_ms):g} KiB take {_gain(nccl_ms):.0f} times as "
        "long as those of the best size. Right: Gloo on two processes, all messages issued at once, measured here, "
        f"medians of nine repetitions; messages of {min(gloo_ms):g} KiB take {_gain(gloo_ms):.0f} times as long as "
        "those of the best size. Figure 2 of the paper shows the same for 60 million parameters on two GPUs of one "
        "server."
    )


def _gain(ms: dict[float, float]) -> float:
    """How many times as long the smallest messages take as those of the best size."""
    return ms[min(ms)] / min(ms.values())


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE, shared="y")


if __name__ == "__main__":
    save("all_reduce_sizes", files())
