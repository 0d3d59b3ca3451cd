"""The command `ddplab`: subcommands, help, and one-line errors.

Modules that need torch are imported when a subcommand that uses them runs, so that the others start quickly.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup, TyperOption

from .. import __version__
from ..reference.errors import Error
from ..reference.files.reading import first_problem, one_line_errors
from ..reference.files.writing import printable
from ..reference.ranks.launcher import on_rank_0
from .conform import conform
from .emulate import emulate
from .import_traces import import_app
from .learn import learn
from .plan import plan
from .predict import predict
from .record_calibrate_validate import calibrate, demo, record, validate
from .show import show
from .synthesize import synthesize
from .terminal_output import PrintableStream
from .tune import tune

USAGE = """\
Learn how data-parallel training works, test a reducer, and predict how training scales.

\b
Typical workflow:
  record      record when each gradient of a model is ready  -> trace.json.gz
  calibrate   measure collectives on this machine            -> fabric.json
  predict     predict iteration times from these two files
  validate    do all of the above, then train and compare

A trace of a GPU comes from a file of torch's profiler: see `import`. To model hardware that you do not have, make a
trace from a data sheet with `synthesize`, and use a node of the catalogue, a YAML file of links or logs of nccl-tests
as the fabric. `plan` answers how many of which GPU on which network, from names alone.

MODEL is a name that `show` lists, or MODULE:CALLABLE. The callable returns (model, loss_fn), and loss_fn(model) runs
one batch and returns the loss. 1 MB is 2**20 bytes.

