"""What torch's class does beside averaging: mixed precision, delayed all-reduces, meshes, groups, torch.compile."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from . import bodies, drop_in_bodies, scenarios
from .drop_in_bodies import Precision
from .explore import examples
from .strategies import caps_mb

LOW = st.sampled_from(["float16", "bfloat16"])
ANY = st.sampled_from([None, "float16", "bfloat16", "float32"])
widths = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
TRIGGER = "layers.0.weight"
modes = st.fixed_dictionaries({"bucket_cap_mb": caps_mb(), "gradient_as_bucket_view": st.booleans()})


# Mixed precision


@examples(12)
@given(widths, st.builds(Precision, LOW, ANY, ANY), caps_mb())
def test_mixed_precision_is_torchs(two_ranks, layers, precision, cap_mb):
    """Bit for bit. Torch's class runs without streams here, and its views keep old averages, so without views."""
    body = drop_in_bodies.mixed_like_torch
    for ours, torchs in two_ranks.run(body, layers, precision, {"bucket_cap_mb": cap_mb}):
        bodies.assert_same(ours[:3] + ours[-1:], torchs[:3] + torchs[-1:])
        assert ours[-2].dtype == torch.int64  # torch casts integer buffers too
        assert torch.equal(ours[-3], torchs[-3])


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
    body = drop_in_bodies.mixed_like_one_process
    for got, expected in two_ranks.run(body, layers, precision, mode | search, kind, accumulate, set_to_none):
        bodies.assert_same(got, expected)


@pytest.mark.parametrize("kind", drop_in_bodies.LAYERS)
def test_mixed_precision_reaches_the_weights_of_torchs_layers(two_ranks, kind):
    """Some keep references to their weights, or compute them in hooks; copies of the module work too."""
    for got, expected in two_ranks.run(drop_in_bodies.mixed_layers, kind):
        bodies.assert_same(got, expected)


@pytest.mark.parametrize("reduce", [None, "float32"])
def test_sparse_gradients_are_averaged_in_mixed_precision(two_ranks, reduce):
    for sparse, dense in two_ranks.run(drop_in_bodies.mixed_sparse, Precision("bfloat16", reduce)):
        bodies.assert_same(sparse, dense)


def test_only_forward_sees_low_precision(two_ranks):
    """Not integers, ignored parameters, the state dict, a script after an error, the module without its wrapper."""
    low, full = torch.bfloat16, torch.float32
    for rank, seen in enumerate(two_ranks.run(drop_in_bodies.mixed_details)):
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
    for original, copies in two_ranks.run(drop_in_bodies.mixed_after_pickling):
        for copy in copies:
            bodies.assert_same(copy, original)


# Delayed all-reduces


def tower_names(count: int) -> list[str]:
    """Parameters whose gradients come before that of the first layer's weight."""
    return [f"layers.{layer}.{name}" for layer in range(1, count) for name in ("weight", "bias")]


@st.composite
def delays(draw) -> tuple[int, list[str]]:
    """Number of layers, and names of delayed parameters: (3, ["layers.1.bias", "scale"])."""
    count = draw(st.integers(2, 4))
    return count, draw(st.lists(st.sampled_from([*tower_names(count), "scale"]), min_size=1, unique=True))


@examples(15)
@given(delays(), st.sampled_from(["some", "with the trigger", "all"]), modes, st.integers(1, 2), st.booleans())
def test_delayed_all_reduces_change_no_bits(two_ranks, delay, which, mode, accumulate, set_to_none):
    """Whichever parameters are delayed; with no_sync and with gradients that are zeroed in place."""
    count, names = delay
    if which == "all":
        names = [*tower_names(count), "scale"]
    if which != "some":
        names = [*names, TRIGGER]
    script = (count, names, TRIGGER, mode, accumulate, set_to_none)
    for ours, torchs in two_ranks.run(drop_in_bodies.delayed, *script):
        bodies.assert_same(ours, torchs)


@examples(6)
@given(delays(), modes)
def test_delayed_all_reduces_are_torchs(two_ranks, delay, mode):
    """Torch's class delays no parameter of the outermost module, and never waits; here it is made to."""
    count, names = delay
    names = [name for name in names if name != "scale"]
    if names:
        for ours, torchs in two_ranks.run(drop_in_bodies.delayed_like_torch, count, names, TRIGGER, mode):
            bodies.assert_same(ours, torchs)


