"""Delayed all-reduces: no bit changes, whichever parameters are delayed."""

from hypothesis import given
from hypothesis import strategies as st

from ..explore import examples
from ..scenarios import assert_same
from ..strategies import caps_mb
from . import delayed_all_reduce_bodies as bodies

TRIGGER = "layers.0.weight"
modes = st.fixed_dictionaries({"bucket_cap_mb": caps_mb(), "gradient_as_bucket_view": st.booleans()})


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
    for ours, torchs in two_ranks.run(bodies.delayed, *script):
        assert_same(ours, torchs)


def test_delayed_parameters_leave_the_buckets(two_ranks):
    for seen in two_ranks.run(bodies.delayed_details):
        assert seen["bucketed"] == [TRIGGER, *tower_names(2)]
        assert seen["unused"] == [0.0] * 3
        assert seen["copy"]
