"""Figure 2 of the paper: the same bytes in messages of different sizes, NCCL and Gloo."""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from validation.cases import AllReduceCase, load_case

from .drawing import DATA, EXPOSED, FOLDER, plain, render, save

TITLE = "All-reduce time against message size"
TOTAL_MIB = 16
SIZE = (5.0, 3.4)
CASE = FOLDER.parent / "validation" / "cases" / "all_reduce_echo_a100.toml"
GPUS = 16
TICKS_KIB = (4, 16, 64, 256, 1_024, 4_096, 16_384)


class Sizes(NamedTuple):
    """Milliseconds for `TOTAL_MIB` by KiB of a message."""

    title: str
    ms: dict[float, float]


@cache
def panels() -> list[Sizes]:
    """NCCL as published, Gloo as measured here."""
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
    """One line on two logarithmic axes."""
    ax.loglog(list(data.ms), list(data.ms.values()), "o-", color=EXPOSED, markersize=4)
    ax.set_xticks(TICKS_KIB, [str(tick) for tick in TICKS_KIB])
    ax.minorticks_off()
    ax.set_xlabel("size of a message, KiB")
    ax.set_ylabel(f"{TOTAL_MIB} MiB in such messages, ms")
    ax.set_title(data.title, loc="left", fontsize=10)
    return plain(ax)


def caption() -> str:
    """In numbers."""
    nccl_ms, gloo_ms = (panel.ms for panel in panels())
    return (
        f"{TOTAL_MIB} MiB are added up in messages of one size, all issued at once. Left: one all-reduce of NCCL "
        f"on {GPUS} A100s as published with Echo, times the number of messages; messages of {min(nccl_ms):g} KiB "
        f"take {nccl_ms[min(nccl_ms)] / min(nccl_ms.values()):.0f} times as long as the best size. Right: Gloo on "
        f"two processes, measured here, medians of nine; {min(gloo_ms):g} KiB take "
        f"{gloo_ms[min(gloo_ms)] / min(gloo_ms.values()):.0f} times as long as the best. A few large messages beat "
        "many small ones by far. The paper's figure 2 makes the point with 60 million parameters on two GPUs of "
        "one server."
    )


def main() -> None:
    """Draw it again."""
    save("all_reduce_sizes", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
