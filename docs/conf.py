"""Sphinx configuration; `python -m docs` runs Sphinx on a copy of the tree in which the tutorials were executed."""

import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

LINKED = "reference", "simulator"
"""Folders whose modules are imported from `ddplab`."""
PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = "ddplab"
author = "the ddplab authors"
extensions = [
    "myst_nb",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "README.md",
    "DESIGN.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "figures/README.md",
    "tests/foreign/README.md",
    "validation/*.md",
    "validation/data/board/*.md",
    "validation/runs/*.md",
    "tutorials/*.ipynb",
]

html_theme = "furo"
html_title = "ddplab"
myst_html_meta = {"description": PROJECT["description"]}
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["print.css"]
html_search_scorer = str(Path(__file__).parent / "static" / "search_order.js")
html_extra_path = ["../figures/annotated_ddp.html"]  # a page of its own, which needs nothing from the site

myst_heading_anchors = 4
nb_execution_mode = "off"  # `python -m docs` has executed them already
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]  # no kernel
nb_render_markdown_format = "myst"  # has tables

apidoc_modules = [
    {
        "path": "../ddplab",
        "destination": "docs/api",
        "follow_links": True,
        "separate_modules": True,
        "module_first": True,
        "max_depth": 1,
    }
]
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "show-inheritance": True,
    "ignore-module-all": True,
}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
default_role = "code"  # docstrings quote code in single backticks
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # describe each attribute once, in its class
suppress_warnings = [
    "ref.python",
    "autodoc.mocked_object",
    "toc.not_included",  # the list of all modules: in the sidebar it would take half the time of the build
]


def link_to_shown_code(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Let links to modules lead to their highlighted source, and links to other pages to these pages."""
    builder: Any = app.builder
    for node in list(tree.findall(addnodes.download_reference)):
        path = PurePosixPath(page).parent / node["reftarget"]
        parts = [part for part in path.with_suffix("").parts if part != "."]
        while ".." in parts[1:]:
            place = parts.index("..", 1)
            del parts[place - 1 : place + 1]
        if f"../{'/'.join(parts)}{path.suffix}" in html_extra_path:
            target = builder.get_relative_uri(page, path.stem)
            node.replace_self(nodes.reference("", "", *node.children, refuri=target, internal=True))
        elif path.suffix == ".py" and parts[0] in ("ddplab", *LINKED) and parts[-1] != "__init__":
            parts = parts if parts[0] == "ddplab" else ["ddplab", *parts]
            target = builder.get_relative_uri(page, "_modules/" + "/".join(parts))
            node.replace_self(nodes.reference("", "", *node.children, refuri=target, internal=True))


def link_to_the_page_itself(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Let README's links to what GitHub has published, which is this site, lead to the page on the site."""
    source[0] = source[0].replace("../../deployments/github-pages", "figures/annotated_ddp.html")


def setup(app: Sphinx) -> None:
    """Entry point of Sphinx."""
    app.connect("source-read", link_to_the_page_itself)
    app.connect("doctree-resolved", link_to_shown_code)
