"""Emulation: in virtual time real reducers take as long as `predict` says, to the nanosecond."""

import json
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

import simulator
from ddplab.emulation import virtual_time
from ddplab.emulation.emulate import emulate
from reference.data_parallel import DistributedDataParallel
from reference.errors import RankError
from reference.observer import Observer
from simulator import Fabric
from simulator.results.perfetto_export import chrome_trace

from .explore import examples
from .strategies import Asked, emulations, iteration, torch_emulations, trace_of


@pytest.fixture(scope="module", autouse=True)
def soon():
    """A rank that hangs is an error within seconds, also while Hypothesis shrinks an example."""
    before, virtual_time.TURN_TIMEOUT_S = virtual_time.TURN_TIMEOUT_S, 10.0
    yield
    virtual_time.TURN_TIMEOUT_S = before


def emulated(asked: Asked, reducer: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about settings that do not go together
        return emulate(
            asked.trace,
            asked.fabric,
            world_size=asked.world_size,
            reducer=reducer,
            policy=asked.policy,
            variation=asked.variation,
            stragglers=asked.stragglers,
            inputs=asked.inputs,
        )


@examples(150)
@given(emulations())
def test_our_reducer_takes_the_predicted_time(asked):
    real, predicted = emulated(asked, "ddplab"), asked.predict()
    assert real.samples_ns == predicted.samples_ns
    assert real.buckets == predicted.buckets
    if len(real.timeline.engine_input.ranks) == 1:  # the timeline of several ranks shows their waits in one order
        assert real.breakdown == predicted.breakdown
        assert real.critical_buckets == predicted.critical_buckets
    if asked.trace.workload.source == "module":  # otherwise the emulated reducer never sends buffers
        assert real.epoch_end_ns == predicted.epoch_end_ns


@examples(50)
@given(torch_emulations())
def test_torchs_reducer_takes_the_predicted_time(asked):
    real, predicted = emulated(asked, "torch"), asked.predict()
    assert real.samples_ns == predicted.samples_ns
    assert real.buckets in ((), predicted.buckets)  # torch does not tell the buckets that are never rebuilt


FABRIC = Fabric.from_alpha_beta(1000, 1e9)


def small_trace(ranks: int = 1):
    trace = trace_of(
        [[iteration(500, (3000 + 100 * rank, 2000, 1000), 3500, 700)] * 3 for rank in range(ranks)], [400, 800, 4000]
    )
    parameters = tuple(
        one.model_copy(update={"dtype": "float32", "shape": (one.size_bytes // 4,)})
        for one in trace.workload.parameters
    )
    return trace.model_copy(update={"workload": trace.workload.model_copy(update={"parameters": parameters})})


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


def test_ranks_that_differ_average_their_gradients():
    averages = set()

    class Watched(DistributedDataParallel):
        def forward(self, *inputs):
            self.module.value = float(dist.get_rank() + 1)
            self.reducer.observers.append(self)
            return super().forward(*inputs)

        def __getattr__(self, name):
            return (lambda *_: None) if name in vars(Observer) else super().__getattr__(name)

        def bucket_copied_out(self, _bucket):
            averages.update(value for one in self.module.parameters() for value in one.grad.unique().tolist())

    emulate(small_trace(3), FABRIC, world_size=3, bucket_cap_mb=25, reducer=Watched)
    assert averages == {2.0}  # the mean of 1, 2 and 3


def test_a_reducer_that_behaves_differently_takes_another_time():
    class InForwardOrder(DistributedDataParallel):
        def __init__(self, module, **_):
            super().__init__(module, plan=[[0], [1], [2]])

    arguments = {"world_size": 2, "bucket_cap_mb": 1e-3}
    other = emulate(small_trace(), FABRIC, reducer=InForwardOrder, **arguments)
    assert other.iteration_ns > simulator.predict(small_trace(), FABRIC, **arguments).iteration_ns
    assert other.buckets == ((0,), (1,), (2,))


def test_ranks_that_launch_different_collectives_are_named():
    class Wrong(DistributedDataParallel):
        def forward(self, *inputs):
            dist.all_reduce(torch.zeros(dist.get_rank() + 1))
            return super().forward(*inputs)

    with pytest.raises(RankError, match=r"rank 1: expected its collective \d+ to be an all_reduce of 4 bytes"):
        emulate(small_trace(2), FABRIC, world_size=2, reducer=Wrong)


def test_ranks_that_wait_for_each_other_are_named():
    class Late(DistributedDataParallel):
        passes = 0

        def forward(self, *inputs):
            loss = super().forward(*inputs)
            self.passes += 1
            if dist.get_rank() == 0 and self.passes == 4:  # the last one before the ranks start together
                engine = torch.autograd.Variable._execution_engine
                loss.register_hook(lambda _: engine.queue_callback(dist.barrier))
            return loss

    message = (
        r"all ranks wait, so none can go on: rank 0 waits for collective \d+, .*; rank 1 waits for the other ranks"
    )
    with pytest.raises(RankError, match=message):
        emulate(small_trace(2), FABRIC, world_size=2, reducer=Late)


def test_an_error_of_a_rank_ends_all_threads_and_names_the_rank():
    class Failing(DistributedDataParallel):
        def forward(self, *inputs):
            if dist.get_rank() == 1:
                raise ArithmeticError("no more numbers")
            return super().forward(*inputs)

    with pytest.raises(RankError, match="rank 1 failed in virtual time: ArithmeticError: no more numbers"):
        emulate(small_trace(3), FABRIC, world_size=3, reducer=Failing)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_emulation_leaves_other_process_groups_alone():
    assert not dist.is_initialized()
    emulate(small_trace(), FABRIC, world_size=2)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reducer": "horovod"}, "reducer: expected ddplab, torch or a class, got 'horovod'"),
        ({"reducer": torch.nn.Linear}, "reducer: expected a class with the constructor of torch's"),
        ({"reducer": "torch", "order": "forward"}, "order: expected 'ready' and no plan"),
        ({"inputs": [1, 2], "phase": "first"}, "phase: expected 'steady' with inputs, got 'first'"),
        (
            {"first_bucket_mb": 1.0, "phase": "first"},
            "first_bucket_mb: expected None unless the buckets have been rebuilt, got 1.0",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        emulate(small_trace(), FABRIC, world_size=2, **arguments)
