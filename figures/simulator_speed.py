"""Run time of the simulator against the number of ranks and of buckets, measured by `make bench-simulator`."""

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
    """Run time by ranks, and by buckets: tables with the columns along, size, engine, seconds."""
    rows = pd.read_csv(MEASURED)
    return [rows[rows["along"] == along] for along in ("ranks", "buckets")]


def draw(data: pd.DataFrame, ax: Axes) -> Axes:
    """Plot one line for each engine on logarithmic axes."""
    return draw_scaling(data, ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    ranks, _ = panels()
    events = ranks[ranks["engine"] == "events"]
    largest = events.iloc[events["size"].argmax()]
    return (
        f"The event replay of {largest['size']:,} different ranks takes {largest['seconds']:.1f} s, and its time "
        "grows linearly. Measured by `make bench-simulator` on two cores of an Intel Xeon at 2.5 GHz: seconds to "
        "simulate one iteration of ResNet-50 in five buckets by number of ranks (left), and on 16 ranks by number "
        "of buckets (right). The dotted line is linear growth."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE, shared="y")


if __name__ == "__main__":
    save("simulator_speed", files())
