"""The Annotated DDP as one HTML file: the code of each scene, the models, and the JavaScript that predicts."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from reference.files.writing import write_atomically
from reference.trace import Trace
from simulator import Fabric
from simulator.catalogue import read_catalogue
from simulator.fabric import Processor
from simulator.interactive_timeline.browser_code import joined, picture_script, style
from simulator.interactive_timeline.simulate_choices import of_median_iterations
from simulator.workload.default_gpu_costs import COPY_START_NS, LAUNCH_NS, STALL_NS, default_processor, memory_of

from ..drawing import FOLDER as FIGURES
from ..traces_and_fabrics import MODELS

FOLDER = Path(__file__).parent
ROOT = FIGURES.parent
PATH = FIGURES / "annotated_ddp.html"
SCRIPTS = (
    *("bucketing.js", "replay.js", "models.js", "profiler_import.js", "reading.js"),
    *("scenes.js", "best_layout.js", "address.js", "page.js"),
)
"""Files of the page's script, after those of the picture. No file imports another."""
HOP_NS = 20_000
"""Latency of a hop of the ring; `replay.js` has the same number."""
WORDS = ("rank", "bucket", "all-reduce", "exposed communication")
"""Words of the glossary that the page defines."""
NOTES = (
    "Network: a ring with 20 microseconds a hop, one all-reduce at a time. Copies and launches take the usual times "
    "of the GPU of the trace; on an unknown device they take none. Collectives do not slow the computation down, and "
    "buffers are not broadcast. Naive and Flat use the no-overlap time of ddplab predict.",
)


class Scene(NamedTuple):
    """A way to average gradients.

    Attributes:
        title: Heading.
        sentence: What happens.
        question: What to guess before the timeline is shown.
        path: File of the code, from the root of the repository.
        methods: The methods whose code is shown, as `Class.method`.
    """

    title: str
    sentence: str
    question: str
    path: str
    methods: tuple[str, ...]


MINIMAL = "reference/minimal.py"
SCENES = (
    Scene(
        "Naive",
        "One all-reduce for each gradient, after the backward pass. Each pays the latency of the network.",
        "With more GPUs the ring has more hops. Which part grows, and how fast?",
        MINIMAL,
        ("NaiveDataParallel.average_gradients",),
    ),
    Scene(
        "Flat",
        "All gradients are copied into one flat tensor, so the latency is paid once. The network still waits for the "
        "backward pass to end.",
        "One all-reduce in place of one for each gradient: when does the iteration end?",
        MINIMAL,
        ("FlatDataParallel.average_gradients", "FlatDataParallel.launch"),
    ),
    Scene(
        "Asynchronous",
        "Each gradient is averaged as soon as it is ready, while the backward pass goes on. The latency is paid for "
        "each gradient again.",
        "Does overlap beat the flat tensor here? On a faster network?",
        MINIMAL,
        ("OverlappedDataParallel.gradient_ready",),
    ),
    Scene(
        "Bucketed",
        "Gradients share buckets of at least the cap's size, in the reverse of registration order, and each full "
        "bucket is averaged during the backward pass.",
        "Few latencies and overlap together: when does the iteration end?",
        MINIMAL,
        ("BucketedDataParallel.__init__", "OverlappedDataParallel.gradient_ready"),
    ),
    Scene(
        "Rebuilt",
        "Before the second iteration the buckets are filled again, in the order in which gradients became ready on "
        "rank 0. Drag the boundaries and beat torch's default.",
        "How much does the real order of the gradients gain?",
        "reference/buckets.py",
        ("Buckets.rebuild_if_due",),
    ),
)


@cache
def models() -> dict[str, Trace]:
    """Return the page's own models by name: traces of a V100, each of one iteration, the one of median duration."""
    traces = {}
    for name, trace in MODELS.items():
        workload = trace().workload.model_copy(update={"model": name, "memory_bytes_per_s": memory_of("V100")})
        traces[name] = of_median_iterations(trace().model_copy(update={"workload": workload}))
    return traces


