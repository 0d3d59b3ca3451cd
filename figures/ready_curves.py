"""Figure 2 (c) and (d) of the paper: when gradients are ready, on a GPU and on a processor."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from reference.trace import Trace

from .drawing import COMPUTATION, EXPOSED, FOLDER, SECOND, plain, render, save
from .setting import resnet50

TITLE = "When gradients are ready"
SIZE = (5.0, 3.4)
RUNS = FOLDER.parent / "validation" / "runs"
RECORDED = {
    "ResNet-18": RUNS / "resnet18-loopback-2ranks" / "resnet18" / "trace.json.gz",
    "transformer": RUNS / "transformer-loopback-2ranks" / "transformer" / "trace.json.gz",
    "MLP": RUNS / "mlp-loopback-2ranks" / "mlp" / "trace.json.gz",
}


class Curve(NamedTuple):
    """Milliseconds from the start of the backward pass, and bytes that are ready by then, both rising."""

    ms: NDArray[np.float64]
    bytes_ready: NDArray[np.float64]


class Curves(NamedTuple):
    """By model."""

    title: str
    by_model: dict[str, Curve]


@cache
def panels() -> list[Curves]:
    """One GPU, from a public trace; a processor, from committed runs."""
    recorded = {name: _curve(Trace.load(Path(path))) for name, path in RECORDED.items()}
    return [
        Curves("on a V100, published", {"ResNet-50": _curve(resnet50())}),
        Curves("on a processor, recorded here", recorded),
    ]


def _curve(trace: Trace) -> Curve:
    iteration = trace.ranks[0].iterations[-1]
    ready = np.array(iteration.ready_ns, dtype=np.float64) - iteration.backward_start_ns
    order = np.argsort(ready, kind="stable")
    return Curve(ready[order] / 1e6, np.cumsum(np.array(trace.sizes_bytes)[order]).astype(np.float64))


def draw(data: Curves, ax: Axes) -> Axes:
    """Part of the bytes over part of the backward pass."""
    for (name, curve), colour in zip(data.by_model.items(), (COMPUTATION, EXPOSED, SECOND), strict=False):
        label = f"{name}: {curve.ms[-1]:.0f} ms"
        part = np.concatenate([[0], curve.bytes_ready / curve.bytes_ready[-1]])
        ax.step(np.concatenate([[0], curve.ms / curve.ms[-1]]), part, where="post", color=colour, label=label)
    ax.set_xlabel("part of the backward pass")
    ax.set_ylabel("part of the bytes that is ready")
    ax.set_title(data.title, loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def caption() -> str:
    """In numbers."""
    models = {name: curve for panel in panels() for name, curve in panel.by_model.items()}
    half = {
        name: curve.bytes_ready[curve.ms <= curve.ms[-1] / 2].max(initial=0) / curve.bytes_ready[-1]
        for name, curve in models.items()
    }
    said = ", ".join(f"{name} {part:.0%}" for name, part in half.items())
    return (
        "Part of the gradients' bytes that is ready over part of the backward pass. Left: ResNet-50 on a V100, "
        "from a public profiler trace; right: recorded by our recorder on one of two processes that share two "
        f"cores. Ready by half-time: {said}. A ResNet's last layers hold most of its bytes, so most can travel "
        "behind the rest; the transformer's shared embedding is its largest parameter and ready last. The paper's "
        "figures 2 (c) and (d) show the same for a ResNet-152, counted in gradients and not in bytes."
    )


def main() -> None:
    """Draw it again."""
    save("ready_curves", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
