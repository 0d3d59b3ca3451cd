"""The host's work beside emulated devices: it prolongs iterations and does not depend on all-reduces."""

from hypothesis import given
from hypothesis import strategies as st

from ddplab.validation.emulated_host_overhead import (
    IterationWithOneAllReduce,
    host_ns_by_iteration,
    with_longer_steps,
)
from reference.trace import Trace
from simulator import Fabric
from simulator.fabric import Timing
from simulator.workload.compute_times import recorded_model

from ..strategies import traces


@given(traces(), st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_the_work_of_the_host_prolongs_every_iteration_and_no_gradient(trace, host_ns):
    prolonged = with_longer_steps(trace, host_ns)
    Trace.model_validate_json(prolonged.model_dump_json())  # iterations still follow one another
    before, after = recorded_model(trace), recorded_model(prolonged)
    for times, longer in zip(before.compute_times, after.compute_times, strict=True):
        assert (longer.ready_ns == times.ready_ns.repeat(len(host_ns), axis=0)).all()
        assert (longer.step_ns == (times.step_ns[:, None] + host_ns).ravel()).all()


@given(traces(), st.integers(1, 10**6), st.sampled_from([2, 4]))
def test_the_work_of_the_host_does_not_depend_on_the_costs_of_all_reduces(trace, alone_ns, ranks):
    """An extrapolated fabric may be wrong about all-reduces; that must not become work of the host."""
    one = IterationWithOneAllReduce(0, alone_ns, 10**12, 1)
    longer = one._replace(alone_ns=alone_ns + 1)
    broadcast = (Timing(world_size=ranks, size_bytes=0, ns=5),)
    (host_ns,), *others = (
        host_ns_by_iteration(
            trace,
            Fabric(all_reduce=(Timing(world_size=ranks, size_bytes=0, ns=ns),), broadcast=broadcast),
            ranks,
            [iteration],
        )
        for ns, iteration in ((10, one), (10**6, one), (10, longer))
    )
    assert others == [[host_ns], [host_ns - 1]]
