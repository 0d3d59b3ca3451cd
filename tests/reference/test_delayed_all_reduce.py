"""Delayed all-reduces: no bit changes, whichever parameters are delayed."""

import pickle
from contextlib import nullcontext
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab.reference.data_parallel import DistributedDataParallel

from ..explore import examples
from ..scenarios import assert_same_pairs, batch, gradients
from ..strategies import caps_mb
from .drop_in_bodies import Tower

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


def _train_tower(
    wrap: type[nn.Module],
    rank: int,
    layers: int,
    names: list[str] | None,
    trigger: str,
    options: dict,
    accumulate: int,
    set_to_none: bool,
) -> list:
    module = Tower(layers)
    parameters = dict(module.named_parameters())
    if names is not None:
        options = options | {
            "delay_all_reduce_named_params": [(name, parameters[name]) for name in names],
            "param_to_hook_all_reduce": parameters[trigger],
        }
    ddp = wrap(module, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        last = (step + 1) % accumulate == 0
        with nullcontext() if last else ddp.no_sync():
            ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
        if last:
            seen.append([g.clone() for g in gradients(ddp)])
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return [*seen, [p.detach().clone() for p in ddp.parameters()]]


def delayed(rank: int, _world_size: int, layers: int, names: list[str], *script: Any) -> tuple[list, list]:
    """Ours with delayed all-reduces, and torch's class without."""
    return _train_tower(DistributedDataParallel, rank, layers, names, *script), _train_tower(
        TorchDDP, rank, layers, None, *script
    )


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
    assert_same_pairs(two_ranks.run(delayed, *script))


def delayed_details(rank: int, _world_size: int) -> dict[str, object]:
    """The buckets, and a delayed parameter that no rank uses."""
    module = Tower(2)
    unused = nn.Parameter(torch.ones(3))
    module.register_parameter("unused", unused)
    first = module.layers[0].weight
    ddp = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("unused", unused), ("scale", module.scale)],
        param_to_hook_all_reduce=first,
    )
    ddp(batch(rank, 3, 4)).sum().backward()
    other = pickle.loads(pickle.dumps(ddp))
    other.zero_grad()
    other(batch(rank, 3, 4)).sum().backward()
    return {
        "bucketed": [
            name for name, p in ddp.module.named_parameters() if any(p is q for q in ddp.reducer.parameters)
        ],
        "unused": unused.grad.tolist(),
        "copy": torch.equal(other.module.scale.grad, module.scale.grad),
    }


def test_delayed_parameters_leave_the_buckets(two_ranks):
    for seen in two_ranks.run(delayed_details):
        assert seen["bucketed"] == [TRIGGER, *tower_names(2)]
        assert seen["unused"] == [0.0] * 3
        assert seen["copy"]