def test_delayed_parameters_leave_the_buckets(two_ranks):
    for seen in two_ranks.run(drop_in_bodies.delayed_details):
        assert seen["bucketed"] == [TRIGGER, *tower_names(2)]
        assert seen["unused"] == [0.0] * 3
        assert seen["copy"]


# Meshes


@examples(5)
@given(st.sampled_from([2, 6, 16]), modes)
def test_a_tensor_parallel_module_trains_as_under_torchs_class(four_ranks, hidden, mode):
    """On a slice of a mesh; torch's class loses its parameters in the first forward pass, ours keeps its shards."""
    for ours, torchs, state in four_ranks.run(drop_in_bodies.sharded, hidden, mode):
        bodies.assert_same(ours, torchs)
        assert state["module.up.weight"] == (hidden // 2, 4)
        assert state["module.down.weight"] == (4, hidden // 2)
        assert len(state) == 6


def test_a_tensor_parallel_module_that_is_refused_stays_as_it_was(four_ranks):
    """Ranks are compared first; only a module that is wrapped loses its DTensors."""
    for error, same, got, expected in four_ranks.run(drop_in_bodies.refused_shards):
        assert "different plans or bucket caps" in error
        assert same
        bodies.assert_same(got, expected)


def test_tensor_parallelism_and_mixed_precision_go_together(four_ranks):
    assert max(four_ranks.run(drop_in_bodies.sharded_in_low_precision, 6)) < 0.05


# Process groups


@examples(5)
@given(
    st.lists(st.sampled_from([(0, 1), (2, 3), (1, 2, 3), (0, 1, 2, 3), (3,)]), min_size=1, max_size=3),
    st.fixed_dictionaries(
        {"gradient_as_bucket_view": st.booleans(), "find_unused_parameters": st.booleans()},
    ),
    st.booleans(),
)
def test_a_module_trains_on_in_a_new_process_group(four_ranks, groups, options, fails):
    """As under torch's class, to rounding: its buckets are rebuilt later than ours. Also after an exception."""
    for rank, (ours, torchs, rebuilt) in enumerate(
        four_ranks.run(drop_in_bodies.update_groups, groups, options, fails)
    ):
        for got, expected in zip(ours, torchs, strict=True):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        if rank in groups[-1]:
            assert rebuilt == (not options["find_unused_parameters"])


def test_reductions_in_low_precision_follow_the_module_into_a_new_group(four_ranks):
    assert four_ranks.run(drop_in_bodies.update_with_a_comm_hook) == [[1.5, 0.5]] * 2 + [[1.5]] * 2


@examples(20)
@given(
    st.lists(st.sampled_from(list(scenarios.ODD_BUFFERS)), min_size=1, max_size=5),
    st.integers(0, 2),
    st.sampled_from([1, 100, 10**6]),
)
def test_tensors_of_any_layout_are_sent_from_any_rank_of_a_group(four_ranks, kinds, source, piece_bytes):
    """Expanded and conjugate ones too: torch's class raises for the former and leaves the latter as they are."""
    for seen in four_ranks.run(drop_in_bodies.broadcast_odd_tensors, kinds, source, piece_bytes):
        assert all(got == sent for got, sent in seen)


# Features switched on after construction


@examples(8)
@given(modes, st.booleans())
def test_a_graph_that_is_declared_static_after_construction(two_ranks, mode, search):
    """One parameter is unused, which the first iteration shows; the second declaration is one too many."""
    body = drop_in_bodies.static_graph_later
    for ours, torchs in two_ranks.run(body, mode | {"find_unused_parameters": search}):
        bodies.assert_same(ours, torchs)


# torch.compile


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("order", ["wrapper", "module"])
def test_compiled_modules_see_the_bits_of_torchs_class(two_ranks, order, backend):
    """A compiled wrapper and a wrapped compiled module; graphs are split at the same buckets."""
    for (ours, our_graphs), (torchs, torch_graphs) in two_ranks.run(drop_in_bodies.compiled, order, backend, {}):
        bodies.assert_same(ours, torchs)
        assert our_graphs == torch_graphs > 1


@pytest.mark.parametrize("order", ["wrapper", "module"])
def test_compiled_modules_work_in_low_precision(two_ranks, order):
    for compiled, plain in two_ranks.run(drop_in_bodies.compiled_in_low_precision, order):
        bodies.assert_same(compiled, plain)


def test_torchs_replicate_works_on_our_class(two_ranks):
    for ours, torchs in two_ranks.run(drop_in_bodies.replicated):
        bodies.assert_same(ours, torchs)
