"""All Hypothesis strategies: random models, plans, traces, fabrics and others. Each docstring has an example."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from hypothesis import strategies as st

from ddplab.conformance.training_programs import Program, ProgramStep, Weight
from ddplab.reference.bucketing import ORDERS
from ddplab.reference.trace import Buffer, Iteration, Parameter, RankTrace, Trace, Workload
from ddplab.simulator.engines.timeline import EngineInput
from ddplab.simulator.fabric import Fabric, Linear, Processor, Sharing, Timing
from ddplab.simulator.fabric.processor_costs import HookCost
from ddplab.simulator.predicted_iteration import Prediction
from ddplab.simulator.prediction import predict
from ddplab.simulator.schedule.comm_hook_messages import HOOKS, named_hook
from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.schedule.schedule import build_schedule
from ddplab.simulator.step_costs import price_schedule
from ddplab.simulator.workload.compute_times import IterationSampler, recorded_model
from ddplab.simulator.workload.variation import Straggler, Variation, VariationKind

DTYPES = ("float32", "float64")


@st.composite
def integer_programs(
    draw, world_size: int, kinds: Sequence[str] = ("train",) * 3, *, dtypes: tuple[str, ...] = DTYPES
) -> Program:
    """Models of any shapes and dtypes, used in any order, the same in each step; cleared after each average.

    Program(weights=(Weight((2, 3)), Weight(())), steps=(ProgramStep("train", ((1, 0), (0, 1)), (4, 4)),), seed=7)
    """
    shape = st.lists(st.sampled_from([1, 2, 3, 4, 0]), max_size=3).map(tuple)
    weights = draw(st.lists(st.builds(Weight, shape, st.sampled_from(dtypes)), min_size=1, max_size=8).map(tuple))
    used = tuple(tuple(draw(st.permutations(range(len(weights))))) for _ in range(world_size))
    return integer_program(weights, [used] * len(kinds), kinds, seed=draw(st.integers(0, 2**31 - 1)))


def integer_program(
    weights: Sequence[Weight], used: Sequence[tuple[tuple[int, ...], ...]], kinds: Sequence[str] = (), seed: int = 0
) -> Program:
    """A program of these steps, by default all with averaging; gradients are cleared after each average."""
    kinds = kinds or ["train"] * len(used)
    cleared = ["none", *("keep" if kind == "accumulate" else "none" for kind in kinds)]
    steps = (
        ProgramStep(kind, one, (4,) * len(one), zero) for kind, one, zero in zip(kinds, used, cleared, strict=False)
    )
    return Program(tuple(weights), tuple(steps), seed=seed)


def hook_shapes(*, scalars: bool = True, more: Sequence[tuple[int, ...]] = ()):
    """Shapes of parameters for comm hooks; without `scalars` for torch's PowerSGD, which does not accept them.

    ((6, 5), (3,), (4, 2, 3), ())
    """
    shapes = [*[()] * scalars, (3,), (600,), (1, 7), (6, 5), (6, 5), (9, 9), (2, 12), (4, 3, 2), (20, 30), *more]
    return st.lists(st.sampled_from(shapes), min_size=1, max_size=5).map(tuple)


def message_shapes():
    """Shapes of parameters for comm hooks, some of them without elements.

    ((6, 5), (0,), (0, 3), ())
    """
    return hook_shapes(more=[(0,), (0, 3), (3, 0)])


def caps_mb() -> st.SearchStrategy[float | None]:
    """None, 1e-6 (each parameter alone), 6e-5 (63 bytes), 25.0"""
    return st.one_of(st.none(), st.floats(1e-6, 3e-4), st.just(25.0))


@st.composite
def partitions(draw, count: int, keys: tuple[str, ...] | None = None) -> list[list[int]]:
    """[[2], [0, 3], [1]]: every index once, in buckets of one key, in any order."""
    buckets: dict[tuple[int, str], list[int]] = {}
    for index in draw(st.permutations(range(count))):
        buckets.setdefault((draw(st.integers(0, 3)), keys[index] if keys else ""), []).append(index)
    return draw(st.permutations(list(buckets.values())))


@st.composite
def iterations(draw, parameter_count: int) -> Iteration:
    """iteration(forward_ns=3, ready_ns=(7, 5, 5), backward_end_ns=8, step_ns=0)"""
    nanoseconds = st.integers(0, 1000)
    forward = draw(nanoseconds)
    ready = tuple(
        forward + ns for ns in draw(st.lists(nanoseconds, min_size=parameter_count, max_size=parameter_count))
    )
    return iteration(forward, ready, max(ready) + draw(nanoseconds), draw(nanoseconds))


def iteration(forward_ns: int, ready_ns: tuple[int | None, ...], backward_end_ns: int, step_ns: int) -> Iteration:
    """An iteration of a plain module that starts at 0."""
    return Iteration(
        forward_start_ns=0,
        forward_end_ns=forward_ns,
        backward_start_ns=forward_ns,
        backward_end_ns=backward_end_ns,
        end_ns=backward_end_ns + step_ns,
        synchronized=False,
        ready_ns=ready_ns,
    )


def workload_of(parameters: tuple[Parameter, ...], ranks: int, *, model: str = "by hand", **further: Any) -> Workload:
    """A plain module's workload on CPUs."""
    return Workload(
        model=model,
        source="module",
        parameters=parameters,
        device="cpu",
        device_name="a processor",
        backend=None,
        world_size=ranks,
        torch_version="2.13.0",
        **further,
    )


