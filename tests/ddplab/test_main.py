"""All commands: manuals, examples and their order."""

import shlex

import typer

from ddplab.cli.import_traces import import_app
from ddplab.cli.main import COMMANDS, app

EXAMPLES = {
    "import" if command is import_app else command.__name__: examples for command, (_, *examples) in COMMANDS.items()
}


def test_every_command_has_a_manual_whose_examples_parse():
    commands = typer.main.get_command(app).commands
    assert set(EXAMPLES) == set(commands)
    for name, commands_shown in EXAMPLES.items():
        for example in commands_shown:
            program, command, *words = shlex.split(example)
            assert (program, command) == ("ddplab", name)
            manual = commands[name]
            if importers := getattr(manual, "commands", None):  # `import` has a command for each kind of file
                manual = importers[words.pop(0)]
            assert manual.make_context(name, words).params


def test_help_shows_the_usual_order_and_examples_that_fit_a_terminal(here):
    assert "  record      record when each gradient of a model is ready" in here("--help").stdout
    for name, shown in EXAMPLES.items():
        lines = here(name, "--help").stdout.splitlines()
        for example in shown:
            (line,) = (line for line in lines if line.strip() == example)
            assert len(line) <= 80
