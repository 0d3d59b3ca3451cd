"""README, guides, DESIGN, CONTRIBUTING, tutorials: commands work as written, and every name in them exists."""

import re
import subprocess
import sys
from fnmatch import filter as matching
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import ddplab
from docs.map import site_page

from . import misuse
from .nccl_log import nccl_log

ROOT = Path(__file__).parent.parent
README, DESIGN, CONTRIBUTING = ((ROOT / f"{name}.md").read_text() for name in ("README", "DESIGN", "CONTRIBUTING"))
GUIDES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("reducer", "predict", "accuracy", "speed")}
LABORATORY = (ROOT / "validation" / "README.md").read_text()
PAGES = [DESIGN, CONTRIBUTING, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]
DIFFERENCES = (ROOT / "docs" / "differences_from_torch.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", "\n".join([README, *GUIDES.values()]), flags=re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\S+\.\w+)\n")
"""A block that begins with such a comment is the content of that file."""
LOGS = {f"{ranks}.log": nccl_log(ranks, {8: 20.0 + ranks, 2**20: 60.0 + ranks, 2**26: 900.0}) for ranks in (8, 16)}
"""Logs of GPUs, which the reader of the README has."""


PUBLISHED = "../../deployments/github-pages"
"""Where GitHub shows what `pages.yml` has published, as seen from the README of any repository."""


def blocks(kind):
    return [text for name, text in BLOCKS if name == kind]


def verbs():
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_every_verb_that_they_name_is_in_the_makefile():
    pages = "\n".join([README, *PAGES])
    code = [*(text for _, text in BLOCKS), *re.findall(r"`(make [^`]+)`", pages)]
    named = {verb for line in re.findall(r"\bmake ([a-z -]+)", "\n".join(code)) for verb in line.split()}
    assert {"tutorials", "demo", "test", "explore"} <= named <= verbs()


def test_every_file_that_they_name_exists():
    pages = [ROOT / f"{name}.md" for name in ("README", "DESIGN", "CONTRIBUTING")]
    pages += (ROOT / "docs").glob("*.md")
    found = 0
    for page in pages:
        text = page.read_text()
        text = text.replace(f"]({PUBLISHED})", "")
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
        paths = re.findall(r"`((?:ddplab|reference|simulator|tests|tutorials|validation|figures)/[\w/.]*)`", text)
        missing = [link for link in links if link and not (page.parent / link).exists()]
        missing += [path for path in paths if not (ROOT / path).exists()]
        assert not missing, page.name
        found += len(links)
    assert found > 100


def test_the_published_page_comes_before_its_file():
    assert 0 < README.index(f"({PUBLISHED})") < README.index("(figures/annotated_ddp.html)")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "pages.yml").read_text())
    assert workflow["jobs"]["pages"]["environment"]["name"] == Path(PUBLISHED).name


def test_every_file_and_method_that_a_tutorial_names_exists():
    code = "\n".join(
        path.read_text() for package in ("reference", "simulator") for path in (ROOT / package).rglob("*.py")
    )
    classes, functions = (set(re.findall(rf"^ *{kind} (\w+)", code, re.MULTILINE)) for kind in ("class", "def"))
    for notebook in (ROOT / "tutorials").glob("*.ipynb"):
        text = notebook.read_text()
        links = re.findall(r"\[`([\w/]+\.py)`\]\(\.\./([^)#]+)\)", text)
        assert links, notebook.name
        every = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
        assert not [link for link in every if not (notebook.parent / link).exists()], notebook.name
        assert not [link for link in links if link[0] != link[1] or not (ROOT / link[1]).exists()], notebook.name
        methods = [
            (name, method) for name, method in re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)`", text) if name in classes
        ]
        assert not [name for name in methods if name[1] not in functions], notebook.name
        assert set(re.findall(r"`(_[a-z]\w*)`", text)) <= functions, notebook.name


def test_every_test_that_a_page_names_exists():
    modules = list((ROOT / "tests").rglob("test_*.py"))
    defined = {name for module in modules for name in re.findall(r"^def (\w+)", module.read_text(), re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", "\n".join(PAGES)))
    assert len(named) > 10
    assert named <= defined | {module.stem for module in modules}


def test_every_difference_from_torch_has_a_test():
    rows = [_cells(row) for row in DIFFERENCES.splitlines() if row.startswith("| ")]
    rows = [row for row in rows if row[0].strip("-") and row[1] != "torch"]
    assert len(rows) > 40
    without = [row[0] for row in rows if not re.search(r"`test_\w+\*?`", row[3])]
    assert not without


def test_every_misuse_that_the_differences_name_exists():
    cells = re.findall(r"`test_error_messages`: (.*) \|$", DIFFERENCES, re.MULTILINE)
    named = re.findall(r"`([\w*]+)`", " ".join(cells))
    assert len(named) > 10
    assert not [name for name in named if not matching(misuse.MISUSES, name)]


def test_every_object_in_the_table_of_features_exists():
    table = GUIDES["reducer"].partition("| feature | object |")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w.]+)\.(\w+)`", table)
    assert len(named) > 10
    assert not [
        (module, name) for module, name in named if not hasattr(import_module(f"ddplab.reference.{module}"), name)
    ]


