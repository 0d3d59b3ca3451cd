"""Training in virtual time: the same each time, and with a thousand equal ranks."""

import json

import pytest

from ddplab import simulator
from ddplab.emulation.emulate import emulate
from ddplab.simulator.results.perfetto_export import chrome_trace

from .small_trace import FABRIC, small_trace

pytestmark = pytest.mark.usefixtures("soon")


@pytest.mark.parametrize("reducer", ["ddplab", "torch"])
def test_two_runs_are_equal_to_the_byte(reducer):
    runs = [emulate(small_trace(3), FABRIC, world_size=3, reducer=reducer, bucket_cap_mb=1e-3) for _ in range(2)]
    assert runs[0] == runs[1]
    first, second = (json.dumps(chrome_trace(run.timeline)) for run in runs)
    assert first == second


@pytest.mark.parametrize("reducer", ["ddplab", "torch"])
def test_a_thousand_equal_ranks_run_in_one_process(reducer):
    arguments = {"world_size": 1024, "bucket_cap_mb": 1e-3}
    real = emulate(small_trace(), FABRIC, reducer=reducer, **arguments)
    predicted = simulator.predict(small_trace(), FABRIC, **arguments)
    assert (real.samples_ns, real.buckets) == (predicted.samples_ns, predicted.buckets)
    assert real.breakdown == predicted.breakdown
    assert real.spans == predicted.spans
