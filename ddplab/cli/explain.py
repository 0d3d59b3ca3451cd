"""`ddplab explain`: shows why predictions and measurements of a run of `validate` differ."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from reference.bucketing import cap_name

from .shared_options import Json, check_outputs, check_picture, save_picture
from .terminal_output import show_table, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..validation.error_causes import Explanation

FIGURE = "Where to draw the causes (.png, .svg). Default: explain.png in FOLDER."
TIMES = {
    "packed": "packed_ns",
    "launched": "launched_ns",
    "started": "start_ns",
    "done": "done_ns",
    "copied out": "copied_out_ns",
}
"""Columns of the table of buckets, and the fields of its times."""


def explain(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder of a run, as `validate --out` wrote it.")],
    figure: Annotated[Path | None, Option(metavar="PATH", help=FIGURE)] = None,
    json_path: Json = None,
) -> None:
    """Show why predictions and measurements of a run differ.

    For each configuration, the table names the cause that contributes most. Causes are found by replacing the
    predicted durations of one part after the other by the measured ones, and simulating the iteration each time. For
    the configuration with the largest error, tables show all causes, all parts and the buckets. Errors are those by
    the clock, not the paired errors.
    """
    from ..validation.error_causes import explain_run

    picture = figure or folder / "explain.png"
    check_picture("--figure", picture)
    read = [path for name in ("report.*", "fabric.json", "*.gz", "*.parquet") for path in folder.rglob(name)]
    check_outputs(picture, json_path, inputs=read)
    explanations, left_out = explain_run(folder)
    worst = max(explanations, key=lambda one: abs(one.error))
    show_table(
        [_summary(one) for one in explanations],
        "iteration in ms; the main cause of each error, and what it adds to the prediction in ms",
        optional=("hook", "not explained"),
    )
    name = f"{worst.model}, {worst.name}"
    show_table(_part_rows(worst), f"{name}: parts of the slowest rank's iteration, and causes of the error, in ms")
    title = f"{name}: buckets, predicted | measured, in ms"
    show_table(_bucket_rows(worst), title, optional=("packed", "copied out"))
    for reason in left_out:
        print(reason)
    save_picture(_waterfalls(explanations), picture)
    write_json(json_path, {"configurations": [one.to_json() for one in explanations], "left_out": left_out})


def _summary(one: "Explanation") -> dict[str, str]:
    cause, ns = one.main_cause
    return {
        "cap": cap_name(one.configuration.cap_mb),
        "order": one.configuration.order,
        "hook": one.configuration.hook,
        "predicted": f"{one.predicted_ns / 1e6:.1f}",
        "measured": f"{one.measured_ns / 1e6:.1f}",
        "error": f"{one.error:+.1%}",
        "main cause": cause,
        "cause, ms": f"{ns / 1e6:+.2f}",
        "not explained": f"{one.not_explained_ns / 1e6:+.2f}",
    }


def _part_rows(one: "Explanation") -> list[dict[str, str]]:
    parts = [
        (part, predicted_ns, one.measured_parts_ns[part], one.causes_ns.get(part))
        for part, predicted_ns in one.predicted_parts_ns.items()
    ]
    rest = ("not explained", None, None, one.not_explained_ns)
    whole = ("iteration", one.predicted_ns, one.measured_ns, one.measured_ns - one.predicted_ns)
    return [
        {"part": part, "predicted": _ms(predicted), "measured": _ms(measured), "cause": _ms(cause, "+")}
        for part, predicted, measured, cause in (*parts, rest, whole)
    ]


def _ms(ns: float | None, sign: str = "") -> str:
    return "" if ns is None else f"{ns / 1e6:{sign}.2f}"


def _bucket_rows(one: "Explanation") -> list[dict[str, str]]:
    return [
        {"bucket": str(row["bucket"])}
        | {
            name: f"{row[f'predicted_{field}'] / 1e6:.2f} | {row[f'measured_{field}'] / 1e6:.2f}"
            for name, field in TIMES.items()
        }
        for row in one.buckets.to_dict("records")
    ]


def _waterfalls(explanations: "list[Explanation]") -> "Figure":
    from matplotlib.figure import Figure

    from ..validation.error_causes import draw_waterfall

    columns = min(3, len(explanations))
    rows = -(-len(explanations) // columns)
    figure = Figure(figsize=(6 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for one, ax in zip(explanations, panels, strict=False):
        draw_waterfall(one, ax)
        ax.set_title(f"{one.name}: {one.error:+.1%}", loc="left", fontsize=10)
    for ax in list(panels)[len(explanations) :]:
        ax.remove()
    figure.suptitle(f"{explanations[0].model}: from the predicted to the measured iteration", x=0.01, ha="left")
    return figure
