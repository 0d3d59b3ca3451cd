"""The command `ddplab`: its commands, its manual, and how errors become one line.

Commands import whatever needs torch only when they run.
"""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import typer

from reference.errors import Error

from .inspect import fabric, knobs
from .measure import calibrate, demo, record, validate
from .predict import predict, sweep
from .synthesize import rescale, synthesize

USAGE = """\
Record data-parallel training, predict it under other buckets and networks, check the predictions.

\b
The usual order:
  record      when each gradient of a model is ready       -> trace.json.gz
  calibrate   what collectives cost on this machine         -> fabric.json
  predict     the iteration under other buckets, networks, world sizes
  validate    all of that, and then training for real, side by side

Without the machine: `synthesize` makes a trace from a data sheet, a fabric may be a YAML file of links or logs of
nccl-tests, `sweep` tries all combinations, `knobs` lists whatever can be asked.

A model is resnet50, resnet18, mlp, transformer, small-tensors or MODULE:CALLABLE; the callable returns
(model, loss_fn), and loss_fn(model) runs one batch and returns the loss. Sizes are in MB of 2**20 bytes.

Each command prints a table, takes --json PATH for programs, and ends with 0; with 1 and one line if something
is wrong that you can mend; with 2 if an option is.
"""

SUMMARIES: Mapping[str, str] = {
    "record": "When each gradient of a model is ready.",
    "synthesize": "A trace from a model and a data sheet; nothing runs.",
    "rescale": "A recorded trace, on another device.",
    "calibrate": "What collectives, copies and launches cost here.",
    "fabric": "What is known of a fabric: latency and bandwidth.",
    "predict": "The iteration under each bucket cap, order and hook.",
    "sweep": "All combinations, as a table and a heat map.",
    "knobs": "Everything that can be asked, with units and sources.",
    "validate": "Predict, then train for real, and compare.",
    "demo": "All of it for two models, in 5 to 7 minutes.",
}
"""By command, for the list of all."""

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "record": (
        "ddplab record --model resnet18 --out out/resnet18.json.gz",
        "ddplab record --model my_models:small --world-size 2 --iterations 20 --out out/small.json.gz",
    ),
    "synthesize": (
        "ddplab synthesize --model resnet50 --device a100-40gb-tf32 --out out/a100.json.gz",
        "ddplab synthesize --model resnet50 --device h100-tf32 --step-ms 95 --out out/h100.json.gz",
    ),
    "rescale": ("ddplab rescale out/a100.json.gz --model resnet50 --from a100-40gb-tf32 --to h100-tf32",),
    "calibrate": (
        "ddplab calibrate --model mlp --world-size 2 --out out/fabric.json",
        "ddplab calibrate --model mlp --hook fp16 --hook power_sgd:2 --link-rate 1gbit --out out/gbit.json",
    ),
    "fabric": (
        "ddplab fabric out/fabric.json",
        "ddplab fabric 8.log 16.log pod.yaml",
    ),
    "predict": (
        "ddplab predict trace.json.gz --fabric out/fabric.json --world-size 2 --caps 1,25,single",
        "ddplab predict trace.json.gz --fabric pod.yaml --world-size 64 --hooks none,fp16 --straggler 3:1.5",
        "ddplab predict trace.json.gz --fabric 8.log --fabric 16.log --world-size 16 --timeline out/timeline.png",
    ),
    "sweep": (
        "ddplab sweep trace.json.gz --fabric pod.yaml --world-sizes 8,64,512 --caps 1,5,25 --heat-map out/map.png",
    ),
    "knobs": ("ddplab knobs",),
    "validate": (
        "ddplab validate --model mlp --caps 1,25 --out out/mlp",
        "ddplab validate --model my_models:small --world-size 4 --hooks none,bf16 --link-rate 1gbit --out out/small",
    ),
    "demo": ("ddplab demo --out out/demo",),
}
"""By command."""


def epilog(command: str) -> str:
    """The examples of a command, as its help ends with them."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in EXAMPLES[command])


INTERRUPTED = 130
"""The status after Ctrl-C, as shells have it."""

app = typer.Typer(
    help=USAGE,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (record, synthesize, rescale, calibrate, fabric, predict, sweep, knobs, validate, demo):
    name = command.__name__
    app.command(short_help=SUMMARIES[name], epilog=epilog(name))(command)


def main() -> None:
    """Run the command; what the user can mend is told in one line."""
    sys.path.insert(0, os.getcwd())  # so that --model finds the user's own module, as `python -m` would
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.TyperException as error:  # a wrong command, option or value
        asked = getattr(error, "ctx", None)
        manual = f"{asked.command_path if asked else 'ddplab'} --help"
        _end(f"{error.format_message().rstrip('.')}; {manual} tells what there is", error.exit_code)
    except (Error, ValueError, OSError) as error:
        _end(str(error), 1)
    if status == INTERRUPTED:
        _end("interrupted; nothing of it runs any more, and files are whole or absent", INTERRUPTED)
    sys.exit(status)


def _end(line: str, status: int) -> NoReturn:
    print(f"ddplab: {line}", file=sys.stderr)
    sys.exit(status)
