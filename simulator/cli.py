"""The command `ddplab`. Whatever needs torch is imported by the command that needs it."""

import os
import sys
from typing import NoReturn

import typer

from reference.errors import Error

from .commands.fabric import fabric
from .commands.knobs import knobs
from .commands.manual import SUMMARIES, USAGE, epilog
from .commands.measure import calibrate, record
from .commands.predict import predict
from .commands.sweep import sweep
from .commands.synthesize import rescale, synthesize
from .commands.validate import demo, validate

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
