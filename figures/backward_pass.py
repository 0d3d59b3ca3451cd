"""Animated backward pass: gradients fill buckets, buckets cross the network, and some communication is exposed.

An SVG with SMIL animation, which browsers play inside a page. Without animation it shows the end of the iteration.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ddplab import Fabric, predict
from ddplab.reference.files.writing import write_atomically
from ddplab.simulator.plot_colours import COMPUTATION, EXPOSED, FORWARD, HIDDEN, INK, QUIET

from .drawing import FOLDER
from .traces_and_fabrics import resnet50

PATH = FOLDER / "backward_pass.svg"
GPUS, GBIT_PER_S, LATENCY_NS, CAP_MB = 16, 20, 20_000, 10
WIDTH, HEIGHT, LEFT, RIGHT = 900, 300, 96, 16
GPU_Y, BUCKET_Y, NETWORK_Y, LANE, BUCKET_HEIGHT = 52, 112, 226, 34, 78
PLAY_S, HOLD_S = 8.0, 2.5
"""Duration of the iteration in the animation, and of the still picture after it."""
HEAD_START_S = 5.0
"""A page that opens shows this moment of the animation, when some buckets are full and some are on the network."""


class Bucket(NamedTuple):
    """A bucket of the iteration; times in milliseconds.

    Attributes:
        filled: Moments at which a gradient arrives, each with the bytes in the bucket then, as a fraction.
        sent_ms: Start and end of its all-reduce.
        megabytes: Bytes of all of its gradients, in 10**6.
    """

    filled: tuple[tuple[float, float], ...]
    sent_ms: tuple[float, float]
    megabytes: float


class Iteration(NamedTuple):
    """One iteration in milliseconds: ends of forward pass, backward pass and iteration, and the buckets."""

    forward_ms: float
    backward_ms: float
    end_ms: float
    buckets: tuple[Bucket, ...]

    @property
    def exposed_ms(self) -> float:
        """Time from the end of the backward pass to the end of the last all-reduce."""
        return max(bucket.sent_ms[1] for bucket in self.buckets) - self.backward_ms


def iteration() -> Iteration:
    """Simulate ResNet-50 on V100s over a ring of 20 Gbit/s; nothing slows computation."""
    trace = resnet50()
    (rank, *_), recorded = trace.ranks, trace.ranks[0].iterations[0]
    trace = trace.model_copy(update={"ranks": (rank.model_copy(update={"iterations": (recorded,)}),)})
    fabric = Fabric.from_alpha_beta(alpha_ns=LATENCY_NS, bytes_per_s=GBIT_PER_S * 1e9 / 8)
    prediction = predict(trace, fabric, world_size=GPUS, bucket_cap_mb=CAP_MB, assume=False)
    sizes = trace.sizes_bytes
    start = recorded.forward_start_ns
    sent = {
        span.bucket: (span.start_ns / 1e6, span.end_ns / 1e6)
        for span in prediction.spans
        if span.kind == "all_reduce" and span.rank == 0
    }
    ends = {span.kind: span.end_ns / 1e6 for span in prediction.spans if span.rank == 0 and span.stream == "compute"}
    buckets = []
    for number, indices in enumerate(prediction.buckets):
        arrivals = sorted((((recorded.ready_ns[index] or 0) - start) / 1e6, sizes[index]) for index in indices)
        held, whole, filled = 0, sum(size for _, size in arrivals), []
        for moment, size in arrivals:
            held += size
            filled.append((moment, held / whole))
        buckets.append(Bucket(tuple(filled), sent[number], whole / 1e6))
    return Iteration(ends["forward"], ends["backward"], prediction.iteration_ns / 1e6, tuple(buckets))


def svg(shown: Iteration) -> str:
    """Return the animation as SVG."""
    scale = (WIDTH - LEFT - RIGHT) / shown.end_ms

    def x(ms: float) -> float:
        return round(LEFT + scale * ms, 2)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f"<title>Backward pass of ResNet-50 on {GPUS} V100s over {GBIT_PER_S} Gbit/s</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, f"ResNet-50 on {GPUS} V100s, {GBIT_PER_S} Gbit/s: one iteration, {shown.end_ms:.0f} ms", 16),
        _text(8, GPU_Y + 22, "GPU"),
        _text(8, BUCKET_Y + 44, "buckets"),
        _text(8, NETWORK_Y + 22, "network"),
        f'<clipPath id="past"><rect x="0" y="0" height="{HEIGHT}" width="{WIDTH}">'
        + _animate("width", shown, [(0, LEFT), (shown.end_ms, WIDTH - RIGHT)], smooth=True, last=WIDTH)
        + "</rect></clipPath>",
        '<g clip-path="url(#past)">',
        _rect(x(0), GPU_Y, x(shown.forward_ms) - x(0), LANE, FORWARD),
        _rect(x(shown.forward_ms), GPU_Y, x(shown.backward_ms) - x(shown.forward_ms), LANE, COMPUTATION),
        _text(x(0) + 6, GPU_Y + 22, "forward"),
        _text(x(shown.forward_ms) + 6, GPU_Y + 22, "backward", colour="white"),
    ]
    for number, bucket in enumerate(shown.buckets):
        start, end = bucket.sent_ms
        hidden = min(end, max(start, shown.backward_ms))
        parts.append(_rect(x(start), NETWORK_Y, x(hidden) - x(start), LANE, HIDDEN))
        parts.append(_rect(x(hidden), NETWORK_Y, x(end) - x(hidden), LANE, EXPOSED))
        parts.append(f'<path d="M{x(start)} {NETWORK_Y}v{LANE}" stroke="white" stroke-width="2"/>')
        parts.append(_text((x(start) + x(end)) / 2 - 4, NETWORK_Y + 22, str(number)))
    words = f"exposed communication {shown.exposed_ms:.0f} ms"
    parts.append(_text(x(shown.end_ms), NETWORK_Y + LANE + 22, words, colour=EXPOSED, anchor="end"))
    parts.append("</g>")
    width = (WIDTH - LEFT - RIGHT) / len(shown.buckets)
    for number, bucket in enumerate(shown.buckets):
        parts += _bucket(shown, bucket, number, LEFT + number * width + 6, width - 12)
    moves = _animate("transform", shown, [(0, LEFT), (shown.end_ms, WIDTH - RIGHT)], smooth=True, last=WIDTH - RIGHT)
    parts.append(
        f'<path d="M0 {GPU_Y - 6}v{LANE + 12}m0 {NETWORK_Y - GPU_Y - LANE - 12}v{LANE + 12}" '
        f'stroke="{INK}" stroke-width="1.5" transform="translate({WIDTH - RIGHT} 0)">{moves}</path>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _bucket(shown: Iteration, bucket: Bucket, number: int, left: float, width: float) -> list[str]:
    """A box that fills while gradients arrive, and is empty when its all-reduce is over."""
    bottom = BUCKET_Y + BUCKET_HEIGHT
    levels = [(0.0, 0.0), *bucket.filled]
    steps = [(moment, BUCKET_HEIGHT * level) for moment, level in levels]
    tops = [(moment, bottom - height) for moment, height in steps]
    start, end = bucket.sent_ms
    heights = _animate("height", shown, [*steps, (end, 0.0)], smooth=False, last=0.0)
    moves = _animate("y", shown, [*tops, (end, bottom)], smooth=False, last=bottom)
    colours = _animate(
        "fill",
        shown,
        [(0, QUIET), (start, HIDDEN), (max(start, shown.backward_ms), EXPOSED)],
        smooth=False,
        last=QUIET,
    )
    return [
        f'<rect x="{left:.2f}" y="{bottom}" width="{width:.2f}" height="0" fill="{QUIET}">',
        f"{heights}{moves}{colours}</rect>",
        f'<rect x="{left:.2f}" y="{BUCKET_Y}" width="{width:.2f}" height="{BUCKET_HEIGHT}" fill="none" '
        f'stroke="{INK}" stroke-width="1.2"/>',
        _text(left + width / 2, BUCKET_Y + 18, f"{number}: {bucket.megabytes:.0f} MB", anchor="middle"),
    ]


def _animate(
    attribute: str,
    shown: Iteration,
    values: Sequence[tuple[float, float | str]],
    *,
    smooth: bool,
    last: object,
) -> str:
    """Animate an attribute through values at moments in milliseconds; then `last` stays for the still picture."""
    whole = PLAY_S + HOLD_S
    moments = [min(1.0, moment / shown.end_ms * PLAY_S / whole) for moment, _ in values]
    assert all(a <= b for a, b in pairwise(moments))
    shift = attribute == "transform"
    texts = [_number(value) + (" 0" if shift else "") for _, value in values] + [
        _number(last) + (" 0" if shift else "")
    ]
    times = [f"{moment:.4f}" for moment in moments] + ["1"]
    times[0] = "0"
    mode = "linear" if smooth else "discrete"
    tag, kind = ("animateTransform", ' type="translate"') if shift else ("animate", "")
    return (
        f'<{tag} attributeName="{attribute}"{kind} begin="-{HEAD_START_S:g}s" dur="{whole:g}s" '
        f'repeatCount="indefinite" calcMode="{mode}" '
        f'keyTimes="{";".join(times)}" values="{";".join(texts)}"/>'
    )


def _number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else str(value)


def _rect(left: float, top: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}"/>'


def _text(left: float, top: float, words: str, size: int = 13, *, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{left:.2f}" y="{top}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def main() -> None:
    """Write the animation."""
    write_atomically(PATH, svg(iteration()).encode())


if __name__ == "__main__":
    main()