def test_the_tagline_is_the_same_everywhere():
    tagline = ddplab.__doc__.partition("\n")[0]
    for page in ("README.md", "CONTRIBUTING.md", "docs/index.md"):
        assert (ROOT / page).read_text().splitlines()[2] == tagline, page
    assert f'description = "{tagline}"' in (ROOT / "pyproject.toml").read_text()


def test_the_page_of_public_names_has_all():
    page = (ROOT / "docs" / "public_names.md").read_text()
    rows = re.findall(r"^\| \{py:\w+\}`(\w+) <([\w.]+)\.(\w+)>`", page, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == ddplab.__all__
    linked = {name: getattr(import_module(module), other) for name, module, other in rows}
    assert linked == {name: getattr(ddplab, name) for name in ddplab.__all__}


def test_the_map_of_the_code_links_to_existing_files():
    links = re.findall(r"\]\(([^)#]+)", site_page())
    assert "../reference/reducer.py" in links
    assert all((ROOT / "docs" / link).exists() for link in links)


def test_the_score_is_that_of_make_score():
    """The guide names the parts in other words, and has the same figures."""
    page = (ROOT / "validation" / "score.md").read_text()
    verdicts = re.findall(r"^\| \([a-i]\) .* \|$", page, flags=re.MULTILINE)
    committed = [_cells(row)[1:3] + _cells(row)[-1:] for row in verdicts]
    table = GUIDES["accuracy"].partition("| mean error |")[2].partition("\n\n")[0]
    ours = [_cells(row)[1:] for row in table.splitlines() if row.startswith("| (")]
    assert ours == committed


def test_what_a_buyer_may_expect_is_that_of_the_score():
    expected = _table_of_the_score("(i) within and beyond one node")[:3]
    table = LABORATORY.partition("| half-width: median and largest |")[2].partition("\n\n")[0]
    assert [_cells(row)[1:] for row in table.splitlines()[2:]] == [row[1:] for row in expected]
    _, _, mean, _, inside, *_ = expected[2]
    said = " ".join(README.replace(" %", "%").split())
    assert f"mean error was {mean} on clusters that had no part in the constants, and {inside} measurements" in said
    guide = " ".join(GUIDES["accuracy"].replace(" %", "%").split())
    assert f"beyond one node, their mean error is {mean}." in guide


def test_what_the_laboratory_says_of_systems_is_that_of_the_score():
    text = " ".join(LABORATORY.split())
    signs = {row[0]: row[2:4] for row in _table_of_the_score("(i) signs beyond one node")}
    assert "{} rows are too fast and {} too slow".format(*signs["all"]) in text
    assert "the means of {} systems too fast and of {} too slow".format(*signs["systems"]) in text
    errors = {
        row[0]: row[4].replace("%", "").split(" -> ") for row in _table_of_the_score("(i) each system by the others")
    }
    assert "these V100s then rises from {} to {} %".format(*errors.pop("DGX V100")) in text
    assert "that of Mahti from {} to {} %".format(*errors.pop("CSC Mahti, A100")) in text
    assert "the mean errors of the four other systems change by 0.1 % at most" in text
    assert len(errors) == 4
    assert all(abs(float(after) - float(before)) < 0.11 for before, after in errors.values())


def _table_of_the_score(title):
    section = (ROOT / "validation" / "score.md").read_text().partition(f"### {title}\n")[2].partition("\n#")[0]
    return [_cells(row) for row in section.splitlines() if row.startswith("| ")][2:]


def _cells(row):
    """The cells of a row of a table, without spaces before percent signs."""
    return [cell.strip().replace(" %", "%") for cell in row.strip("|").split("|")]


def test_fragments_are_python_and_files_are_yaml():
    for text in blocks("py") + blocks("python"):
        compile(text, "README.md", "exec")
    assert [sorted(yaml.safe_load(text)) for text in blocks("yaml")] == [
        ["steps"], ["levels", "source"],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_commands_and_programs_work_as_written(tmp_path):
    """Write the files of the pages into an empty folder, then run everything in the order of the pages.

    A block of output lists lines, or their beginnings, that the commands before it print.
    """
    for text in blocks("yaml") + blocks("python"):
        if named := NAMED.match(text):
            (tmp_path / named[1]).write_text(text)
    for name, text in LOGS.items():
        (tmp_path / name).write_text(text)
    programs = [text for text in blocks("python") if not NAMED.match(text)]
    bin_ = Path(sys.executable).parent
    activated = {"PATH": f"{bin_}:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(tmp_path)}
    printed = ""
    for kind, text in BLOCKS:
        if kind == "text":
            for line in text.splitlines():
                assert " ".join(line.split()) in printed
        if kind != "sh":
            continue
        printed = ""
        for command in text.splitlines():
            if command == "make setup" or command.startswith(". .venv"):
                continue  # this environment is the one that they make
            ran = subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=activated, capture_output=True, text=True)
            assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
            printed += " ".join(ran.stdout.split())
    assert programs
    for program in programs:
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=activated, capture_output=True, text=True
        )
        assert ran.returncode == 0, f"{program}\n{ran.stderr}"
    made = {path.name for path in tmp_path.iterdir()}
    assert {"trace.json.gz", "mine.json.gz", "fabric.json", "gpu.json.gz", "bert.json.gz"} <= made
    assert {"timeline.json", "timeline.png"} <= made