def trace_of(
    ranks: Sequence[Sequence[Iteration]], sizes_bytes: Sequence[int], buffer_bytes: Sequence[int] = ()
) -> Trace:
    """A plain module's trace, with int8 parameters of these sizes."""
    parameters = tuple(
        Parameter(name=f"parameter {index}", shape=(size,), dtype="int8", size_bytes=size)
        for index, size in enumerate(sizes_bytes)
    )
    buffers = tuple(
        Buffer(name=f"buffer {index}", dtype=f"dtype {index}", size_bytes=size)
        for index, size in enumerate(buffer_bytes)
    )
    return Trace(
        workload=workload_of(parameters, len(ranks), buffers=buffers),
        ranks=tuple(
            RankTrace(
                rank=rank,
                iterations=tuple(
                    one.shifted(sum(before.end_ns for before in iterations[:number]))
                    for number, one in enumerate(iterations)
                ),
            )
            for rank, iterations in enumerate(ranks)
        ),
    )


tables = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=8, unique_by=lambda row: row[0]
)
"""[(1024, 9000), (8, 5000)]: sizes in bytes and times in nanoseconds of measured collectives."""


@st.composite
def steady_fabrics(draw, world_size: int) -> Fabric:
    """A fabric whose speeds never change: Fabric(all_reduce=(Timing(2, 0, 5), Timing(2, 64, 9)), concurrency=2)"""
    sizes = draw(st.lists(st.integers(0, 400), min_size=1, max_size=4, unique=True))
    cost = st.builds(Linear, fixed_ns=st.integers(0, 50), ns_per_byte=st.integers(0, 3))
    return Fabric(
        all_reduce=tuple(
            Timing(world_size=world_size, size_bytes=size, ns=draw(st.integers(0, 2000))) for size in sizes
        ),
        concurrency=draw(st.integers(1, 3)),
        sharing=(Sharing(size_bytes=0, factor=1.0),),  # otherwise simultaneous collectives share the link
        processor=Processor(
            pack=draw(cost),
            launch_ns=draw(st.integers(0, 50)),
            stall_ns=draw(st.integers(0, 50)),
            copy_out=draw(cost),
            search_ns_per_parameter=draw(st.integers(0, 5)),
            rebuild_ns=draw(st.integers(0, 50)),
            hooks=tuple(
                HookCost(name=name, compress=draw(cost), decompress=draw(cost))
                for name in ("fp16", "quantize_per_tensor")
            ),
        ),
    )


