"""Data parallelism over tensor parallelism, on a mesh of two dimensions."""

from hypothesis import given
from hypothesis import strategies as st

from ..explore import examples
from ..scenarios import assert_same
from ..strategies import caps_mb
from . import tensor_parallel_bodies as bodies

modes = st.fixed_dictionaries({"bucket_cap_mb": caps_mb(), "gradient_as_bucket_view": st.booleans()})


@examples(5)
@given(st.sampled_from([2, 6, 16]), modes)
def test_a_tensor_parallel_module_trains_as_under_torchs_class(four_ranks, hidden, mode):
    """On a slice of a mesh; torch's class loses its parameters in the first forward pass, ours keeps its shards."""
    for (ours, state), (torchs, _) in four_ranks.run(bodies.sharded, hidden, mode):
        assert_same(ours, torchs)
        assert state["module.up.weight"] == (hidden // 2, 4)
        assert state["module.down.weight"] == (4, hidden // 2)
        assert len(state) == 6


def test_a_tensor_parallel_module_that_is_refused_stays_as_it_was(four_ranks):
    """Ranks are compared first; only a module that is wrapped loses its DTensors."""
    for error, same, got, expected in four_ranks.run(bodies.refused_shards):
        assert "different plans or bucket caps" in error
        assert same
        assert_same(got, expected)


def test_tensor_parallelism_and_mixed_precision_go_together(four_ranks):
    assert max(four_ranks.run(bodies.sharded_in_low_precision, 6)) < 0.05
