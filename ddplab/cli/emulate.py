"""`ddplab emulate`: iteration times of a real reducer in virtual time, beside the predicted ones."""

from typing import Annotated, Any

from typer import Option

from ..reference.files.writing import milliseconds
from ..reference.trace import Trace
from ..simulator.cost_terms import assumed_with_effect, origins
from ..simulator.inputs_with_default_costs import complete
from ..simulator.prediction import predict
from . import shared_options as options
from .predict import assumptions
from .terminal_output import progress, say, show_table, write_json

CLASS = (
    "The reducer: ddplab, torch, replicate (of FSDP2, with --set grouping=module), or MODULE:CLASS with the "
    "constructor of torch's class."
)


def emulate(
    trace: options.TraceFile,
    fabric: options.FabricFiles = None,
    world_size: options.WorldSize = 2,
    reducer: Annotated[str, Option("--class", metavar="CLASS", help=CLASS)] = "ddplab",
    caps: options.Caps = None,
    orders: options.Orders = None,
    hooks: options.Hooks = "none",
    changes: options.Changes = None,
    json_path: options.Json = None,
) -> None:
    """Run a real reducer on an emulated device and a modelled network, in virtual time.

    The device takes the recorded times instead of computing, and each collective takes the time that the fabric
    gives; nothing sleeps. Everything else is real: gradients, buckets, comm hooks and their results. The table shows
    what the reducer takes and what `predict` says for each combination of bucket cap, order and comm hook. ddplab's
    and torch's reducers take the predicted time to the nanosecond (exceptions: docs/emulation.md); a difference
    shows that a reducer behaves differently.
    """
    from ..conformance.class_under_test import Subject
    from ..emulation.emulate import emulate as run
    from ..emulation.emulate import emulated_fabric

    files = fabric or [options.FABRIC]
    options.check_outputs(json_path, inputs=[trace, *files, *options.files_of(reducer)])
    settings = options.read_settings(changes)
    policies = options.combined(settings.policy, caps, orders, hooks)
    recorded, make = Trace.load(trace), Subject(reducer).make if ":" in reducer else reducer
    completed = complete(recorded, settings.fabric(files), policy=settings.policy, variation=settings.variation)
    costs = emulated_fabric(completed.fabric, make)
    arguments: dict[str, Any] = {"world_size": world_size, "variation": completed.variation, "assume": False}
    runs = []
    with progress() as on_progress:
        for number, one in enumerate(policies):
            on_progress("emulating", number, len(policies))
            emulated = run(recorded, costs, policy=one, reducer=make, **arguments)
            runs.append((one, emulated, predict(recorded, costs, policy=one, **arguments)))
    model = recorded.workload.model
    cells = [
        {
            **options.cells_of_axes(one),
            "buckets": str(len(emulated.buckets) or "?"),
            "emulated ms": milliseconds(emulated.iteration_ns, ".3f"),
            "predicted ms": milliseconds(predicted.iteration_ns, ".3f"),
            "difference ns": str(emulated.iteration_ns - predicted.iteration_ns),
            "without overlap ms": milliseconds(predicted.no_overlap_ns),
        }
        for one, emulated, predicted in runs
    ]
    show_table(cells, f"{model} on {world_size} rank{'s' * (world_size > 1)}, reducer {reducer} in virtual time")
    each = [completed._replace(fabric=costs, policy=one) for one in policies]
    effective = assumed_with_effect(completed, origins(each[0], world_size, *each[1:]))
    assumed = [*effective, *(line for *_, one in runs for line in one.assumed)]
    for sentence in assumptions(recorded, assumed, costs, policies):
        say(sentence)
    results = [
        options.values_of_axes(one)
        | {"emulated_ns": emulated.iteration_ns, "predicted_ns": predicted.iteration_ns}
        | emulated.to_json()
        for one, emulated, predicted in runs
    ]
    write_json(json_path, {"model": model, "world_size": world_size, "class": reducer, "rows": results})
    largest_ns = max(abs(row["emulated_ns"] - row["predicted_ns"]) for row in results)
    say(f"largest difference between emulated and predicted median iterations: {largest_ns} ns")
