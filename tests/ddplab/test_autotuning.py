"""Autotuning with the simulator: the reducer then takes as long as the plan promises."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import simulator
from ddplab.autotuning import autotune
from ddplab.emulation.emulate import emulate
from reference.autotuning import Autotune, TunedBuckets
from reference.data_parallel import DistributedDataParallel
from simulator import Fabric, Policy, Variation

from ..explore import examples
from ..strategies import Asked, emulations, partitions
from . import autotuning_bodies as bodies
from .conformance_bench import outcomes
from .small_trace import FABRIC, small_trace

pytestmark = pytest.mark.usefixtures("soon")


def tuned_by(tuner):
    """A class that autotunes in its first three iterations."""

    class Tuned(DistributedDataParallel):
        def __init__(self, module, **arguments):
            super().__init__(module, autotune=Autotune(tuner, iterations=1), **arguments)

    return Tuned


def arguments_of(asked: Asked) -> dict[str, Any]:
    """Arguments of `predict` and `emulate` for a module whose buckets can be tuned."""
    every = [one for rank in asked.trace.ranks for one in rank.iterations]
    assume(all(None not in one.ready_ns for one in every))
    assume(asked.trace.workload.source == "module")  # others are charged for buckets that differ from the recorded
    never = dict.fromkeys(("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"), False)
    policy = asked.policy.model_copy(update={"plan": None, "order": "ready", "phase": "steady", **never})
    return {
        "fabric": asked.fabric,
        "world_size": asked.world_size,
        "policy": policy,
        "variation": asked.variation,
        "stragglers": asked.stragglers,
    }


@examples(20)
@given(st.data())
def test_after_the_rebuild_an_iteration_takes_the_predicted_time_of_the_plan(data):
    asked = data.draw(emulations())
    arguments = arguments_of(asked) | {"inputs": asked.inputs}
    parameters = asked.trace.workload.parameters
    keys = tuple(f"{index}" if one.sparse else one.dtype for index, one in enumerate(parameters))
    buckets = tuple(map(tuple, data.draw(partitions(len(keys), keys))))
    tuned = tuned_by(lambda _trace, _ddp: TunedBuckets(buckets, 1, 1))
    real = emulate(asked.trace, reducer=tuned, **arguments)
    planned = arguments["policy"].model_copy(update={"plan": buckets})
    predicted = simulator.predict(asked.trace, **arguments | {"policy": planned})
    assert real.buckets == predicted.buckets == buckets
    assert real.samples_ns == predicted.samples_ns


@examples(25)
@given(emulations(), st.builds(Fabric.from_alpha_beta, st.integers(0, 50), st.floats(2e8, 5e9)))
def test_the_simulators_buckets_take_the_time_that_it_expects(asked, fabric):
    """The tuner gets the trace that is emulated, because the emulated reducer's own recording is in real time."""
    arguments = arguments_of(asked) | {"fabric": fabric, "variation": Variation(), "stragglers": ()}
    policy = arguments["policy"].model_copy(update={"bucket_cap_mb": 25, "bucket_cap_mb_list": None})
    arguments["policy"] = policy  # one bucket of each dtype, so there is something to gain
    given_by_hand = {
        name: getattr(policy, name) for name in ("hook", "sync_every", "sparse_density", "process_groups")
    }
    tuner = autotune(fabric, **given_by_hand).tuner
    answers = []

    def tune(_trace, ddp):
        whole = asked.trace.workload.model_copy(update={"world_size": asked.world_size})
        ranks = asked.trace.ranks[: asked.world_size]
        trace = asked.trace.model_copy(update={"workload": whole, "ranks": ranks})
        answers.append((tuner(trace, ddp), ddp.reducer.buckets.assignment))
        return answers[-1][0]

    arguments["trace"] = asked.trace.model_copy(update={"ranks": asked.trace.ranks[: asked.world_size]})
    real = emulate(reducer=tuned_by(tune), **arguments)
    answer, present = answers[0]
    if answer is None:
        assert real.buckets == present
    else:
        assert real.buckets == answer.buckets
        assert real.iteration_ns == answer.iteration_ns < answer.default_ns
        untuned = simulator.predict(**arguments | {"policy": policy.model_copy(update={"plan": present})})
        assert untuned.iteration_ns == answer.default_ns


def test_buckets_change_for_a_gain_and_stay_without_one():
    """Gradients of 4, 0.8 and 0.4 kB, ready 1 us apart: a second all-reduce saves 2 us, less twice the latency."""
    trace = small_trace()
    whole = trace.model_copy(update={"workload": trace.workload.model_copy(update={"world_size": 2})})
    for latency_ns, expected in ((100, ((2,), (0, 1))), (1000, ((0, 1, 2),))):
        fabric = Fabric.from_alpha_beta(latency_ns, 1e9)
        tuner = autotune(fabric).tuner
        real = emulate(trace, fabric, world_size=2, reducer=tuned_by(lambda _, ddp, tuner=tuner: tuner(whole, ddp)))
        assert tuple(tuple(sorted(bucket)) for bucket in real.buckets) == expected
        best = simulator.tune(trace, fabric, world_size=2)
        assert real.iteration_ns == best.iteration_ns <= best.default_ns


def test_settings_are_those_of_the_module_and_its_hook(two_ranks):
    found, of_rank_1 = two_ranks.run(bodies.settings_of_modules)
    assert found["plain"] == Policy(broadcast_buffers=True)
    assert found["views"] == Policy(gradient_as_bucket_view=True, broadcast_buffers=False)
    assert found["static"] == Policy(static_graph=True, find_unused_parameters=True, sync_every=2)
    assert [found[name].hook.name for name in ("fp16", "torch's bf16", "power_sgd", "mixed")] == [
        "fp16", "bf16", "power_sgd:3", "bf16"
    ]  # fmt: skip
    assert found["given"].hook.name == "fp16"
    assert "hook: expected a comm hook that the simulator has, got" in found["unknown"]
    assert "expected mixed precision with all-reduces in half precision, got torch.float64" in found["double"]
    assert of_rank_1["plain"] == ""  # only rank 0 tunes


def test_real_training_is_tuned_and_averages_the_same(two_ranks):
    """Whether the buckets change depends on the machine's times; all ranks agree, and gradients are the same."""
    (mine, gradients), (others, _) = two_ranks.run(bodies.train_with_the_simulator, True)
    ((_, expected), _) = two_ranks.run(bodies.train_with_the_simulator, False)
    assert mine == others
    assert mine["autotuned"] in (0, 1)
    assert "autotune_error" not in mine
    assert all(map(torch.equal, gradients, expected))


CHECKS = ("a backward pass that raises", "mixed precision", "several modules", "checkpoints")
"""Quick checks of the conformance kit; `ddplab conform tests.reference.autotuning_bodies:Tuned` runs all."""


@pytest.mark.parametrize("bench_of", ["two_ranks"], indirect=True)
def test_a_class_that_tunes_conforms(bench_of):
    found = outcomes(bench_of("tests.reference.autotuning_bodies:Tuned"), CHECKS)
    assert {name: one.message for name, one in found.items() if one.outcome != "passed"} == {}


def test_wrong_settings_are_refused_at_once():
    with pytest.raises(TypeError, match="unexpected keyword argument 'hok'"):
        autotune(FABRIC, hok="fp16")
    with pytest.raises(ValueError, match="hook: expected one of"):
        autotune(FABRIC, hook="fp17")
    with pytest.raises(ValueError, match="at least one iteration"):
        autotune(FABRIC, iterations=0)