@st.composite
def fluid_fabrics(draw, world_size: int) -> Fabric:
    """A fabric whose speeds depend on what runs: collectives share a link and slow computation down."""
    steady = draw(steady_fabrics(world_size))
    factor = st.floats(1, 3)
    processor = steady.processor.model_copy(update={"slow_down": draw(st.just(1.0) | factor)})
    weight = st.floats(1, 20)
    sharing = tuple(Sharing(size_bytes=size, factor=draw(factor), weight=draw(weight)) for size in (4, 200))
    return steady.model_copy(update={"processor": processor, "sharing": sharing})


@st.composite
def policies(draw, keys: tuple[str, ...]) -> Policy:
    """Policy(plan=((1,), (0, 2)), hook=named_hook("power_sgd:2"), sync_every=3)"""
    plan = draw(st.none() | partitions(len(keys), keys))
    searches, is_static = draw(st.booleans()), draw(st.booleans())
    given_costs = draw(st.sampled_from([HOOK_COSTS, ()]))
    phase = draw(st.sampled_from(["steady", "first", "rebuild", *["second"] * is_static]))
    return Policy(
        bucket_cap_mb=draw(caps_mb()),
        plan=None if plan is None else tuple(map(tuple, plan)),
        order=draw(st.sampled_from(ORDERS)),
        broadcast_buffers=draw(st.booleans()),
        find_unused_parameters=searches,
        static_graph=is_static,
        skip_all_reduce_unused_params=searches and draw(st.booleans()),
        gradient_as_bucket_view=draw(st.booleans()),
        grouping=draw(st.sampled_from(["buckets", "fusion"])),
        zero=draw(ZERO) if len({*keys}) == 1 else None,
        cuda_graph=(is_static or not searches) and phase == "steady" and draw(st.booleans()),
        hook=named_hook(draw(st.sampled_from([*HOOKS, "power_sgd:3", "bf16+power_sgd:2"]))).model_copy(
            update={
                part: Linear(fixed_ns=draw(st.integers(0, 30)), ns_per_byte=draw(st.integers(0, 2)))
                for part in given_costs
            }
        ),
        sync_every=draw(st.integers(1, 3)),
        phase=phase,
    )


ZERO = st.sampled_from([None, "parameters", "buckets"])
HOOK_COSTS = ("compress", "recompress", "decompress")


@st.composite
def traces(draw) -> Trace:
    """A plain module's trace: 1-6 parameters, 1-3 ranks, 1-3 iterations."""
    kinds = st.sampled_from([("float32", 4), ("float64", 8)])
    sizes = draw(st.lists(st.tuples(st.integers(0, 100), kinds), min_size=1, max_size=6))
    parameters = tuple(
        Parameter(name=f"layer{index}.weight", shape=(size,), dtype=dtype, size_bytes=bytes_each * size)
        for index, (size, (dtype, bytes_each)) in enumerate(sizes)
    )
    ranks = tuple(
        RankTrace(
            rank=rank,
            clock_offset_ns=draw(st.integers(-1000, 1000)),
            iterations=tuple(
                draw(iterations(len(parameters))).shifted(10_000 * number)
                for number in range(draw(st.integers(1, 3)))
            ),
        )
        for rank in range(draw(st.integers(1, 3)))
    )
    model, batch = draw(st.text(max_size=5)), draw(st.none() | st.integers(1, 64))
    return Trace(workload=workload_of(parameters, len(ranks), model=model, batch=batch), ranks=ranks)


@st.composite
def engine_inputs(draw, fabrics=steady_fabrics) -> EngineInput:
    """EngineInput(schedule, duration_ns=[[3, 4, 2]], cost_ns=[5]): one iteration of any trace under any policy."""
    trace, world_size = draw(traces()), draw(st.integers(1, 4))
    policy, costs = draw(policies(tuple(trace.keys))), draw(fabrics(world_size))
    model = recorded_model(trace, unused_allowed=policy.unused_allowed)
    joins = policy.zero is None and not policy.cuda_graph and draw(st.booleans())
    schedule = build_schedule(policy, model, joins=joins, world_size=world_size)
    costs = price_schedule(schedule, costs, policy, world_size)
    sampler = IterationSampler(model.compute_times, world_size, Variation(), sync_every=policy.sync_every)
    return costs.engine_input(sampler, sampler.draw([0]), 0)


