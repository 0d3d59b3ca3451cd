"""Computations behind the tutorials' pictures: the ring, times that repeat, intervals in words, states of buckets."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorials import inside, repeats, ring
from tutorials.buying import interval


@given(st.integers(2, 6), st.integers(0, 20), st.randoms(use_true_random=False))
def test_the_ring_gives_every_rank_the_sum_and_each_rank_sends_less_than_two_arrays(ranks, length, random):
    arrays = [np.array([random.randint(-9, 9) for _ in range(length)], dtype=int) for _ in range(ranks)]
    states, sent = ring.all_reduce(arrays)
    assert len(states) == 2 * (ranks - 1) + 1
    assert all(np.array_equal(one, np.sum(arrays, axis=0)) for one in states[-1])
    assert sent <= 2 * (ranks - 1) * -(-length // ranks)


def test_each_time_repeats_if_its_own_two_fastest_rounds_agree():
    rounds = iter([[10, 20], [12, 30], [14, 21]])
    (one, other) = repeats.least(lambda: next(rounds))
    assert (one, other) == (repeats.Least(10, 12), repeats.Least(20, 21))


@given(st.lists(st.floats(1, 1000), min_size=repeats.ATTEMPTS, max_size=repeats.ATTEMPTS))
def test_measuring_ends_when_the_time_repeats_or_the_machine_is_too_busy(times):
    given_times = iter(times)
    (found,) = repeats.least(lambda: [next(given_times)])
    measured = len(times) - len(list(given_times))
    assert found == repeats.Least(*sorted(times[:measured])[:2])
    assert found.repeats or (measured == repeats.ATTEMPTS and "too busy" in str(found))


@pytest.mark.parametrize(
    ("shares", "found"),
    [([0.5] * repeats.ATTEMPTS, None), ([0.95, 0.5, 0.95], repeats.Least(10, 10, 0.95))],
)
def test_a_time_does_not_repeat_while_steady_work_takes_the_cores(shares, found):
    of_rank = iter(shares)
    ranks = SimpleNamespace(run=lambda _function: [1.0, next(of_rank)])
    (measured,) = repeats.least(lambda: [10], ranks)
    assert measured.repeats == (found is not None)
    assert measured == found or "too busy" in str(measured)


@given(st.tuples(*[st.floats(0.01, 1000)] * 3))
def test_the_ends_of_an_interval_are_told_apart(values):
    middle, low, high = values
    words = interval((middle, low, high), "minutes")
    shown = words.replace(" minutes (", " ").replace(" to ", " ").removesuffix(")").split()
    assert [float(one) for one in shown] == pytest.approx(values, rel=0.06)
    if min(abs(a / b - 1) for a, b in ((middle, low), (middle, high), (low, high))) > 0.01:
        assert len(set(shown)) == 3


def test_a_bucket_keeps_its_state_until_the_next_event_of_its_own():
    diary = [
        inside.Event("begin", None, (1, 1)),
        inside.Event("gradient", 1, (1, 1)),
        inside.Event("ready", 0, (0, 1)),
        inside.Event("launched", 0, (0, 1)),
    ]
    ax = inside.draw_diary(diary)
    colours = [plt.matplotlib.colors.to_hex(patch.get_facecolor()) for patch in ax.patches[: 2 * len(diary)]]
    white = "#ffffff"
    assert colours[0::2] == [white, white, inside.STATES["ready"], inside.STATES["launched"]]
    assert colours[1::2] == [white] * 4
    assert [text.get_text() for text in ax.texts] == ["1"] * 6
    plt.close(ax.figure)
