"""`ddplab predict`: ask a trace what an iteration would cost."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from reference.trace import Trace

from ..answers.timeline_plot import draw_timeline
from ..checks import overruled
from ..iteration.policy import Policy
from ..prediction import Prediction, predict_policy
from ..show import show_table, write_json
from .arguments import (
    FABRIC_FILE,
    OPTIONS,
    FabricSettings,
    Hooks,
    Json,
    ProcessorFile,
    Settings,
    Stragglers,
    VariationSettings,
    WorldSize,
    check_outputs,
    read_counts,
    read_fabric,
    read_hooks,
    read_policy,
    read_stragglers,
    read_variation,
)
from .choices import CAPS, ChosenOrders, cap_json, cap_word, choose_caps, choose_orders
from .pictures import check_picture, save_picture

FABRIC = Path("out/fabric.json")
USUAL_CAPS = "0.5,1,5,25,single"
SPARED = ("hook", "critical buckets", "computation ms", "buckets")
"""Columns that a narrow terminal does without."""


def predict(
    trace: Annotated[Path, typer.Argument(help="A recorded trace.")],
    fabric: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"{FABRIC_FILE}; give it again to merge measured tables: what else they hold is the first one's.",
            show_default=str(FABRIC),
        ),
    ] = None,
    world_size: WorldSize = 2,
    caps: Annotated[str | None, typer.Option(help=CAPS, show_default=USUAL_CAPS)] = None,
    orders: ChosenOrders = None,
    hooks: Hooks = "none",
    policy: Settings = None,
    fabric_set: FabricSettings = None,
    processor: ProcessorFile = None,
    variation: VariationSettings = None,
    straggler: Stragglers = None,
    inputs: Annotated[
        str | None, typer.Option(help="Batches of each rank, comma-separated: the ranks train under Join.")
    ] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the fastest one's timeline here.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw the fastest one's timeline here (.png, .svg).")] = None,
    json_path: Json = None,
) -> None:
    """Predict the iteration time under each bucket cap, order and comm hook.

    Each row has the median iteration, an interval that holds 90 % of them, computation alone, what data
    parallelism adds to that (copies, slower computation, waiting), and the buckets on the critical path; of the
    fastest row also where its time goes. A trace of one rank does for any world size. What is not known and so counts
    as free is told.
    """
    check_picture("--timeline", timeline)
    check_outputs(perfetto, timeline, json_path)
    told = read_policy(policy)
    choices = _choices(told, caps, orders, hooks)
    recorded, costs = Trace.load(trace), read_fabric(fabric or [FABRIC], fabric_set, processor)
    ask = partial(
        predict_policy,
        *(recorded, costs, world_size),
        variation=read_variation(variation),
        stragglers=read_stragglers(straggler),
        inputs=None if inputs is None else read_counts("--inputs", inputs, least=0),
    )
    predictions = [ask(choice) for choice in choices]
    model = recorded.workload.model
    show_table(list(map(_row, choices, predictions)), f"{model} on {world_size} ranks, predicted", spared=SPARED)
    for sentence in dict.fromkeys(sentence for one in predictions for sentence in one.counted_as_free):
        print(sentence)
    fastest = min(predictions, key=lambda prediction: prediction.iteration_ns)
    _show_breakdown(fastest, told.sync_every)
    _save_timelines(fastest, perfetto, timeline)
    rows = list(map(_row_json, choices, predictions))
    write_json(json_path, {"model": model, "world_size": world_size, "rows": rows})


def _choices(told: Policy, caps: str | None, orders: str | None, hooks: str) -> list[Policy]:
    tried = product(choose_caps(caps, told, USUAL_CAPS), choose_orders(orders, told), read_hooks(hooks))
    return [told.model_copy(update=dict(zip(OPTIONS, values, strict=True))) for values in tried]


def _asked(choice: Policy) -> dict[str, Any]:
    """The axes of a choice; where another field of the policy decides, its name."""
    asked = {"bucket_cap_mb": choice.bucket_cap_mb, "order": choice.order, "hook": choice.hook.name}
    return asked | overruled(choice)


def _row(choice: Policy, prediction: Prediction) -> dict[str, str]:
    """For a person, in milliseconds."""
    asked = _asked(choice)
    return {
        "cap": cap_word(asked["bucket_cap_mb"]),
        "order": asked["order"],
        "hook": asked["hook"],
        "buckets": str(len(prediction.buckets)),
        "iteration ms": f"{prediction.iteration_ns / 1e6:.1f}",
        "90 % ms": f"{prediction.interval_ns[0] / 1e6:.1f} - {prediction.interval_ns[1] / 1e6:.1f}",
        "computation ms": f"{prediction.compute_ns / 1e6:.1f}",
        "added ms": f"{prediction.exposed_comm_ns / 1e6:.1f}",
        "critical buckets": ", ".join(map(str, prediction.critical_buckets)) or "none",
    }


def _row_json(choice: Policy, prediction: Prediction) -> dict[str, Any]:
    """For programs; see `cap_json`."""
    asked = _asked(choice)
    return {"cap_mb": cap_json(asked.pop("bucket_cap_mb")), **asked, **prediction.to_json()}


def _show_breakdown(prediction: Prediction, cycle: int) -> None:
    parts = {part: ns for part, ns in prediction.breakdown.items() if ns}
    row = {part.replace("_", " "): f"{ns / 1e6:.1f}" for part, ns in parts.items()}
    what = "iteration" if cycle == 1 else f"cycle of {cycle} iterations"
    show_table([row], f"where the fastest one's median {what} goes on its slowest rank, ms")
    if prediction.epoch_end_ns:
        print(f"after the last iteration all ranks get one's model: {prediction.epoch_end_ns / 1e6:.1f} ms")


def _save_timelines(prediction: Prediction, perfetto: Path | None, picture: Path | None) -> None:
    if perfetto is not None:
        prediction.save_perfetto(perfetto)
        print(f"timeline of the fastest in {perfetto}; open it in ui.perfetto.dev")
    if picture is not None:
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        draw_timeline(prediction, figure.add_subplot())
        save_picture(figure, picture)
