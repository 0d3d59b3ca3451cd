"""How the simulator's own cost grows, as `make bench-simulator` measured it."""

from functools import cache

import pandas as pd
from matplotlib.axes import Axes

from benchmarks.simulator import draw as draw_scaling

from .drawing import FOLDER, render, save

TITLE = "The simulator's own cost"
SIZE = (5.0, 4.0)
MEASURED = FOLDER / "data" / "simulator_speed.csv"


@cache
def panels() -> list[pd.DataFrame]:
    """By ranks, and by buckets: columns along, size, engine, seconds."""
    rows = pd.read_csv(MEASURED)
    return [rows[rows["along"] == along] for along in ("ranks", "buckets")]


def draw(data: pd.DataFrame, ax: Axes) -> Axes:
    """A line an engine on two logarithmic axes."""
    return draw_scaling(data, ax)


def caption() -> str:
    """In numbers."""
    ranks, _ = panels()
    events = ranks[ranks["engine"] == "events"]
    largest = events.iloc[events["size"].argmax()]
    return (
        "Measured by `make bench-simulator`: seconds for one iteration of ResNet-50 in five buckets (left) and on "
        f"16 ranks (right), two cores of an Intel Xeon at 2.5 GHz. {largest['size']:,} different ranks by events "
        f"take {largest['seconds']:.1f} s; the dotted line is linear growth."
    )


def main() -> None:
    """Draw it again."""
    save("simulator_speed", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