The exit status is 0 on success, 1 after an error and 2 for an unknown command or option, or a class that `conform`
could not judge; every error is one line.
"""

Command = Callable[..., None] | typer.Typer
COMMANDS: Mapping[str, Mapping[Command, tuple[str, ...]]] = {
    "Learn": {
        learn: (
            "Write a reducer yourself, in seventeen judged rungs.",
            "ddplab learn",
            "ddplab learn my_ddp.py --watch",
            "ddplab learn --hint",
            "ddplab learn --tutor",
            "ddplab learn my_ddp.py --grade --junit grade.xml --json grade.json",
        ),
        demo: ("Check predictions against the real reducer, exactly.", "ddplab demo --out out/demo"),
    },
    "Test": {
        conform: (
            "Check that a data-parallel class is local training.",
            "ddplab conform torch",
            "ddplab conform my_package.ddp:MyDDP --only 'one weight,any timing'",
            "ddplab conform my_package.ddp:MyDDP --against torch --junit conform.xml",
            "ddplab conform ddplab --baseline main",
        )
    },
    "Predict": {
        plan: (
            "How many of which GPU on which network: knee, limit, cost.",
            "ddplab plan resnet50 aws-p4d",
            "ddplab plan bert-large a100 --network 100gbit --world-size 64 --step-ms 130",
            "ddplab plan gpt2 aws-p4d --samples 1e9 --deadline 3d --prices prices.csv",
            "ddplab plan trace.json.gz aws-p4d --measured 8:120ms --world-size 8,64,512",
        ),
        predict: (
            "Predict iteration times by bucket cap, order and hook.",
            "ddplab predict trace.json.gz --fabric out/fabric.json --caps 1,25,single",
            "ddplab predict trace.json.gz --hooks none,fp16 --timeline out/timeline.png",
            "ddplab predict trace.json.gz --fabric pod.yaml --straggler 3:1.5",
            "ddplab predict trace.json.gz --fabric aws-p4d --world-size 8,64,512",
            "ddplab predict trace.json.gz --fabric 8.log --fabric 16.log --world-size 16",
        ),
        tune: (
            "Find fast buckets, and a bound that none beats.",
            "ddplab tune trace.json.gz --fabric pod.yaml --world-size 64",
            "ddplab tune trace.json.gz --fabric aws-p4d --objective p95",
        ),
        emulate: (
            "Run a real reducer in virtual time, and compare.",
            "ddplab emulate trace.json.gz --fabric pod.yaml --world-size 8",
            "ddplab emulate trace.json.gz --fabric pod.yaml --class torch --caps 1,25",
        ),
    },
    "Inputs": {
        record: (
            "Record when each gradient of a model is ready.",
            "ddplab record --model resnet18 --out out/resnet18.json.gz",
            "ddplab record --model my_models:small --world-size 2 --iterations 20",
        ),
        import_app: (
            "Make a trace from files of torch's profiler.",
            "ddplab import kineto rank0.json.gz --out trace.json.gz",
            "ddplab import kineto rank*.json --model resnet50",
        ),
        synthesize: (
            "Make a trace from a data sheet, or rescale one.",
            "ddplab synthesize --model resnet50 --device a100-40gb-tf32",
            "ddplab synthesize --model vit-b-16 --device h100 --out out/vit.json.gz",
            "ddplab synthesize --rescale a100.json.gz --from a100 --device h100",
        ),
        calibrate: (
            "Measure collectives and their costs on this machine.",
            "ddplab calibrate --model mlp --world-size 2 --out out/fabric.json",
            "ddplab calibrate --model mlp --hook fp16 --hook bf16",
        ),
        show: (
            "Describe a trace, a fabric, a name or all settings.",
            "ddplab show",
            "ddplab show dgx-h100",
            "ddplab show 8.log 16.log pod.yaml",
            "ddplab show settings",
        ),
    },
    "Check": {
        validate: (
            "Predict, then train, and compare.",
            "ddplab validate --model mlp --caps 1,25 --out out/mlp",
            "ddplab validate --model my_models:small --hooks none,bf16",
            "ddplab validate --model resnet18 --plan out/plan.json --torch",
        )
    },
}
"""Subcommands by group, each with its line in the list of the help, and the examples at the end of its own help."""


def name_of(command: Command) -> str:
    """Return the name of a subcommand."""
    return "import" if isinstance(command, typer.Typer) else command.__name__


class OnceEach(TyperCommand):
    """Refuses an option that is given twice and has one value, of which the last would count in silence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an option that stands in them twice is an error."""
        *_, order = self.make_parser(ctx).parse_args(list(args))
        for option, count in Counter(order).items():
            if count > 1 and isinstance(option, TyperOption) and not (option.multiple or option.is_flag):
                commas = ", its values separated by commas" if "," in str(option.metavar) else ""
                raise ValueError(f"{option.opts[0]}: expected once{commas}, got it {count} times")
        return super().parse_args(ctx, args)


class Groups(TyperGroup):
    """Lists the subcommands by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group."""
        for group, commands in COMMANDS.items():
            with formatter.section(group):
                formatter.write_dl([(name_of(command), summary) for command, (summary, *_) in commands.items()])


app = typer.Typer(help=USAGE, cls=Groups, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:  # noqa: FBT001  # typer passes it by position
    if asked:
        print(f"ddplab {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
]


@app.callback()
def _options(version: Version = False) -> None:  # noqa: FBT002
    """Options that belong to no subcommand."""


for group, commands in COMMANDS.items():
    for command, (summary, *examples) in commands.items():
        epilog = "\n  ".join(["\b\nExamples:", *examples])
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name_of(command), short_help=summary, epilog=epilog, rich_help_panel=group)
        else:
            app.command(cls=OnceEach, short_help=summary, epilog=epilog, rich_help_panel=group)(command)


def main() -> None:
    """Run the command line; print errors that the user can correct as one line."""
    try:
        # The standard output is restored at the end; see `check_outputs`.
        with one_line_errors(), redirect_stdout(PrintableStream(sys.stdout)):
            status = on_rank_0(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except typer.TyperException as error:  # an unknown command or option, or an impossible value
        context = getattr(error, "ctx", None)
        command_path = context.command_path if context else "ddplab"
        message = error.format_message()
        if isinstance(error, typer.BadParameter) and isinstance(problem := error.__cause__, ValidationError):
            option = error.param.opts[0] if error.param is not None else "value"
            status = 2 if command_path.endswith(" conform") else 1  # whose 1 is a verdict
            _end(f"{option}: {first_problem(problem).replace('input should be', 'expected to be', 1)}", status)
        _end(f"{message}{'' if message[-1:] in '.?' else '.'} See `{command_path} --help`.", error.exit_code)
    except (Error, ValueError, OSError) as error:
        _end(str(error), getattr(error, "exit_status", 1))
    except ModuleNotFoundError as error:
        if (package := str(error.name).partition(".")[0]) not in ("pandas", "matplotlib"):
            raise
        _end(f"expected the package {package}; install it with `pip install 'ddplab[predict]'`", 1)
    sys.exit(status)


def _end(line: str, status: int) -> NoReturn:
    shown = printable(line).replace("\n", "\n  ")  # names of files, too, cannot forge a line
    print(f"ddplab: {shown}", file=sys.stderr)
    sys.exit(status)
