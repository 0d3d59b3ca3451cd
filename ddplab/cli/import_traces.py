"""`ddplab import`: makes traces from files of other tools."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from ..reference.files.writing import milliseconds
from ..simulator.profiler_import.trace_of_profile import ImportedProfile, import_profile
from .shared_options import Json, TraceOut, check_outputs, files_of
from .terminal_output import describe_trace, progress, say, show_table, write_json

FILES = "Files of torch's profiler (Chrome JSON, .gz too), one per rank."
MODEL = (
    "The profiled model, for names and shapes of its parameters: a built-in one, or MODULE:CALLABLE. Without it, "
    "parameters are numbered."
)
_ms = partial(milliseconds, form=".2f")


class _FormatMayBeLeftOut(TyperGroup):
    """`ddplab import FILE` reads the only format that there is."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # its type differs between versions of typer
        return super().resolve_command(ctx, args if args[0] in self.commands else ["kineto", *args])


import_app = typer.Typer(
    help="Make a trace from files of other tools.",
    cls=_FormatMayBeLeftOut,
    rich_markup_mode=None,
    add_completion=False,
)
import_app.callback()(lambda: None)  # so that `kineto` is a subcommand


@import_app.command(short_help="Files of torch's profiler.")
def kineto(
    files: Annotated[list[Path], Argument(metavar="FILE", help=FILES)],
    out: TraceOut = Path("out/imported.json.gz"),
    model: Annotated[str | None, Option(metavar="MODEL", help=MODEL)] = None,
    json_path: Json = None,
) -> None:
    """Make a trace from files of torch's profiler, one per rank, of an unmodified training script.

    Profile with the CPU and the GPU among the activities, call `step()` of the profiler after each training step, and
    write the file with `export_chrome_trace`. With record_shapes=True the file has the shapes of the gradients.

    The script may use DistributedDataParallel or a plain module. Times are those of the GPU, if there is one. A
    gradient counts as ready when the last kernel that was launched before its accumulation has ended.
    """
    check_outputs(out, json_path, inputs=[*files, *files_of(model or "")])
    parameters = None
    if model is not None:
        from ..operation_counter import measure_operations

        parameters = measure_operations(model).parameters
    with progress("reading files") as on_progress:
        on_progress(f"reading {', '.join(path.name for path in files[:3])}", 0, 1)
        profile = import_profile(files, parameters=parameters, model=model)
    profile.trace.save(out)
    gpu = profile.gpu or ("a GPU without a name" if profile.steps[0].on_gpu else "no GPU")
    title = f"{gpu}: steps of rank {profile.trace.ranks[0].rank}, in ms"
    show_table(_step_rows(profile), title, optional=("buckets", "forward", "optimiser", "all-reduces", "GPU busy"))
    show_table([describe_trace(profile.trace)], f"saved as {out}")
    for note in profile.notes:
        say(f"- {note}")
    write_json(json_path, {"trace": str(out), **profile.to_json()})


def _step_rows(profile: ImportedProfile) -> list[dict[str, str]]:
    return [
        {
            "step": one.name,
            "iteration": _ms(one.end_ns - one.start_ns),
            "forward": _ms(one.forward_end_ns - one.start_ns),
            "backward": _ms(one.last_ready_ns - one.backward_start_ns),
            **({"GPU busy": _ms(one.computing_ns)} if one.on_gpu else {}),
            "all-reduces": _ms(sum(each.end_ns - each.start_ns for each in one.all_reduces)),
            "buckets": str(len(one.buckets)),
            "optimiser": "-" if one.optimizer is None else _ms(one.optimizer[1] - one.optimizer[0]),
            **({"waiting for the host": _ms(one.host_bound_ns)} if one.on_gpu else {}),
        }
        for one in profile.steps
    ]
