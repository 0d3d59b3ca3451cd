"""The command `ddplab`. Whatever needs torch is imported by the command that needs it."""

import os
import sys

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

app = typer.Typer(
    help=USAGE,
    no_args_is_help=True,
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
        app()
    except (Error, ValueError, OSError) as error:
        sys.exit(f"ddplab: {error}")
