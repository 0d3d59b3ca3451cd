"""Run time of the simulator: one ResNet-50 iteration in five buckets, from engine input to timeline.

The trace was recorded with `ddplab record --model resnet50 --iterations 8`. The variation `fitted` samples the
compute times of different ranks from it. Times are medians of several runs, with quartiles; peak memory is that of
the whole program. The command fails if a goal is missed.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddplab import Fabric, Policy, Trace, Variation, predict, sweep
from ddplab.simulator.engines.closed_form import Engine, simulate
from ddplab.simulator.engines.timeline import EngineInput
from ddplab.simulator.fabric import Processor
from ddplab.simulator.plot_colours import COMPUTATION, COPIES, EXPOSED, QUIET
from ddplab.simulator.schedule.schedule import build_schedule
from ddplab.simulator.step_costs import price_schedule
from ddplab.simulator.workload.compute_times import IterationSampler, recorded_model

TRACE = Path(__file__).parent / "resnet50.json.gz"
FIGURE = Path("out/simulator_speed")
FIVE_BUCKETS = Policy(bucket_cap_mb=None)
STEADY = Fabric.from_alpha_beta(50_000, 1e9, source="50 us, 1 GB/s")
FLUID = STEADY.model_copy(update={"processor": Processor(slow_down=1.2)})
COLOURS = {"events": EXPOSED, "events, slow-downs": COPIES, "closed form": COMPUTATION}
RANKS = (1, 10, 100, 1_000, 10_000, 100_000)
CAPS_MB = (1000.0, 25.0, 5.0, 1.0, 0.1, 1e-6)


@dataclass(frozen=True)
class Goal:
    """A limit in seconds for the median run time of an action.

    Attributes:
        name: Description that is printed before the times.
        limit_s: The median must be below this.
        runs: Number of timed runs.
        action: The timed function.
    """

    name: str
    limit_s: float
    runs: int
    action: Callable[[], object]

    def is_reached(self) -> bool:
        """Time the action and print one line; return whether the median is below the limit."""
        low, middle, high = _times(self.runs, self.action)
        is_reached = middle < self.limit_s
        verdict = f"must be under {self.limit_s:g} s" + ("" if is_reached else "  MISSED")
        print(f"{self.name:55} {middle:8.4f} s ({low:.4f} to {high:.4f}), {verdict}", flush=True)
        return is_reached


def main() -> None:
    """Check all goals, and plot how run time grows; exit with the names of missed goals, if any."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=FIGURE, help="path of the figure and its data, without endings")
    out: Path = options.parse_args().out
    trace = Trace.load(TRACE)
    print(__doc__)
    missed = [goal.name for goal in goals(trace) if not goal.is_reached()]
    rows = scaling(trace)
    print(rows.to_string(index=False, float_format="%.5f"))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows.to_csv(out.with_suffix(".csv"), index=False)
    figure = Figure(figsize=(10, 4), layout="constrained")
    draw(rows[rows["along"] == "ranks"], figure.add_subplot(1, 2, 1))
    draw(rows[rows["along"] == "buckets"], figure.add_subplot(1, 2, 2))
    figure.savefig(out.with_suffix(".png"), dpi=120)
    print(f"figure: {out.with_suffix('.png')}")
    if missed:
        sys.exit(f"missed: {'; '.join(missed)}")


def goals(trace: Trace) -> Iterator[Goal]:
    """All goals; the inputs of an action are built when the iterator reaches its goal."""
    for name, fabric in (("", STEADY), (", with slow-downs", FLUID)):
        for ranks, limit_s, runs in ((1_024, 0.2, 9), (16_384, 4.0, 3)):
            engine_input = _engine_input(trace, fabric, ranks)
            yield Goal(
                f"{ranks:,} different ranks by events{name}", limit_s, runs, partial(simulate, engine_input, "events")
            )
        action, limit_s = partial(_predict, trace, fabric, 100_000), 0.015 if fabric == FLUID else 0.01
        yield Goal(f"100,000 identical ranks, 8 iterations{name}", limit_s, 15, action)
    yield Goal("1,000 configurations on all cores", 8.0, 3, partial(_sweep, trace))


def scaling(trace: Trace) -> pd.DataFrame:
    """Time each engine by number of ranks and of buckets; columns along, size, engine, seconds."""
    rows: list[dict[str, Any]] = []
    engines: dict[str, tuple[Engine, Fabric]] = {
        "events": ("events", STEADY),
        "events, slow-downs": ("events", FLUID),
        "closed form": ("closed_form", STEADY),
    }
    for name, (engine, fabric) in engines.items():
        for ranks in RANKS:
            action = partial(simulate, _engine_input(trace, fabric, ranks), engine)
            _low, seconds, _high = _times(3 if ranks > 1_000 else 15, action)
            rows.append({"along": "ranks", "size": ranks, "engine": name, "seconds": seconds})
        for cap in CAPS_MB:
            engine_input = _engine_input(trace, fabric, 16, Policy(bucket_cap_mb=cap))
            _low, seconds, _high = _times(9, partial(simulate, engine_input, engine))
            size = len(engine_input.schedule.collectives)
            rows.append({"along": "buckets", "size": size, "engine": name, "seconds": seconds})
    return pd.DataFrame(rows)


def draw(rows: pd.DataFrame, ax: Axes) -> Axes:
    """Plot run time on logarithmic axes, with a line of linear growth for comparison."""
    along = rows["along"].iloc[0]
    for engine, of_engine in rows.groupby("engine", sort=False):
        ax.loglog(of_engine["size"], of_engine["seconds"], marker="o", label=engine, color=COLOURS[engine])
    events = rows[rows["engine"] == "events"]
    largest = events.iloc[events["size"].argmax()]
    sizes = events["size"]
    ax.loglog(sizes, largest["seconds"] * sizes / largest["size"], color=QUIET, linestyle=":", label="linear")
    ax.set_xlabel("different ranks, 5 buckets" if along == "ranks" else "buckets, 16 different ranks")
    ax.set_ylabel("seconds per iteration")
    ax.grid(which="both", alpha=0.2)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax


def _engine_input(trace: Trace, fabric: Fabric, ranks: int, policy: Policy = FIVE_BUCKETS) -> EngineInput:
    model = recorded_model(trace)
    sampler = IterationSampler(model.compute_times, ranks, Variation(kind="fitted", iterations=1))
    costs = price_schedule(build_schedule(policy, model), fabric, policy, ranks)
    return costs.engine_input(sampler, sampler.draw([0]), 0)


def _predict(trace: Trace, fabric: Fabric, world_size: int) -> None:
    assert len(predict(trace, fabric, world_size=world_size, bucket_cap_mb=None).buckets) == 5


def _sweep(trace: Trace) -> None:
    rows = sweep(
        trace,
        {
            f"fabric {number}": Fabric.from_alpha_beta(5_000 + 500 * number, 1e9 + 1e8 * number)
            for number in range(10)
        },
        world_sizes=[2**power for power in range(1, 11)],
        bucket_caps_mb=[20 + number for number in range(5)],
        orders=["ready", "reverse"],
    )
    assert len(rows) == 1_000


def _times(runs: int, action: Callable[[], object]) -> tuple[float, float, float]:
    """Quartiles of the seconds that an action takes, after one untimed run."""
    action()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    low, middle, high = statistics.quantiles(seconds, n=4)
    return low, middle, high


if __name__ == "__main__":
    main()
