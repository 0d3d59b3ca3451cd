"""Bytes of gradients ready during the backward pass, on a GPU and on a CPU (figure 2 (c), (d) of the paper)."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from ddplab import Trace
from ddplab.simulator.plot_colours import COMPUTATION, COPIES, EXPOSED

from .drawing import FOLDER, plain, render, save
from .traces_and_fabrics import resnet50

TITLE = "When gradients are ready"
SIZE = (5.0, 3.4)
RUNS = FOLDER.parent / "validation" / "runs"
RECORDED = {
    "ResNet-18": RUNS / "resnet18-loopback-2ranks" / "trace.json.gz",
    "transformer": RUNS / "transformer-loopback-2ranks" / "trace.json.gz",
    "MLP": RUNS / "mlp-loopback-2ranks" / "trace.json.gz",
}


class Curve(NamedTuple):
    """Increasing milliseconds from the start of the backward pass, and the bytes ready by then."""

    ms: NDArray[np.float64]
    bytes_ready: NDArray[np.float64]


class Curves(NamedTuple):
    """The curves of one panel, by model."""

    title: str
    by_model: dict[str, Curve]


@cache
def panels() -> list[Curves]:
    """One GPU, from a public trace, and a CPU, from committed runs."""
    recorded = {name: _curve(Trace.load(Path(path))) for name, path in RECORDED.items()}
    return [
        Curves("on a V100, published", {"ResNet-50": _curve(resnet50())}),
        Curves("on a CPU, recorded here", recorded),
    ]


def _curve(trace: Trace) -> Curve:
    iteration = trace.ranks[0].iterations[-1]
    ready = np.array(iteration.ready_ns, dtype=np.float64) - iteration.backward_start_ns
    order = np.argsort(ready, kind="stable")
    return Curve(ready[order] / 1e6, np.cumsum(np.array(trace.sizes_bytes)[order]).astype(np.float64))


def draw(data: Curves, ax: Axes) -> Axes:
    """Plot the fraction of the bytes that is ready over the fraction of the backward pass."""
    ax.set_xlim(0, 1.02)
    ax.set_ylim(0, 1.04)
    for (name, curve), colour in zip(data.by_model.items(), (COMPUTATION, EXPOSED, COPIES), strict=False):
        ready = np.concatenate([[0], curve.bytes_ready / curve.bytes_ready[-1]])
        ax.step(np.concatenate([[0], curve.ms / curve.ms[-1]]), ready, where="post", color=colour)
        height = 0.06 + 0.08 * (len(data.by_model) - 1 - list(data.by_model).index(name))
        text = f"{name}: backward pass of {curve.ms[-1]:.0f} ms"
        ax.text(0.98, height, text, fontsize=9, color=colour, ha="right")
    ax.set_xlabel("fraction of the backward pass")
    ax.set_ylabel("fraction of the bytes that is ready")
    ax.set_title(data.title, loc="left", fontsize=10)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    models = {name: curve for panel in panels() for name, curve in panel.by_model.items()}
    half = {
        name: curve.bytes_ready[curve.ms <= curve.ms[-1] / 2].max(initial=0) / curve.bytes_ready[-1]
        for name, curve in models.items()
    }
    ready = ", ".join(f"{name} {fraction:.0%}" for name, fraction in half.items())
    return (
        f"After half of the backward pass {half['ResNet-50']:.0%} of ResNet-50's bytes are ready, but only "
        f"{half['transformer']:.0%} of a transformer's. Fraction of the gradients' bytes that is ready over the "
        "fraction of the backward pass. Left: ResNet-50 on a V100, from a public profiler trace; right: recorded by "
        f"our recorder on one of two processes that share two cores. Ready after half: {ready}. The last layers of a "
        "ResNet hold most of its bytes, so most bytes can be sent during the rest of the backward pass; the "
        "transformer's shared embedding is its largest parameter and becomes ready last. Figures 2 (c) and (d) of "
        "the paper show the same for ResNet-152, counted in gradients instead of bytes."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE, shared="y")


if __name__ == "__main__":
    save("ready_curves", files())