def variations(*, kinds: Sequence[VariationKind] = ("recorded", "resampled", "fitted")):
    """Variation(kind="fitted", iterations=3, device_spread=0.02)"""
    return st.builds(
        Variation,
        kind=st.sampled_from(kinds),
        iterations=st.integers(1, 4),
        device_spread=st.sampled_from([0.0, 0.0, 0.02]),
    )


@st.composite
def rate_fabrics(draw) -> list[Fabric]:
    """[Fabric.from_alpha_beta(100, 1e9), Fabric.from_alpha_beta(0, 3e8)]: steady fabrics for any world size."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        links = Fabric.from_alpha_beta(draw(st.integers(0, 5000)), draw(st.floats(1e6, 1e12)))
        processor = Processor(launch_ns=draw(st.sampled_from([0, 40])), pack=Linear(fixed_ns=2))
        made.append(links.model_copy(update={"processor": processor}))
    return made


@st.composite
def sweeps(draw) -> dict[str, Any]:
    """Arguments of `sweep` for a few configurations: two traces of one kind, steady and fluid fabrics, ..."""
    worlds = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    of_ranks = [draw(fluid_fabrics(4)), draw(steady_fabrics(4))]
    timings = [[t.model_copy(update={"world_size": n}) for n in range(1, 5) for t in f.all_reduce] for f in of_ranks]
    fabrics = {
        f"fabric {number}": fabric.model_copy(update={"all_reduce": tuple(timing)})
        for number, (fabric, timing) in enumerate(zip(of_ranks, timings, strict=True))
    }
    if draw(st.booleans()):
        fabrics["one at a time"] = fabrics["fabric 1"].model_copy(update={"concurrency": 1})
    names = draw(st.lists(st.sampled_from(sorted(fabrics)), min_size=1, unique=True))
    some_traces = {f"trace {number}": draw(traces()) for number in range(draw(st.integers(1, 2)))}
    policy = draw(policies(())).model_copy(update={"plan": None})
    return {
        "trace": some_traces,
        "fabric": {name: fabrics[name] for name in names},
        "world_sizes": worlds,
        "bucket_caps_mb": draw(st.lists(caps_mb() | st.just(float("inf")), min_size=1, max_size=2)),
        "orders": draw(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=2)),
        "hooks": draw(st.lists(st.sampled_from([*HOOKS, "power_sgd:3"]), min_size=1, max_size=2)),
        "policy": policy,
        "variation": draw(variations()),
        "stragglers": draw(
            st.lists(
                st.builds(Straggler, rank=st.none() | st.integers(0, min(worlds) - 1), factor=st.floats(1, 3)),
                max_size=2,
            )
        ),
    }


@dataclass(frozen=True)
class Asked:
    """Arguments of a prediction."""

    trace: Trace
    fabric: Fabric
    world_size: int
    policy: Policy
    variation: Variation
    stragglers: tuple[Straggler, ...]
    inputs: tuple[int, ...] | None

    def predict(self) -> Prediction:
        return predict(
            self.trace,
            self.fabric,
            world_size=self.world_size,
            policy=self.policy,
            variation=self.variation,
            stragglers=self.stragglers,
            inputs=self.inputs,
        )


@st.composite
def any_predictions(
    draw, *, fabrics=fluid_fabrics, world_sizes=None, variation=None, stragglers: bool = True
) -> Asked:
    """Asked(trace, fabric, 3, policy, Variation(kind="fitted", iterations=2), (Straggler(factor=2),), (1, 0, 2))"""
    trace, world_size = draw(traces()), draw(st.integers(1, 4) if world_sizes is None else world_sizes)
    straggler = st.builds(Straggler, rank=st.none() | st.integers(0, world_size - 1), factor=st.floats(1, 3))
    policy = draw(policies(tuple(trace.keys)))
    batches = st.lists(st.integers(0, 2 * policy.sync_every), min_size=world_size, max_size=world_size)
    inputs = batches.filter(lambda counts: max(counts) >= policy.sync_every).map(tuple)
    may_join = not policy.skip_all_reduce_unused_params and policy.zero is None and not policy.cuda_graph
    return Asked(
        trace=trace,
        fabric=draw(fabrics(world_size)),
        world_size=world_size,
        policy=policy,
        variation=draw(variations() if variation is None else variation),
        stragglers=tuple(draw(st.lists(straggler, max_size=1))) if stragglers else (),
        inputs=draw(st.none() | inputs) if stragglers and may_join else None,
    )


@st.composite
def emulations(draw) -> Asked:
    """A prediction that a real reducer can carry out, with buffers, unused parameters and sparse gradients.

    Asked(trace, fabric, 2, Policy(find_unused_parameters=True, sync_every=2), ...)
    """
    asked = draw(any_predictions())
    policy, trace = asked.policy.model_copy(update={"grouping": "buckets"}), asked.trace
    if asked.inputs is not None:
        policy = policy.model_copy(update={"phase": "steady"})
    if policy.plan is None and draw(st.booleans()):
        caps = draw(st.lists(st.floats(1e-6, 3e-4), min_size=1, max_size=3))
        policy = policy.model_copy(update={"bucket_cap_mb_list": tuple(caps)})
    parameters, buffers = trace.workload.parameters, draw(st.lists(st.sampled_from(BUFFERS), max_size=3))
    is_alone = policy.plan is None or (0,) in policy.plan
    if is_alone and policy.hook.name in ("none", "noop") and draw(st.booleans()):
        first = parameters[0].model_copy(update={"shape": (*parameters[0].shape, 1), "sparse": True})
        parameters = (first, *parameters[1:])
        policy = policy.model_copy(update={"sparse_density": draw(st.sampled_from([0.01, 0.28, 0.5, 1.0]))})
    source = draw(st.sampled_from(["module", "torch"]))
    workload = trace.workload.model_copy(
        update={"parameters": parameters, "buffers": _named(buffers), "source": source}
    )
    dense = [index for index, parameter in enumerate(parameters) if not parameter.sparse]  # others would send no rows
    some = st.sets(st.sampled_from(dense), max_size=len(parameters) - 1) if dense else st.just(set())
    always_the_same = policy.skip_all_reduce_unused_params
    everywhere = draw(some)
    ranks = []
    for rank in trace.ranks:
        on_rank = everywhere if always_the_same else draw(some)
        changes = not (always_the_same or policy.static_graph)
        ranks.append(
            rank.model_copy(
                update={
                    "iterations": tuple(
                        _without(one, draw(some) if changes else on_rank) if policy.unused_allowed else one
                        for one in rank.iterations
                    )
                }
            )
        )
    return replace(asked, policy=policy, trace=trace.model_copy(update={"workload": workload, "ranks": tuple(ranks)}))


@st.composite
def torch_emulations(draw) -> Asked:
    """An emulation whose schedule torch's class shares with ours; processor costs are free.

    Asked(trace, fabric, 2, Policy(hook=named_hook("fp16"), static_graph=True), ...)

    docs/emulation.md lists the settings in which the schedules differ: iterations before the steady ones, unused
    parameters under Join or with a hook that decompresses, several dtypes, and PowerSGD with skipped buckets.
    """
    asked = draw(emulations())
    update: dict[str, Any] = {"plan": None, "order": "ready", "phase": "steady"}
    if asked.inputs is None:
        update["zero"] = draw(ZERO)
    else:
        update |= {"find_unused_parameters": False, "static_graph": False, "skip_all_reduce_unused_params": False}
    policy = asked.policy.model_copy(update=update)
    if "power_sgd" in policy.hook.name:  # if torch skips the last bucket, the hook does not learn which is the last
        policy = policy.model_copy(update={"skip_all_reduce_unused_params": False})
    if policy.find_unused_parameters:
        hook = policy.hook.model_copy(update={"decompress": Linear()})
        policy = policy.model_copy(update={"hook": hook})
    costs, trace = asked.fabric.processor, asked.trace
    processor = Processor(slow_down=costs.slow_down)
    parameters = tuple(
        one.model_copy(update={"dtype": "float32", "size_bytes": 4 * prod(one.shape)})
        for one in trace.workload.parameters  # torch orders buckets of several dtypes by chance
    )
    ranks = trace.ranks
    if not policy.unused_allowed:
        ranks = tuple(
            rank.model_copy(update={"iterations": tuple(map(_with_all_gradients, rank.iterations))}) for rank in ranks
        )
    workload = trace.workload.model_copy(update={"parameters": parameters})
    return replace(
        asked,
        policy=policy,
        trace=trace.model_copy(update={"workload": workload, "ranks": ranks}),
        fabric=asked.fabric.model_copy(update={"processor": processor}),
    )


@st.composite
def module_emulations(draw) -> Asked:
    """A prediction for FSDP2's `replicate()`, of a decoder with 1-3 blocks, embeddings or none, and a head or none.

    Asked(trace, fabric, 2, Policy(grouping="module", sync_every=2), ...)
    """
    names = [
        *draw(st.sampled_from([(), ("embeddings.weight",), ("tokens.weight", "positions.weight")])),
        *(f"layers.{block}.{part}" for block in range(draw(st.integers(1, 3))) for part in ("a.weight", "b.weight")),
        *draw(st.sampled_from([(), ("norm.weight",), ("norm.weight", "output.weight")])),
    ]
    rows = draw(st.lists(st.integers(1, 50), min_size=len(names), max_size=len(names)))
    parameters = tuple(
        Parameter(name=name, shape=(one,), dtype="float32", size_bytes=4 * one)
        for name, one in zip(names, rows, strict=True)
    )

    def one_iteration() -> Iteration:
        gaps = draw(st.lists(st.integers(1, 50), min_size=len(names), max_size=len(names)))
        ready = [100 + sum(gaps[index:]) for index in range(len(names))]  # the last parameter's gradient is first
        return iteration(100, tuple(ready), ready[0] + draw(st.integers(0, 20)), 30)

    count = draw(st.integers(1, 2))
    trace = trace_of([[one_iteration() for _ in range(count)] for _ in range(draw(st.integers(1, 2)))], rows)
    workload = trace.workload.model_copy(update={"parameters": parameters})
    world_size = draw(st.integers(1, 4))
    costs = draw(fluid_fabrics(world_size))
    processor = Processor(slow_down=costs.processor.slow_down)
    reduce_dtypes = st.sampled_from([None, "bfloat16", "float16", "float32"])
    return Asked(
        trace=trace.model_copy(update={"workload": workload}),
        fabric=costs.model_copy(update={"processor": processor}),
        world_size=world_size,
        policy=Policy(grouping="module", sync_every=draw(st.integers(1, 3)), reduce_dtype=draw(reduce_dtypes)),
        variation=Variation(),
        stragglers=(),
        inputs=None,
    )


def _with_all_gradients(one: Iteration) -> Iteration:
    ready = tuple(one.backward_end_ns if moment is None else moment for moment in one.ready_ns)
    return one.model_copy(update={"ready_ns": ready})


BUFFERS = [("float32", 4), ("float32", 40), ("int64", 8), ("float64", 16)]


def _named(buffers: Sequence[tuple[str, int]]) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(name=f"buffer{number}", dtype=dtype, size_bytes=size) for number, (dtype, size) in enumerate(buffers)
    )


def _without(one: Iteration, unused: set[int]) -> Iteration:
    ready = tuple(None if index in unused else moment for index, moment in enumerate(one.ready_ns))
    return one.model_copy(update={"ready_ns": ready})
