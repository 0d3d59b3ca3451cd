"""Tutorial 2: an emulated iteration of our class on some rungs, of the learner's and of torch's, and a picture."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes

from ddplab import Fabric
from ddplab.conformance.class_under_test import Subject
from ddplab.learn import gains, notebook
from ddplab.learn.rungs import RUNGS, load_progress
from ddplab.learn.solutions import SOLUTIONS
from ddplab.simulator import plot_colours

from .plots import mark_guess, new_axes

SHOWN = (1, 2, 6, 8)
"""Rungs of the picture: 3 to 5 take as long as 2, and 7 as long as 8."""
TORCHS = "torch.nn.parallel:DistributedDataParallel"


def computation_ms() -> float:
    """Milliseconds of an iteration without communication."""
    one = gains.model().ranks[0].iterations[0]
    return (one.end_ns - one.forward_start_ns) / 1e6


def all_reduces_ms(*sizes_bytes: int) -> float:
    """Milliseconds of all-reduces of these sizes, one after the other."""
    network = Fabric.from_alpha_beta(gains.NETWORK.latency_ns, gains.NETWORK.bytes_per_s)
    return sum(network.all_reduce_ns(size, gains.NETWORK.world_size) for size in sizes_bytes) / 1e6


def iteration_ms(name: str) -> float:
    """Milliseconds of an emulated iteration under the class `module:class`, with its own cap if it has buckets."""
    emulated = gains.iteration(Subject(name))
    assert emulated is not None
    return emulated.iteration_ns / 1e6


def ours_ms() -> dict[str, float]:
    """Milliseconds of an iteration under our class, by rung of `SHOWN`, and under torch's."""
    rungs = {f"{number}. {RUNGS[number - 1].title}": SOLUTIONS[number - 1].__name__ for number in SHOWN}
    classes = {title: f"ddplab.learn.solutions:{name}" for title, name in rungs.items()}
    return {title: iteration_ms(name) for title, name in {**classes, "torch's": TORCHS}.items()}


def yours_ms() -> dict[int, float]:
    """Milliseconds of an iteration under the learner's class, by the number of the rung that it passed."""
    return load_progress(Path(f"{notebook.NAME}.py")).iteration_ms


def draw_rungs(
    times_ms: Mapping[str, float], learners_ms: Mapping[int, float], guesses_ms: Mapping[int, float | None]
) -> Axes:
    """Draw one bar for each class: computation, then exposed communication.

    Args:
        times_ms: Milliseconds of an iteration, by name; those of `SHOWN` come first.
        learners_ms: The learner's class, by number of the rung; a line across the bar.
        guesses_ms: The learner's guesses, by number of the rung; None: no guess.
    """
    ax = new_axes(7, 3.4)
    computed, names = computation_ms(), list(times_ms)
    ax.barh(names, [computed] * len(names), 0.6, color=plot_colours.COMPUTATION, label="computation")
    exposed = [ms - computed for ms in times_ms.values()]
    ax.barh(names, exposed, 0.6, left=computed, color=plot_colours.EXPOSED, label="exposed communication")
    for place, ms in enumerate(times_ms.values()):
        ax.text(ms - 5, place, f"{ms:.0f} ms", va="center", ha="right", color="white")
    for number in set(SHOWN) & set(learners_ms):
        place = SHOWN.index(number)
        ax.plot([learners_ms[number]] * 2, [place - 0.4, place + 0.4], color=plot_colours.INK, linewidth=2)
    if learners_ms:
        ax.plot([], [], color=plot_colours.INK, linewidth=2, label="your class")
    ax.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    ax.set_xlim(0, 1.15 * max(times_ms.values()))
    ax.set_ylim(len(names) - 0.4, -0.8)
    ax.set_xlabel("iteration, ms")
    for number, guess_ms in guesses_ms.items():
        mark_guess(ax, guess_ms, "ms", y=SHOWN.index(number) - 0.45)
    return ax
