"""Mixed precision: forward and backward in one dtype, all-reduces in another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ..explore import examples
from ..scenarios import assert_same, assert_same_pairs
from ..strategies import caps_mb
from . import mixed_precision_bodies as bodies
from .mixed_precision_bodies import Precision

LOW = st.sampled_from(["float16", "bfloat16"])
ANY = st.sampled_from([None, "float16", "bfloat16", "float32"])
widths = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
modes = st.fixed_dictionaries({"bucket_cap_mb": caps_mb(), "gradient_as_bucket_view": st.booleans()})


@examples(12)
@given(widths, st.builds(Precision, LOW, ANY, ANY), caps_mb())
def test_mixed_precision_is_torchs(two_ranks, layers, precision, cap_mb):
    """Bit for bit. Torch's class runs without streams here, and its views keep old averages, so without views."""
    body = bodies.mixed_like_torch
    for ours, torchs in two_ranks.run(body, layers, precision, {"bucket_cap_mb": cap_mb}):
        (steps, shift, integers, dtypes), (torchs_steps, torchs_shift, _, torchs_dtypes) = ours, torchs
        assert_same([steps, shift, dtypes], [torchs_steps, torchs_shift, torchs_dtypes])
        assert integers.dtype == torch.int64  # torch casts integer buffers too


@examples(20)
@given(
    widths,
    st.builds(Precision, ANY, ANY, ANY),
    modes,
    st.sampled_from([{}, {"static_graph": True}, {"find_unused_parameters": True}]),
    st.sampled_from([{}, {"again": "re-entrant"}, {"again": "not re-entrant"}, {"twice": True}]),
    st.integers(1, 2),
    st.booleans(),
)
def test_mixed_precision_averages_what_each_rank_computes_in_low_precision(
    two_ranks, layers, precision, mode, search, kind, accumulate, set_to_none
):
    """Bit for bit, with the same casts on one process: views, no_sync, evaluation in between, checkpoints."""
    if kind.get("again") == "re-entrant":
        search = {"static_graph": True}
    if search.get("static_graph"):
        accumulate = 1
    body = bodies.mixed_like_one_process
    assert_same_pairs(two_ranks.run(body, layers, precision, mode | search, kind, accumulate, set_to_none))


@pytest.mark.parametrize("kind", bodies.LAYERS)
def test_mixed_precision_reaches_the_weights_of_torchs_layers(two_ranks, kind):
    """Some keep references to their weights, or compute them in hooks; copies of the module work too."""
    assert_same_pairs(two_ranks.run(bodies.mixed_layers, kind))


@pytest.mark.parametrize("reduce", [None, "float32"])
def test_sparse_gradients_are_averaged_in_mixed_precision(two_ranks, reduce):
    assert_same_pairs(two_ranks.run(bodies.mixed_sparse, Precision("bfloat16", reduce)))


def test_only_forward_sees_low_precision(two_ranks):
    """Not integers, ignored parameters, the state dict, a script after an error, the module without its wrapper."""
    low, full = torch.bfloat16, torch.float32
    for rank, seen in enumerate(two_ranks.run(bodies.mixed_details)):
        inside = seen["in forward"]
        assert inside.pop("count") == torch.int64
        assert inside.pop("own") == full
        assert seen["after the wrapper"] == full
        assert seen["torch's names"] == {low}
        assert seen["own"] == [float(rank)] * 4
        assert seen["after errors"] == {full}
        state = seen["state"]
        assert state.pop("module.shift") == torch.float16
        assert state.pop("module.steps") == state.pop("module.count") == torch.int64
        assert set(state.values()) == {full}


def test_a_pickled_module_keeps_its_mixed_precision(two_ranks):
    for original, copies in two_ranks.run(bodies.mixed_after_pickling):
        for copy in copies:
            assert_same(copy, original)


def test_a_script_that_saves_after_ctrl_c_in_forward_saves_full_precision(two_ranks):
    assert two_ranks.run(bodies.interrupted_in_forward) == [(True, {torch.float32})] * 2
