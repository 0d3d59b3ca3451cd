"""Engine input: simulated ranks stand for all ranks."""

from dataclasses import replace
from itertools import chain

from hypothesis import given

from ..explore import examples
from ..strategies import engine_inputs


@examples(15)
@given(engine_inputs())
def test_every_rank_has_one_simulated_rank_that_does_the_same(engine_input):
    alike = engine_input.alike()
    assert tuple(alike) == engine_input.ranks
    assert sorted(chain(*alike.values())) == list(range(len(engine_input.represented_by)))
    assert all(rank in same for rank, same in alike.items())
    assert replace(engine_input, represented_by=None).alike() == {rank: [rank] for rank in engine_input.ranks}
