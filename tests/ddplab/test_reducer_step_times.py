"""Moments of a reducer's step: order, samples, and callbacks that come late."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddplab.validation import training_runs
from ddplab.validation.reducer_step_times import Iterations, StepMoment, Watch, by_iteration, from_samples, to_samples
from ddplab.validation.training_runs import TargetRun, Trainer, time_iterations, warmed_up

# Samples

moments = st.builds(
    StepMoment, st.sampled_from(["packed", "done"]), st.none() | st.integers(0, 9), st.integers(-(10**12), 10**12)
)


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_samples_are_read_as_they_were_written(data, ranks, iterations):
    some = st.lists(moments, min_size=1, max_size=5).map(tuple)
    by_rank = [tuple(data.draw(some) for _ in range(iterations)) for _ in range(ranks)]
    samples = to_samples(by_rank, model="m", turn=0)
    assert from_samples(samples) == by_rank
    assert set(samples["model"]) == {"m"}


def test_a_callback_that_comes_after_its_iteration_is_left_out():
    readings = [
        StepMoment("launched", 0, 1), StepMoment("ended", None, 5), StepMoment("done", 0, 6),
        StepMoment("launched", 0, 7), StepMoment("done", 0, 8), StepMoment("ended", None, 9),
    ]  # fmt: skip
    first, second = by_iteration(readings, [0, 5])
    assert [(one.kind, one.ns) for one in first] == [("launched", 1), ("ended", 5)]
    assert [(one.kind, one.ns) for one in second] == [("launched", 2), ("done", 3), ("ended", 4)]


# Real ranks

TINY = "tests.models_for_cli:tiny"


def watched_iterations(rank: int, _world_size: int) -> tuple[tuple[int, ...], Iterations]:
    trainer = Trainer(TINY, rank)
    with warmed_up(trainer, TargetRun({"bucket_cap_mb": 1e-4})) as ddp:
        result = time_iterations(trainer, ddp)
        assert not any(isinstance(one, Watch) for one in ddp.reducer.observers), "the watch is not removed"
    return result


def test_ranks_are_watched_in_the_order_of_an_iteration(two_ranks):
    by_rank = two_ranks.run(watched_iterations)
    assert by_rank[0][0] == by_rank[1][0]
    for number, times_ns in enumerate(by_rank[0][0]):
        ends = []
        for _, iterations in by_rank:
            at = {(one.kind, one.bucket): one.ns for one in iterations[number]}
            assert not any(kind == "done" for kind, _ in at), "callbacks would slow down a model that computes"
            buckets = {bucket for kind, bucket in at if kind == "launched"}
            assert len(buckets) > 1
            for bucket in buckets:
                order = ("packing", "packed", "launching", "launched", "woken", "copied_out")
                assert all(at[a, bucket] <= at[b, bucket] for a, b in pairwise(order))
            whole = ("buffers_received", "forward_computed", "backward_computed", "ended")
            assert all(at[a, None] <= at[b, None] for a, b in pairwise(whole))
            ends.append(at["ended", None])
        assert max(ends) == times_ns
    assert len(by_rank[0][1]) == training_runs.MEASURED_ITERATIONS