def fabric(trace: Trace, gbit_per_s: float) -> Fabric:
    """Return the fabric of the page's predictions for a trace.

    A ring, and the usual costs of copies and launches on the GPU of the trace; none on an unknown device. Collectives
    do not slow the computation down, because the browser computes the closed form for constant speeds.
    """
    memory = trace.workload.memory_bytes_per_s or memory_of(trace.workload.device_name)
    processor = (
        Processor()
        if memory is None
        else default_processor(memory).model_copy(update={"slow_down": 1.0, "slow_down_error": 0.0})
    )
    ring = Fabric.from_alpha_beta(alpha_ns=HOP_NS, bytes_per_s=gbit_per_s * 1e9 / 8)
    return ring.model_copy(update={"processor": processor})


def page() -> str:
    """Return the page."""
    return Template((FOLDER / "page.html").read_text()).substitute(
        style=style() + (FOLDER / "page.css").read_text(),
        data=json.dumps(document(), separators=(",", ":")).replace("<", "\\u003c"),
        script=picture_script() + "\n" + joined(*(FOLDER / name for name in SCRIPTS)),
    )


def document() -> dict[str, object]:
    """Return the data of the page as a JSON document."""
    devices = read_catalogue().devices.values()
    return {
        "scenes": [
            {
                **{name: getattr(scene, name) for name in ("title", "sentence", "question")},
                "code": "\n\n".join(source_of(ROOT / scene.path, method) for method in scene.methods),
                "source": f"From {scene.path}: {', '.join(scene.methods)}.",
            }
            for scene in SCENES
        ],
        "words": [[word, meaning(word)] for word in WORDS],
        "notes": NOTES,
        "gpus": {
            "memories": [[device.pattern, 1e9 * device.memory.gb_per_s] for device in devices],
            "copy_start_ns": COPY_START_NS,
            "launch_ns": LAUNCH_NS,
            "stall_ns": STALL_NS,
        },
        "models": [_short(trace) for trace in models().values()],
    }


def source_of(path: Path, method: str) -> str:
    """Return a method dedented, without its docstring, and with each comment on a line of its own."""
    owner, _, name = method.partition(".")
    text = path.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            found = next(one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == name)
            lines = text.splitlines()[found.lineno - 1 : found.end_lineno]
            first = found.body[0]
            if ast.get_docstring(found) is not None and first.end_lineno is not None:
                del lines[first.lineno - found.lineno : first.end_lineno - found.lineno + 1]
            code = "\n".join(line[found.col_offset :] for line in lines)
            return re.sub(r"^( *)(.*\S)  (# .*)$", r"\1\3\n\1\2", code, flags=re.MULTILINE)
    raise ValueError(f"{path}: expected a class {owner}, got none")


def meaning(word: str) -> str:
    """Return the glossary's definition of a word."""
    rows = (line.split(" | ") for line in (ROOT / "docs" / "glossary.md").read_text().splitlines())
    return next(row[1] for row in rows if row[0] == f"| {word}")


def _short(trace: Trace) -> dict[str, object]:
    """Return the fields of a trace that `models.js` reads."""
    workload = {"model", "source", "device_name", "memory_bytes_per_s"}
    moments = {"forward_start_ns", "forward_end_ns", "computed_ns", "backward_end_ns", "end_ns", "ready_ns"}
    fields: Any = {
        "schema_version": True,
        "workload": dict.fromkeys(workload, True) | {"parameters": {"__all__": {"name", "dtype", "size_bytes"}}},
        "layouts": True,
        "ranks": {"__all__": {"rank": True, "iterations": {"__all__": moments | {"layout", "buckets"}}}},
    }
    return trace.model_dump(mode="json", include=fields, exclude_none=True)


def main() -> None:
    """Write the page."""
    write_atomically(PATH, page().encode())


if __name__ == "__main__":
    main()
