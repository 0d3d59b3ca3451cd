"""On a CUDA device: NCCL with one rank, and two Gloo ranks that share the device. `make test-gpu`."""

from functools import partial

import pytest
import torch

from reference.launch import RankPool

from . import bodies, hook_bodies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]
POOLS = [("nccl", 1), ("gloo", 2)]
MODES = [{}, {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}, {"static_graph": True}]


@pytest.fixture(scope="module", params=POOLS, ids=[f"{backend}, {ranks} ranks" for backend, ranks in POOLS])
def gpu_ranks(request):
    backend, world_size = request.param
    with RankPool(world_size, backend=backend, timeout_s=100) as pool:
        yield pool


@pytest.mark.parametrize("options", MODES, ids=str)
def test_gradients_are_exactly_torchs(gpu_ranks, options):
    for ours, torchs in gpu_ranks.run(bodies.train_on_gpu, options):
        bodies.assert_same(ours, torchs)


@pytest.mark.parametrize("options", MODES[:3], ids=str)
def test_no_more_kernels_are_launched_than_by_torchs_class(gpu_ranks, options):
    for ours, torchs in gpu_ranks.run(bodies.count_kernels, options):
        assert ours <= torchs


def test_the_callers_stream_sees_the_averages(gpu_ranks):
    """Backward runs on a side stream behind a long kernel; what is read there afterwards is complete."""
    for ours, torchs in gpu_ranks.run(bodies.train_on_side_stream):
        bodies.assert_same(ours, torchs)


def test_synchronised_batch_norm(gpu_ranks):
    for ours, torchs in gpu_ranks.run(bodies.train_sync_batch_norm):
        bodies.assert_same(ours, torchs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_script_that_never_calls_set_device_uses_the_gpu_of_each_rank_alone():
    """NCCL refuses two ranks on one GPU, so a collective on the current device, GPU 0, would fail."""
    with RankPool(2, backend="nccl", timeout_s=100) as pool:
        assert pool.run(bodies.train_without_set_device) == [True, True]


def test_inputs_are_moved_to_the_device(gpu_ranks):
    assert all(gpu_ranks.run(bodies.inputs_on_cpu))


@pytest.mark.parametrize(
    "hook", [name for name in hook_bodies.OURS if name not in ("noop", "local", "compress(bf16)(power)")]
)
def test_comm_hooks_average(gpu_ranks, hook):
    """To what rounding and quantisation allow, several buckets in flight, on both classes; PowerSGD at full rank."""
    shapes, seed = ((300, 200), (64,), (200, 300), (9, 9)), 0
    train = partial(
        hook_bodies.on_classes,
        wrappers=("ours", "torch"),
        device="cuda",
        options={"bucket_cap_mb": 0.1},
        state_options={"matrix_approximation_rank": 400, "min_compression_rate": 0},
    )
    for classes in gpu_ranks.run(train, ("ours", hook), shapes, seed):
        for steps in classes:
            for step, averages in enumerate(steps):
                exact = hook_bodies.mean_gradients(gpu_ranks.world_size, shapes, seed, step)
                for got, expected in zip(averages, exact, strict=True):
                    torch.testing.assert_close(got, expected, rtol=0, atol=0.05)
