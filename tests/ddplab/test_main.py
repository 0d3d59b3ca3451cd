"""All commands: manuals, examples and their order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import typer

from ddplab.cli.main import COMMANDS, app, name_of

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
EXAMPLES = {name_of(command): examples for group in COMMANDS.values() for command, (_, *examples) in group.items()}


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
    help_text = here("--help").stdout
    assert "  record      record when each gradient of a model is ready" in help_text
    for group in COMMANDS:
        assert f"\n{group}:\n" in help_text
    for name in EXAMPLES:
        assert re.search(rf"\n  {name}  +[A-Z]", help_text)
    for name, shown in EXAMPLES.items():
        lines = here(name, "--help").stdout.splitlines()
        for example in shown:
            (line,) = (line for line in lines if line.strip() == example)
            assert len(line) <= 80


def test_without_the_packages_of_pictures_one_line_says_what_to_install(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        done = here(
            "predict", ROOT / "benchmarks" / "resnet50.json.gz", "--fabric", "aws-p4d", "--timeline", "timeline.png"
        )
    assert (done.returncode, done.stdout) == (1, "")
    wanted = "ddplab: expected the package matplotlib; install it with `pip install 'ddplab[predict]'`\n"
    assert done.stderr.endswith(wanted)


def test_no_module_of_the_working_directory_runs_unless_one_was_named(tmp_path):
    """Such as one beside a trace that somebody has sent, whose name is that of a package that another one tries."""
    for name in ("lz4", "numexpr", "bottleneck", "pyarrow", "sitecustomize", "tiny"):
        (tmp_path / f"{name}.py").write_text(f"open('{name}.ran', 'w')\nimport torch\n")
    (tmp_path / "tiny.py").write_text("import helper\nfrom tests.models_for_cli import tiny\n")
    (tmp_path / "helper.py").write_text("open('helper.ran', 'w')\n")
    trace = ROOT / "benchmarks" / "resnet50.json.gz"
    words = ["predict", trace, "--fabric", "aws-p4d", "--caps", "1,25", "--hooks", "none,fp16", "--timeline", "t.png"]
    for command in ([SCRIPTS / "ddplab"], [sys.executable, "-m", "ddplab"]):
        done = subprocess.run([*command, *words], cwd=tmp_path, stderr=subprocess.PIPE, timeout=110, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    assert not list(tmp_path.glob("*.ran"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = ["record", "--model", "tiny:tiny", "--iterations", "2", "--out", "t.json"]
    done = subprocess.run([SCRIPTS / "ddplab", *words], cwd=tmp_path, env=environment, timeout=110, check=False)
    assert done.returncode == 0
    assert [path.name for path in tmp_path.glob("*.ran")] == ["helper.ran"]
