"""On CUDA devices: NCCL with one rank and with two, and two Gloo ranks that may share a device. `make test-gpu`.

docs/cuda.md has the GPUs on which they have been run.
"""

from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.gpu import SHARED
from ddplab.reference.launch import RankPool
from ddplab.simulator import import_profile

from .. import hook_bodies
from ..scenarios import assert_same_pairs
from . import device_reads_bodies, gpu_bodies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]
POOLS = [("nccl", 1), ("nccl", 2), ("gloo", 2)]
MODES = [{}, {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}, {"static_graph": True}]


@pytest.fixture(scope="module", params=POOLS, ids=[f"{backend}, {ranks} ranks" for backend, ranks in POOLS])
def gpu_ranks(request):
    backend, world_size = request.param
    if backend == "nccl" and torch.cuda.device_count() < world_size and not SHARED:
        pytest.skip(f"needs {world_size} CUDA devices; there are {torch.cuda.device_count()}")
    with RankPool(world_size, backend=backend, timeout_s=100) as pool:
        pool.run(gpu_bodies.use_own_gpu)
        yield pool


@pytest.fixture
def nccl_ranks(gpu_ranks, request):
    """Those of `gpu_ranks` that use NCCL: Gloo's collectives make the host wait."""
    if "nccl" not in request.node.name:
        pytest.skip("for NCCL only")
    return gpu_ranks


@pytest.mark.parametrize("options", MODES, ids=str)
def test_gradients_are_exactly_torchs(gpu_ranks, options):
    assert_same_pairs(gpu_ranks.run(gpu_bodies.train_on_gpu, options))


@pytest.mark.parametrize("options", MODES[:3], ids=str)
def test_no_more_kernels_are_launched_than_by_torchs_class(gpu_ranks, options):
    for ours, torchs in gpu_ranks.run(gpu_bodies.count_kernels, options):
        assert ours <= torchs


@pytest.mark.parametrize("body", [gpu_bodies.train_on_side_stream, gpu_bodies.train_sync_batch_norm])
def test_side_streams_and_synchronised_batch_norm_give_the_bits_of_torchs_class(gpu_ranks, body):
    """Backward runs on a side stream behind a long kernel; what is read there afterwards is complete."""
    assert_same_pairs(gpu_ranks.run(body))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_script_that_never_calls_set_device_uses_the_gpu_of_each_rank_alone():
    """NCCL refuses two ranks on one GPU, so a collective on the current device, GPU 0, would fail."""
    with RankPool(2, backend="nccl", timeout_s=100) as pool:
        assert pool.run(gpu_bodies.train_without_set_device) == [True, True]


def test_inputs_are_moved_to_the_device(gpu_ranks):
    assert all(gpu_ranks.run(gpu_bodies.inputs_on_cpu))


@pytest.mark.parametrize("hook", [name for name in hook_bodies.OURS if name not in ("noop", "compress(bf16)(power)")])
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
                torch.testing.assert_close(averages, exact, rtol=0, atol=0.05)


# Clocks, the recorder and the logging data


def test_a_clock_has_the_times_of_the_device(gpu_ranks):
    for (zero, end_ns, side_ns), kernel_ms, from_host_ns in gpu_ranks.run(gpu_bodies.device_clock):
        assert zero == 0
        assert end_ns == pytest.approx(kernel_ms * 1e6, rel=0.01, abs=50_000)
        assert side_ns < end_ns
        assert from_host_ns < 1_000_000


@pytest.mark.parametrize("wrapper", ["ours", "torch", "module"])
def test_a_recording_has_the_times_of_an_imported_profile(nccl_ranks, tmp_path, wrapper):
    """Both watch the same iterations. Ready times differ by less than 5 % of the backward pass or 0.1 ms.

    An event is reached after the kernel that accumulates the gradient, and the profiler notes the end of the kernel
    before it.
    """
    recorded, *_ = nccl_ranks.run(gpu_bodies.record_beside_profiler, wrapper, str(tmp_path))
    imported = import_profile(sorted(tmp_path.glob("*.json"))).trace
    assert recorded.workload.device == "cuda"
    for mine, theirs in zip(recorded.ranks, imported.ranks, strict=True):
        differences = []
        for one, other in zip(mine.iterations, theirs.iterations, strict=True):
            span_ns = other.backward_end_ns - other.backward_start_ns
            first, expected_first = min(one.ready_ns), min(other.ready_ns)
            for ready, expected in zip(sorted(one.ready_ns), sorted(other.ready_ns), strict=True):
                distance = abs((ready - first) - (expected - expected_first))
                differences.append(distance - max(100_000, 0.05 * span_ns))
            if wrapper == "torch":
                assert len(one.buckets) == len(other.buckets)
        assert np.median(differences) < 0


def test_logging_data_has_the_times_of_the_device(gpu_ranks):
    for data, kernel_ns in gpu_ranks.run(gpu_bodies.logged_times):
        assert data["iteration"] == 4
        assert data["forward_compute_time"] == pytest.approx(kernel_ns, rel=0.5)


# The host never waits for the device


@pytest.mark.parametrize("recorded", [False, True], ids=["", "recorded"])
@pytest.mark.parametrize("mode", device_reads_bodies.MODES)
def test_in_steady_training_the_host_never_waits(nccl_ranks, mode, recorded):
    nccl_ranks.run(partial(gpu_bodies.train_without_host_waits, recorded=recorded), mode, "none")


@pytest.mark.parametrize("hook", device_reads_bodies.HOOKS)
def test_with_a_comm_hook_the_host_never_waits(nccl_ranks, hook):
    nccl_ranks.run(gpu_bodies.train_without_host_waits, "plain", hook)
