"""Events happen in order of time, and at one time in the order in which they were entered."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.engines.event_queue import EventQueue, Signal, Slots

MOMENTS = st.integers(0, 5)


@given(st.lists(st.tuples(MOMENTS, MOMENTS), max_size=10))
def test_actions_happen_in_order_of_time_and_entry(delays_ns):
    """Also those that an action enters."""
    events, happened = EventQueue(), []

    def act(number):
        happened.append((events.now_ns, number))
        if number < len(delays_ns):
            events.at(events.now_ns + delays_ns[number][1], act, number + len(delays_ns))

    for number, (moment_ns, _) in enumerate(delays_ns):
        events.at(moment_ns, act, number)
    expected = {number: moment_ns for number, (moment_ns, _) in enumerate(delays_ns)}
    expected |= {number + len(delays_ns): sum(both) for number, both in enumerate(delays_ns)}
    events.run()
    assert events.next_ns is None
    assert {number: moment_ns for moment_ns, number in happened} == expected
    first = [one for one in happened if one[1] < len(delays_ns)]
    assert first == sorted(first)
    assert [moment_ns for moment_ns, _ in happened] == sorted(expected.values())


def test_a_process_starts_before_anything_else_and_passes_what_has_happened():
    events, said = EventQueue(), []
    signal = Signal(events)

    def process(name):
        said.append(f"{name} starts")
        yield signal
        said.append(f"{name} goes on at {events.now_ns}")

    def begin(name):
        events.start(process(name))
        said.append(f"{name} entered")

    events.at(3, begin, "a")
    events.at(3, said.append, "after a")
    events.at(4, lambda _: signal.send())
    events.at(5, begin, "b")
    events.run()
    assert said == ["a entered", "a starts", "after a", "a goes on at 4", "b entered", "b starts", "b goes on at 5"]


@given(st.integers(1, 3), st.lists(st.tuples(MOMENTS, MOMENTS), max_size=8))
def test_slots_are_taken_first_come_first_served(count, holds_ns):
    events, started, inside = EventQueue(), [], set()
    slots = Slots(events, count)

    def hold(number, hold_ns):
        over = Signal(events)
        yield slots.take()
        started.append(number)
        inside.add(number)
        assert len(inside) <= count
        events.at(events.now_ns + hold_ns, lambda _: over.send())
        yield over
        inside.remove(number)
        slots.give_back()

    for number, (moment_ns, hold_ns) in enumerate(holds_ns):
        events.at(moment_ns, events.start, hold(number, hold_ns))
    events.run()
    assert started == sorted(range(len(holds_ns)), key=lambda number: holds_ns[number][0])
