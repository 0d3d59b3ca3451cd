"""Tutorial 9: a profile of this machine, answers to a buyer's questions, and pictures of predicted efficiencies."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # errors only; the profiler reads it when torch is imported

import torch
from torch import nn
from torch.profiler import profile, schedule

import ddplab
from ddplab import Prediction, Trace
from ddplab.simulator import plot_colours
from ddplab.simulator.inputs_with_default_costs import Assumed, assume_gpu

from . import own_code
from .plots import mark_guess, new_axes

SHARE = 0.9
"""Of an adapter's rate by its data sheet, as a large message reaches it."""

Scaled = Mapping[tuple[str, int], Prediction]
"""Predictions by network and number of GPUs."""


@dataclass(frozen=True)
class Offer:
    """A network, with the assumed costs and spread of the profiled GPU."""

    trace: Trace
    assumed: Assumed

    def predict(self, gpus: int, **settings: Any) -> Prediction:
        """The iteration on this many GPUs; settings as of `ddplab.predict`."""
        settings = {"variation": self.assumed.variation} | settings
        return ddplab.predict(self.trace, self.assumed.fabric, world_size=gpus, **settings)


def offer(trace: Trace, pod: str, gbit_per_s: float) -> Offer:
    """Fill the rate of a node's adapters by their data sheet, in Gbit/s, into a description with `RATE`."""
    path = own_code.folder() / "pod.yaml"
    path.write_text(pod.replace("RATE", str(SHARE * gbit_per_s / 8)))
    return Offer(trace, assume_gpu(trace, ddplab.Fabric.load(path), ddplab.Variation()))


def profile_here() -> Path:
    """Profile three steps of a small network on this machine's processor; return the path of the file."""
    path = own_code.folder() / "rank0.json.gz"
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(convolution, nn.Linear(32 * 30 * 30, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    with profile(schedule=schedule(wait=0, warmup=2, active=3, repeat=1), record_shapes=True) as profiler:
        for _ in range(5):
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


def imported(path: Path) -> Trace:
    """Import a profile, and print what is in it."""
    found = ddplab.import_profile([path])
    sizes = found.trace.sizes_bytes
    steps_ms = ", ".join(f"{(step.end_ns - step.start_ns) / 1e6:.1f}" for step in found.steps)
    print(f"{path.name}: {found.gpu or 'no GPU'}, {len(sizes)} gradients, {sum(sizes) / 1e6:.1f} MB,", end=" ")
    print(f"{len(found.steps)} steps of {steps_ms} ms")
    for note in found.notes:
        print("  -", note)
    return found.trace


def efficiencies(prediction: Prediction) -> tuple[float, float, float]:
    """The efficiency in percent, and both ends of its interval."""
    low_ns, high_ns = prediction.interval_ns
    middle, low, high = (100 * prediction.compute_ns / ns for ns in (prediction.iteration_ns, high_ns, low_ns))
    return middle, low, high


def draw_scaling(scaled: Scaled, identical: Scaled, guesses: Mapping[str, float | None]) -> Axes:
    """Draw the efficiency of each network over the number of GPUs, with intervals; dotted for identical GPUs.

    Args:
        scaled: Predictions for GPUs that differ.
        identical: The same for GPUs that do not.
        guesses: The learner's percent at the largest number, by network; None: no guess.
    """
    ax = new_axes(8, 3.6)
    names = list(dict.fromkeys(name for name, _ in scaled))
    sizes = list(dict.fromkeys(gpus for _, gpus in scaled))
    for name, colour in zip(names, plot_colours.LINES, strict=False):
        middle, low, high = zip(*(efficiencies(scaled[name, gpus]) for gpus in sizes), strict=True)
        ax.fill_between(sizes, low, np.minimum(high, 100), color=colour, alpha=0.2, linewidth=0)
        ax.plot(sizes, middle, "o-", color=colour, label=name)
        ax.plot(sizes, [efficiencies(identical[name, gpus])[0] for gpus in sizes], ":", color=colour)
    ax.plot([], [], ":", color=plot_colours.INK, label="identical GPUs")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(gpus) for gpus in sizes])
    ax.set_ylim(0, 102)
    ax.set_xlabel("GPUs")
    ax.set_ylabel("efficiency, %")
    ax.legend(frameon=False, loc="lower left")
    for name, guess in guesses.items():
        mark_guess(ax, guess, "%", x=sizes[-1], colour=plot_colours.LINES[names.index(name)])
    return ax


def print_scaling(scaled: Scaled) -> None:
    """Print the iteration and the efficiency of each network and number of GPUs."""
    print(f"{'':22}{'GPUs':>5}{'iteration':>13}{'90 % within':>20}{'efficiency':>12}")
    for (name, gpus), prediction in scaled.items():
        low, high = (ns / 1e6 for ns in prediction.interval_ns)
        print(
            f"{name:22}{gpus:5}{prediction.iteration_ns / 1e6:10.1f} ms{low:10.1f} to {high:.1f} ms"
            f"{efficiencies(prediction)[0]:10.0f} %"
        )


def hours(prediction: Prediction, iterations: float) -> tuple[float, float, float]:
    """Hours of this many iterations: the median, and both ends of the interval."""
    middle, low, high = (iterations * ns / 3600e9 for ns in (prediction.iteration_ns, *prediction.interval_ns))
    return middle, low, high


def print_epochs(epochs: Mapping[tuple[str, int], Sequence[float]], sizes: Sequence[int]) -> None:
    """Print minutes and GPU hours of an epoch, from its hours by network and number of GPUs."""
    for (name, gpus), ends in epochs.items():
        if gpus in sizes:
            cost = interval([gpus * one for one in ends], "GPU hours")
            print(f"{name:22}{gpus:4} GPUs: {interval([60 * one for one in ends], 'minutes')}, {cost}")


def suffices(prediction: Prediction, target: float) -> str:
    """Whether a network reaches an efficiency in percent, with the efficiency and its interval."""
    middle, low, high = efficiencies(prediction)
    verdict = "yes" if low >= target else "no" if high < target else "perhaps: measure before you sign"
    return f"{verdict} ({middle:.0f} %; {low:.0f} to {min(high, 100):.0f} %)"


def parts_ms(prediction: Prediction, of_identical: Prediction) -> str:
    """What takes the time of an iteration, in words; the second prediction is that of identical GPUs."""
    parts = {
        "computation": prediction.compute_ns,
        "communication": of_identical.iteration_ns - prediction.compute_ns,
        "the slowest GPU": prediction.iteration_ns - of_identical.iteration_ns,
    }
    return ", ".join(f"{part} {ns / 1e6:.1f} ms" for part, ns in parts.items())


def show_iteration(prediction: Prediction, title: str) -> None:
    """Draw and show the iteration of rank 0 with its efficiency behind the title, as a slider requires."""
    _, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
    prediction.plot(ax, ranks=[0])
    middle, low, high = efficiencies(prediction)
    ax.set_title(f"{title}: efficiency {middle:.0f} % ({low:.0f} to {min(high, 100):.0f} %)", loc="left")
    plt.show()


def interval(values: Sequence[float], unit: str, digits: int = 2) -> str:
    """A median and both ends of its interval in words, with this number of significant digits.

    More digits are printed if the three values would otherwise look equal.
    """
    while digits < 6 and len({f"{value:.{digits}g}" for value in values}) < len(set(values)):
        digits += 1
    middle, low, high = (f"{value:#.{digits}g}".rstrip(".") for value in values)
    return f"{middle} {unit} ({low} to {high})"
