"""Draw all figures from committed data, and write them with their captions into `figures/README.md`."""

import re
from types import ModuleType

from ddplab.reference.files.writing import write_atomically

from . import (
    all_methods,
    all_reduce_sizes,
    anatomy,
    backward_pass,
    bucket_sizes,
    five_ways,
    overlap,
    predicted_against_measured,
    ready_curves,
    scaling,
    simulator_speed,
    skipped_synchronization,
)
from .annotated_ddp import page as annotated_ddp
from .drawing import FOLDER, save

FIGURES: tuple[ModuleType, ...] = (
    five_ways,
    anatomy,
    all_reduce_sizes,
    ready_curves,
    overlap,
    bucket_sizes,
    scaling,
    skipped_synchronization,
    predicted_against_measured,
    all_methods,
    simulator_speed,
)
INTRO = """\
# Figures

`make figures` draws these figures from committed data, byte for byte the same each time. The sentence below a figure
is its point; unfold what was measured or emulated, from which data, and what the paper reports: Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
[arXiv 2006.15704](https://arxiv.org/abs/2006.15704). *By the clock* means real processes whose devices sleep for
recorded times of a GPU; *in virtual time* means the real reducer under a clock that jumps, over a modelled network.
`python -m figures.measure` repeats the measurements.

[The Annotated DDP](annotated_ddp.html): open `figures/annotated_ddp.html` in a browser. Five ways to average
gradients, each with its code beside a timeline that the page simulates; it needs no network.
"""


def name_of(figure: ModuleType) -> str:
    """Name of the figure's files, without ending."""
    return figure.__name__.rpartition(".")[2]


def page() -> str:
    """The page of all figures and captions, as Markdown."""
    return "\n".join([INTRO, *map(_section, FIGURES)])


def _section(figure: ModuleType) -> str:
    """A figure with its caption, of which all but the first sentence is folded."""
    point, rest = re.split(r"(?<=\.) (?=[A-Z])", figure.caption(), maxsplit=1)
    folded = f"<details><summary>Measured and emulated how</summary>\n\n{rest}\n\n</details>"
    return f"## {figure.TITLE}\n\n![{figure.TITLE}]({name_of(figure)}.png)\n\n{point}\n\n{folded}\n"


def main() -> None:
    """Draw all figures and write the page."""
    for figure in FIGURES:
        save(name_of(figure), figure.files())
    backward_pass.main()
    annotated_ddp.main()
    write_atomically(FOLDER / "README.md", page().encode())


if __name__ == "__main__":
    main()
