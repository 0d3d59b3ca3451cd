"""torch's composable functions `replicate()`, as subjects of the conformance kit."""

import pytest

from ddplab.conformance.class_under_test import Subject

from .conformance_bench import TORCHS, outcomes

BY_DDP = "torch.distributed._composable:replicate"
BY_FSDP = "torch.distributed._composable.replicate_with_fsdp:replicate"
LACKING = {
    BY_DDP: {
        *("buffers", "ignored parameters", "mixed precision", "first pass of a static graph", "plans"),
        *("uneven inputs", "sparse gradients"),
    },
    BY_FSDP: {
        *("construction", "buffers", "process group", "ignored parameters", "nested outputs", "untouched gradients"),
        *("mixed precision", "checkpoints", "skipped all-reduces", "list of bucket caps", "plans"),
        *("first pass of a static graph", "comm hooks", "compressing hooks", "uneven inputs", "sparse gradients"),
        *("bucket layout", "unused parameters", "static graph", "gradient views", "same as another"),
    },
}
"""Checks that do not apply in torch 2.13."""
FAILING = {
    BY_DDP: {},
    BY_FSDP: {
        "special values": "half-precision gradient 0, 40000 on this rank",
        "several backward passes": "a backward pass for each output",
        "a backward pass that raises": "an error before the first gradient, inside the module",
    },
}
"""Checks that fail in torch 2.13, and where.

FSDP2 divides gradients in half precision by only a part of the number of ranks before the sum, which on four ranks
overflows. It launches all-reduces in the order in which backward passes of modules end, so ranks whose orders differ
mix gradients up. After a backward pass that raised an error, it averages nothing before `reset_iter_state()`.
"""
SHORT = ("any timing", "overlap", "special parameters", "real models", "accumulation", "buffers")


def compare(found, name):
    failed = {check: one.message for check, one in found.items() if one.outcome == "failed"}
    expected = {check: where for check, where in FAILING[name].items() if check in found}
    assert failed.keys() == expected.keys(), failed
    assert all(where in failed[check] for check, where in expected.items())
    unsupported = {check: one.message for check, one in found.items() if one.outcome == "not supported"}
    assert set(unsupported) == LACKING[name] & found.keys()
    assert all(unsupported.values())


@pytest.mark.parametrize("bench_of", ["two_ranks"], indirect=True)
@pytest.mark.parametrize("name", [BY_DDP, BY_FSDP])
def test_what_applies_to_replicate_passes(bench_of, name):
    compare(outcomes(bench_of(name), SHORT), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [BY_DDP, BY_FSDP])
def test_all_checks_have_the_known_outcomes(bench_of, name):
    compare(outcomes(bench_of(name, against=TORCHS if name == BY_DDP else None)), name)


def test_arguments_of_ddp_are_passed_on_but_those_of_buffers():
    options = Subject(BY_DDP).options
    assert {"bucket_cap_mb", "static_graph", "process_group"} <= options
    assert not {"broadcast_buffers", "forward_sync_buffers"} & options
