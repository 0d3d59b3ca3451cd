"""Memory over a predicted iteration: what holds it when."""

import pytest
from matplotlib.figure import Figure

from ddplab.reference.trace import StepMemory
from ddplab.simulator import Fabric, Policy, predict
from ddplab.simulator.results.memory_plot import draw_memory, memory_over_time

from ..strategies import iteration, trace_of
from .changed_traces import with_workload

MS, MB = 10**6, 10**6
MEMORY = StepMemory(
    batch=1, batch_bytes=MB, kept_bytes=9 * MB, peak_bytes=10 * MB, peak_with_gradients_bytes=10 * MB,
    ready_bytes=(2 * MB, 5 * MB),
)  # fmt: skip
PLAIN = trace_of([[iteration(MS, (3 * MS, 2 * MS), 4 * MS, MS)]], [4 * MB, 8 * MB])
TRACE = with_workload(PLAIN, memory=MEMORY)


@pytest.mark.parametrize("views", [False, True])
def test_gradients_are_held_twice_unless_they_are_views_of_buckets(views):
    policy = Policy(gradient_as_bucket_view=views, bucket_cap_mb=1)
    prediction = predict(TRACE, Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=1e9), world_size=2, policy=policy)
    moments, layers = memory_over_time(prediction, TRACE, policy)
    assert moments == sorted(moments)
    assert moments[-1] == prediction.timeline.iteration_ns
    assert set(layers["buckets"]) == {12 * MB}
    assert layers["activations"] == [0, 0, 9 * MB, 5 * MB, 2 * MB, 0, 0]
    assert layers["gradients beside buckets"] == [0] * 3 + ([0] * 4 if views else [8 * MB, *[12 * MB] * 3])
    ends = [span.end_ns for span in prediction.spans if span.rank == 0 and span.kind in ("forward", "backward")]
    assert moments[2:-1] == ends
    ax = draw_memory(prediction, TRACE, policy, Figure().add_subplot())
    assert ax.get_legend() is not None
