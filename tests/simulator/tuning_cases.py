"""Random cases of `tune`, small enough to try every contiguous partition."""

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from ddplab.reference.trace import BucketLayout, Trace
from ddplab.simulator.fabric import Fabric, Linear, Processor, Timing
from ddplab.simulator.inputs_with_default_costs import complete
from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.tuning.plan_times import Objective, PlanTimes
from tests.strategies import iteration, trace_of

WORLD_SIZE = 2
DEFAULT = Policy()


@st.composite
def small_models(draw, *, parameters: int = 7, ranks: int = 1, cycles: int = 1, one_order: bool = True) -> Trace:
    """A trace of gradients of very unequal sizes, which become ready with very unequal gaps."""
    count = draw(st.integers(1, parameters))
    sizes = draw(st.lists(st.sampled_from([0, 1, 40, 700, 9_000, 50_000]), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))

    def one() -> object:
        moment = forward = draw(st.integers(0, 500))
        ready = [0] * count
        for index in order if one_order else draw(st.permutations(range(count))):
            moment += draw(st.sampled_from([1, 30, 200, 3000]))
            ready[index] = moment
        return iteration(forward, tuple(ready), moment + draw(st.integers(0, 300)), draw(st.integers(0, 100)))

    return trace_of([[one() for _ in range(cycles)] for _ in range(ranks)], sizes)


@st.composite
def fabrics(draw, *, slow_down: float = 1.0) -> Fabric:
    """A table that neither rises nor is a line, costs of copies and launches, and a slow-down of computing."""
    sizes = draw(st.lists(st.integers(0, 100_000), min_size=1, max_size=4, unique=True))
    times = [Timing(world_size=WORLD_SIZE, size_bytes=size, ns=draw(st.integers(0, 4000))) for size in sizes]
    copies = st.builds(Linear, fixed_ns=st.sampled_from([0, 20]), ns_per_byte=st.sampled_from([0, 0.01]))
    return Fabric(
        all_reduce=tuple(times),
        concurrency=1,
        processor=Processor(
            pack=draw(copies),
            copy_out=draw(copies),
            launch_ns=draw(st.sampled_from([0, 60, 300])),
            slow_down=slow_down,
        ),
    )


def plan_times(trace: Trace, fabric: Fabric, objective: Objective = "median", policy: Policy = DEFAULT) -> PlanTimes:
    return PlanTimes(complete(trace, fabric, policy=policy, assume=False), WORLD_SIZE, objective)


def contiguous_partitions(order: Sequence[int]) -> Iterator[BucketLayout]:
    """Every way to cut the order into buckets."""
    if not order:
        yield ()
    for first in range(1, len(order) + 1):
        for rest in contiguous_partitions(order[first:]):
            yield (tuple(order[:first]), *rest)
