"""The README: what it shows can be pasted and works, and what it names is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docs.map import with_map
from figures import demo

from .nccl_log import nccl_log

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\S+\.\w+)\n")
"""A block that begins so is the content of that file."""
LOGS = {f"{ranks}.log": nccl_log(ranks, {8: 20.0 + ranks, 2**20: 60.0 + ranks, 2**26: 900.0}) for ranks in (8, 16)}
"""What its reader has measured on GPUs."""


def blocks(kind):
    return [text for name, text in BLOCKS if name == kind]


def verbs():
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_every_verb_that_it_names_is_in_the_makefile():
    named = {
        verb
        for line in re.findall(r"\bmake ([a-z -]+)", "\n".join(text for _, text in BLOCKS))
        for verb in line.split()
    }
    assert {"tutorials", "demo", "test"} <= named <= verbs()


def test_every_file_that_it_links_to_is_there():
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    missing = [link for link in links if link and not (ROOT / link).exists()]
    assert not missing
    assert len(links) > 100


def test_its_map_of_the_code_is_that_of_the_docstrings():
    assert with_map(README) == README, "run `python -m docs.map`"


def test_its_score_is_that_of_make_score():
    page = (ROOT / "validation" / "score.md").read_text()
    ours, committed = (_cells(text) for text in (README.partition("| each must")[2], page.partition("## Score")[2]))
    assert len(ours) == len(committed) == 4
    for (_, limit, mean, worst, within, yardsticks, right, met), row in zip(ours, committed, strict=True):
        assert [limit, mean, worst, right, met] == [row[1], row[3], row[4], row[6], row[7]]
        assert within.startswith(row[2])
        assert row[5].startswith(yardsticks)


def _cells(text):
    """Of the rows of the first table, without its header and without spaces before a percent sign."""
    rows = re.findall(r"^\| (?!---|name)(.*) \|$", text.partition("\n\n#")[0], flags=re.MULTILINE)
    return [[cell.strip().replace(" %", "%") for cell in row.split("|")] for row in rows]


def test_its_table_of_the_demo_is_that_of_the_committed_run():
    assert demo.table() in README, "paste what `python -m figures.demo` prints"


def test_fragments_are_python_and_files_are_yaml():
    for text in blocks("py") + blocks("python"):
        compile(text, "README.md", "exec")
    assert [sorted(yaml.safe_load(text)) for text in blocks("yaml")] == [["steps"], ["levels", "source"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_and_programs_work_as_written(tmp_path):
    """In the order of the page, in an empty folder: files are written, then everything is run."""
    for text in blocks("yaml") + blocks("python"):
        if named := NAMED.match(text):
            (tmp_path / named[1]).write_text(text)
    for name, text in LOGS.items():
        (tmp_path / name).write_text(text)
    programs = [text for text in blocks("python") if not NAMED.match(text)]
    bin_ = Path(sys.executable).parent
    activated = {"PATH": f"{bin_}:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(tmp_path)}
    for text in blocks("sh"):
        for command in text.splitlines():
            if command == "make setup" or command.startswith(". .venv"):
                continue  # this environment is the one that they make
            ran = subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=activated, capture_output=True, text=True)
            assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    assert programs
    for program in programs:
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=activated, capture_output=True, text=True
        )
        assert ran.returncode == 0, f"{program}\n{ran.stderr}"
    made = {path.name for path in tmp_path.iterdir()}
    assert {"trace.json.gz", "mine.json.gz", "fabric.json", "h100.json.gz"} <= made
    assert {"map.png", "timeline.json", "timeline.png"} <= made
