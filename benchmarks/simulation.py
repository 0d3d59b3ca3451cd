"""How fast the simulator is: one ResNet-50 iteration (161 parameters, 2 ranks), from buckets to the last event."""

import statistics
import time
from collections.abc import Callable

from reference import models
from reference.bucketing import bucket_caps, plan_buckets
from reference.parameters import size_bytes, trainable_parameters
from simulator.engines.closed_form import solve
from simulator.engines.replay import make_job, replay
from simulator.fabric import Fabric, Processor
from simulator.workload.rank_work import RankWork

RUNS = 50


def main() -> None:
    """Print one line a bucket cap."""
    module, _ = models.build("resnet50")
    sizes = [size_bytes(parameter) for parameter in trainable_parameters(module).values()]
    order = list(range(len(sizes)))[::-1]
    work = RankWork(100_000_000, tuple(300_000_000 - 1_000_000 * i for i in order[::-1]), 301_000_000, 20_000_000)
    steady = Fabric.from_alpha_beta(50_000, 1e9, concurrency=2)
    fluid = steady.model_copy(update={"processor": Processor(compute_slowdown=1.5, collective_slowdown=1.5)})
    print(__doc__)
    print(f"{'cap MB':>8} {'buckets':>8} {'replay ms':>10} {'with slow-downs ms':>19} {'closed form ms':>15}")
    for cap in (25, 1, 1e-6):
        buckets = plan_buckets("ready", sizes, bucket_caps(cap), ready_order=order)

        def simulate(engine: Callable[..., object], fabric: Fabric, buckets: list[list[int]] = buckets) -> None:
            engine(make_job([work, work], buckets, sizes, fabric), fabric)

        times = [_milliseconds(simulate, *how) for how in ((replay, steady), (replay, fluid), (solve, steady))]
        print(f"{cap:8g} {len(buckets):8} {times[0]:10.2f} {times[1]:19.2f} {times[2]:15.2f}")


def _milliseconds(action: Callable[..., None], *arguments: object) -> float:
    """Median of several runs."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        action(*arguments)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
