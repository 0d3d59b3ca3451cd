"""Engine input: simulated ranks stand for all ranks."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from simulator.engines.closed_form import simulate

from ..strategies import engine_inputs


@given(engine_inputs(), st.data())
def test_ranks_that_do_the_same_need_to_be_simulated_once(engine_input, data):
    copies = data.draw(st.lists(st.integers(0, len(engine_input.ranks) - 1), max_size=3))
    rows = [*range(len(engine_input.ranks)), *copies]
    more = replace(engine_input.at(rows), ranks=tuple(range(len(rows))))
    assert simulate(more, "events").iteration_ns == simulate(engine_input, "events").iteration_ns
