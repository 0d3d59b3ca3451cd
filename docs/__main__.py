"""Build the site in `out/site`: run the tutorials in a copy of the tree, render pages, check all links.

The tutorials in the tree itself stay without outputs. The build stops with an error if a cell raises, Sphinx warns
about a page, or a link is broken (links to other sites are not followed).
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import map as code_map
from .executed_tutorials import EXECUTED, publish

ROOT = Path(__file__).parent.parent
COPIED = (
    "README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "Makefile", "action.yml",
    "pyproject.toml",
    "constraints.txt", "docs", "ddplab", "reference", "simulator", "tests", "tutorials", "figures", "validation",
    "benchmarks",
)  # fmt: skip
IGNORED = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "api", "executed")
ENTRANCE = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>ddplab</title>\n'
"""The page at the root of the site."""
CELL_TIMEOUT_S = 120
"""Longer than the time-outs in the tutorials, so that an error for a hung rank, with its stack, comes first."""
MEASURES = "tutorials.repeats"
"""Imported by the tutorials that measure times, beside which no other one runs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the site; exit with the status of the first step that fails."""
    options = argparse.ArgumentParser(prog="python -m docs", description=__doc__)
    options.add_argument("--out", type=Path, default=ROOT / "out" / "site")
    options.add_argument(
        "--without-running", action="store_true", help="faster: do not run the tutorials; their pages have no outputs"
    )
    options.add_argument(
        "--publish", action="store_true", help=f"also write the executed tutorials to {EXECUTED}, to be committed"
    )
    chosen = options.parse_args(arguments)
    if chosen.publish and chosen.without_running:
        options.error("--publish: expected without --without-running, because only executed tutorials are published")
    out = chosen.out.resolve()
    tree, pages = out / "tree", out / "html"
    copy(tree)
    if not chosen.without_running:
        tutorials = sorted((tree / "tutorials").glob("*.ipynb"))
        alone = [path for path in tutorials if MEASURES in path.read_text()]
        for path in alone:
            execute(path)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(execute, (path for path in tutorials if path not in alone)))
    if chosen.publish:
        publish(tree / "tutorials", ROOT / EXECUTED)
    (tree / "docs" / "code_map.md").write_text(code_map.site_page())
    _run("sphinx", "--fail-on-warning", "--keep-going", "-c", "docs", "-b", "html", ".", pages, folder=tree)
    (pages / "index.html").write_text(ENTRANCE)
    _run("docs.links", "--no-status", pages / "docs" / "index.html", folder=tree)
    print(f"\nopen {pages / 'index.html'}")


def execute(notebook: Path) -> None:
    """Run a notebook from its first cell to its last, and keep the outputs in it."""
    _run("jupyter", "execute", "--inplace", f"--timeout={CELL_TIMEOUT_S}", notebook, folder=notebook.parent)


def copy(tree: Path) -> None:
    """Copy all files that pages show or link to into an empty folder."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=IGNORED, symlinks=True)
        else:
            (tree / name).write_text(source.read_text().replace(f"{EXECUTED}/", "tutorials/"))


def _run(module: str, *arguments: object, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=folder, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
