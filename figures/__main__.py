"""Draw all figures from committed data, and write them with their captions into `figures/README.md`."""

import re
from types import ModuleType

from ddplab.reference.files.writing import write_atomically

from . import (
    all_methods,
    all_reduce_sizes,
    anatomy,
    backward_pass,
    bucket_caps,
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
    bucket_caps,
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
PAPER = """\
## What of the paper is reproduced

| the paper | here | on | why not more |
| --- | --- | --- | --- |
| figures 2 (a, b): small messages are slow | yes: 426 and 175 times as long | published times of 16 A100s; \
Gloo on two processes; 16 MiB | the paper's 60 million parameters take long on two cores |
| figures 2 (c, d): gradients are ready step by step | yes: 95% of ResNet-50's bytes after half of the \
backward pass | a trace of a V100; CPUs | no public trace of ResNet-152 |
| figure 6: overlap saves 22% to 38% | in part: 28% by the clock; 2% to 24% in virtual time | emulated V100s | \
the paper's batch sizes are not known, and its Gloo had 100 Gbit/s |
| figures 7, 8: the bucket size changes the latency by more than 2 times | NCCL no: 1.05 and 1.13 times; Gloo \
yes: 4.83 and 19.48 times; by the clock 1.17 to 1.40 | emulated V100s | NCCL is modelled; why the paper's \
varies more is not known |
| figure 9: near-linear scaling to 256 GPUs | ResNet-50 yes: 1.07; BERT no: 2.27 | emulated V100s, virtual \
time | no 256 GPUs; BERT computes at peak rates here, which is too fast |
| figure 10: skipping saves much time | on a slow network 83%, on a fast one 6% | emulated V100s, virtual time \
| on the fast network most communication is hidden |
| figure 11: skipping hardly slows convergence | no: a loss of 1.6 instead of 0.3 with 8 | a small classifier, \
measured | equally many batches are an eighth of the steps, at an unchanged learning rate |
| figure 12: several process groups in turn | no | | needs several queues of a real network |
"""


def name_of(figure: ModuleType) -> str:
    """Name of the figure's files, without ending."""
    return figure.__name__.rpartition(".")[2]


def page() -> str:
    """The page of all figures and captions, as Markdown."""
    return "\n".join([INTRO, PAPER, *map(_section, FIGURES)])


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
