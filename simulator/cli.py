"""The command `ddplab`. Whatever needs torch is imported by the command that needs it."""

import os
import sys

import typer

from reference.errors import Error

from .commands.fabric import fabric
from .commands.knobs import knobs
from .commands.measure import calibrate, record
from .commands.predict import predict
from .commands.sweep import sweep
from .commands.synthesize import rescale, synthesize
from .commands.validate import demo, validate

app = typer.Typer(
    help="Record data-parallel training, predict it under other buckets and networks, check the predictions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(record)
app.command()(synthesize)
app.command()(rescale)
app.command()(calibrate)
app.command()(fabric)
app.command()(predict)
app.command()(sweep)
app.command()(knobs)
app.command()(validate)
app.command()(demo)


def main() -> None:
    """Run the command; what the user can mend is told in one line."""
    sys.path.insert(0, os.getcwd())  # so that --model finds the user's own module, as `python -m` would
    try:
        app()
    except (Error, ValueError, OSError) as error:
        sys.exit(f"ddplab: {error}")
