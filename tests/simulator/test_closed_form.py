"""The closed form: it agrees with the event replay, and refuses iterations that it cannot solve."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator.engines.closed_form import has_constant_speeds, latencies_ns, simulate
from ddplab.simulator.engines.timeline import EngineInput
from ddplab.simulator.fabric import LinkShare

from ..explore import examples
from ..strategies import engine_inputs

MANY = 5


@examples(30)
@given(engine_inputs(), st.integers(1, 3), st.sampled_from([1, 100]))
def test_events_and_recurrence_agree_to_the_nanosecond(engine_input, concurrency, times):
    """Also where many collectives wait for one of several slots."""
    steady = (LinkShare(),) * len(engine_input.sharing)
    engine_input = replace(
        engine_input, cost_ns=times * engine_input.cost_ns, concurrency=concurrency, sharing=steady
    )
    by_events, by_recurrence = simulate(engine_input, "events"), simulate(engine_input, "closed_form")
    for moments in ("end_ns", "start_ns", "done_ns"):
        np.testing.assert_array_equal(getattr(by_events, moments), getattr(by_recurrence, moments))


@examples(60)
@given(engine_inputs(), st.sampled_from([1.0 + 2**-31, 1.1, 1.5, 3.9]), st.sampled_from([1, 999, 10**8]), st.data())
def test_many_iterations_with_slow_downs_agree_with_the_events(engine_input, slow_down, times, data):
    """In every moment, by arrays over the iterations and by one replay of each; durations differ between them."""
    shape, seed = (MANY, *engine_input.duration_ns.shape), data.draw(st.integers(0, 999))
    factors = np.random.default_rng(seed).integers(0, 2 * times, shape)
    many = replace(
        engine_input,
        duration_ns=engine_input.duration_ns * factors,
        cost_ns=engine_input.cost_ns * times,
        concurrency=1,
        slow_down=slow_down,
        meets={only: np.broadcast_to(ranks, (MANY, len(ranks))) for only, ranks in engine_input.meets.items()},
    )
    by_events, by_recurrence = simulate(many, "events"), simulate(many)
    for moments in ("end_ns", "start_ns", "done_ns"):
        np.testing.assert_array_equal(getattr(by_events, moments), getattr(by_recurrence, moments))
    np.testing.assert_array_equal(latencies_ns(many), by_events.end_ns[..., -1].max(axis=-1))


@examples(30)
@given(engine_inputs(), st.lists(st.sampled_from([1.0, 1.1, 1.5, 3.9]), min_size=1, max_size=2 * MANY), st.data())
def test_iterations_of_one_schedule_with_different_costs_agree_with_the_events(engine_input, slow_downs, data):
    """The ends of the error bands of a prediction: few or many of them, some with constant speeds."""
    concurrency = data.draw(st.sampled_from([1, 1, 2]))
    times = data.draw(st.lists(st.integers(0, 99), min_size=len(slow_downs), max_size=len(slow_downs)))
    ends = [
        replace(engine_input, cost_ns=engine_input.cost_ns * more, slow_down=slow_down, concurrency=concurrency)
        for slow_down, more in zip(slow_downs, times, strict=True)
    ]
    assert latencies_ns(EngineInput.stack(ends)).tolist() == [latencies_ns(end, "events") for end in ends]


@examples(10)
@given(engine_inputs())
def test_collectives_that_slow_each_other_down_need_the_events_if_they_can_run_at_the_same_time(engine_input):
    """Fails if the closed form, which needs constant speeds, were taken for collectives that share a link."""
    assert has_constant_speeds(engine_input)
    sharing = (LinkShare(slow_down=2.0),) * len(engine_input.sharing)
    together = replace(engine_input, sharing=sharing, concurrency=2)
    in_turn = replace(together, concurrency=1)
    assert (has_constant_speeds(together), has_constant_speeds(in_turn)) == (not sharing, True)
