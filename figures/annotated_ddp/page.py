"""The Annotated DDP as one HTML file: the code of each scene, the models, and the JavaScript that predicts."""

import ast
import json
import math
import re
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from ddplab import Fabric, Trace
from ddplab.demo import GBIT_PER_S, HOP_NS, RANKS
from ddplab.reference.bucketing import bucket_caps
from ddplab.reference.files.writing import write_atomically
from ddplab.simulator.capacity.memory import (
    CONTEXT_BYTES,
    COUNT_ERROR,
    FRAGMENTS,
    STATES,
    TEMPORARIES,
    USABLE,
    WORKSPACE_BYTES,
)
from ddplab.simulator.catalogue import read_catalogue
from ddplab.simulator.fabric import Processor
from ddplab.simulator.inputs_with_default_costs import (
    COPY_START_NS,
    LAUNCH_NS,
    STALL_NS,
    default_processor,
    memory_of,
)
from ddplab.simulator.profiler_import import training_steps
from ddplab.simulator.profiler_import.gradient_sizes import DTYPES
from ddplab.simulator.profiler_import.profiler_events import LONGEST_US, MOST_EARLY_NS
from figures.interactive_timeline.browser_code import joined, markup, style, timeline_script

from ..drawing import FOLDER as FIGURES
from ..traces_and_fabrics import MODELS

FOLDER = Path(__file__).parent
ROOT = FIGURES.parent
PATH = FIGURES / "annotated_ddp.html"
SCRIPTS = (
    *("bucketing.js", "replay.js", "models.js", "profiler_import.js", "scenes.js"),
    *("best_layout.js", "forecast.js", "page.js"),
)
"""Files of the page's script, after those of the timeline. No file imports another."""
OF_TRAINING_STEPS = (
    *("STEP", "FORWARD", "NODE", "ACCUMULATE", "PACK", "COPY_OUT", "OPTIMIZER", "COLLECTIVE_CALL"),
    *("ALL_REDUCE_CALLS", "ELEMENT_BYTES", "MOST_BUSY", "MOST_ELEMENTS", "MOST_NESTED"),
)
"""Constants of the importer in Python that the one in the browser takes."""
NETWORKS_GBIT_PER_S = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 100, 200, 400)
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CAPS_MB = (None, 1, 2, 5, 10, 15, 25, 35, 50, 100, math.inf)
"""In MiB; None: torch's default, 1 MiB for the first bucket and 25 MiB for the others."""
MOST_STRAGGLING = 2.0
WORDS = ("rank", "bucket", "all-reduce", "exposed communication", "straggler", "copies, launches", "alone")
"""Words of the glossary that the page defines."""
NOTES = (
    f"Network: a ring with {HOP_NS // 1000} microseconds a hop, one all-reduce at a time. For the page's own models, "
    "copies and launches are free, as in ddplab demo and ddplab learn, whose times are those of Naive, Flat and "
    "Rebuilt; for a profile they take the usual times of its GPU, on an unknown device none. Collectives do not slow "
    "the computation down, and buffers are not broadcast. Of several recorded iterations, the median one is "
    "shown. Naive and Flat use the no-overlap time of ddplab predict.",
)


class Scene(NamedTuple):
    """A way to average gradients.

    Attributes:
        title: Heading.
        sentence: What happens.
        question: What to guess before the timeline is shown.
        noun: What one all-reduce averages.
        overlaps: Whether all-reduces run during the backward pass.
        copies_out: Whether averages are copied back into the gradients.
        path: File of the code, from the root of the repository.
        steps: The story: prose, and the method that it is about, as `Class.method`.
        end: What to look at in the timeline, and what is left to win.
    """

    title: str
    sentence: str
    question: str
    noun: str
    overlaps: bool
    copies_out: bool
    path: str
    steps: tuple[tuple[str, str], ...]
    end: str


MINIMAL = "reference/minimal.py"
SCENES = (
    Scene(
        "Naive",
        "One all-reduce for each gradient, after the backward pass. Each pays the latency of the network.",
        "With more GPUs the ring has more hops. Which part grows, and how fast?",
        *("gradient", False, False),
        MINIMAL,
        (
            (
                "Every rank has the whole model and its own part of the batch. The gradient of the whole batch is "
                "the mean of the ranks' gradients. So divide each gradient by the world size, and let an all-reduce "
                "give every rank the sum.",
                "NaiveDataParallel.average_gradients",
            ),
        ),
        "This trains correctly. But most gradients are tiny, and a tiny message takes as long as the hops of the "
        "ring: the network's row is full of short bars while the GPU waits.",
    ),
    Scene(
        "Flat",
        "All gradients are copied into one flat tensor, so the latency is paid once. The network still waits for the "
        "backward pass to end.",
        "One all-reduce in place of one for each gradient: when does the iteration end?",
        *("tensor", False, True),
        MINIMAL,
        (
            (
                "A message has a latency, however small it is. So send few: all gradients of a dtype together.",
                "FlatDataParallel.average_gradients",
            ),
            (
                "torch.cat copies them into one tensor. After the all-reduce, its parts are copied back.",
                "FlatDataParallel.launch",
            ),
        ),
        "The latency is gone, and the bytes are left. They wait until the last gradient is there, although most "
        "gradients were ready long before.",
    ),
    Scene(
        "Overlapped",
        "Each gradient is averaged as soon as it is ready, while the backward pass goes on. The latency is paid for "
        "each gradient again.",
        "Does overlap beat the flat tensor here? When does the iteration end?",
        *("gradient", True, True),
        MINIMAL,
        (
            (
                "Autograd computes the gradients of the last layers first. A hook on each parameter runs as soon as "
                "its gradient is there, and launches an all-reduce. The launch returns at once; one more function "
                "waits for all results when the backward pass ends.",
                "OverlappedDataParallel.gradient_ready",
            ),
        ),
        "Communication now hides behind the backward pass, and only what sticks out is exposed. But with a message "
        "for each gradient, the latencies are back. Try 2 GPUs, and then 64.",
    ),
    Scene(
        "Bucketed",
        "Gradients share buckets of at least the cap's size, in the reverse of registration order, and each full "
        "bucket is averaged during the backward pass.",
        "Few latencies and overlap together: when does the iteration end?",
        *("bucket", True, True),
        MINIMAL,
        (
            (
                "Buckets are in between: large enough to pay few latencies, small enough to leave early. The "
                "constructor fills them in the order of registration and reverses the list: the last layers, whose "
                "gradients come first, leave first.",
                "BucketedDataParallel.__init__",
            ),
            (
                "The hook is the same. It launches a bucket when its last gradient has arrived, and in the order of "
                "their numbers: ranks that launch in different orders would add up different gradients.",
                "OverlappedDataParallel.gradient_ready",
            ),
        ),
        "Drag the cap. Small buckets pay latencies, and one large bucket is Flat again.",
    ),
    Scene(
        "Rebuilt",
        "Before the second iteration the buckets are filled again, in the order in which gradients became ready on "
        "rank 0. Drag the boundaries and beat torch's default.",
        "How much does the real order of the gradients gain?",
        *("bucket", True, True),
        "reference/buckets.py",
        (
            (
                "The order of registration is a guess. If a layer is used in another place than it is registered, "
                "its bucket waits, and all behind it too. The first backward pass shows the real order; rank 0 "
                "broadcasts its own, because all ranks need equal buckets. The small bucket now comes first, so "
                "the network starts early.",
                "Buckets.rebuild_if_due",
            ),
        ),
        "This is what torch's class does. What is still exposed needs a faster network, fewer bytes, or a larger "
        "batch.",
    ),
)


@cache
def models() -> dict[str, Trace]:
    """Return the page's own models by name: traces of a V100."""
    traces = {}
    for name, trace in MODELS.items():
        gpu = {"device_name": "Tesla V100", "memory_bytes_per_s": memory_of("V100")}
        workload = trace().workload.model_copy(update={"model": name, **gpu})
        traces[name] = trace().model_copy(update={"workload": workload})
    return traces


def fabric(trace: Trace, gbit_per_s: float) -> Fabric:
    """Return the fabric of the page's predictions for a trace.

    A ring, and the usual costs of copies and launches on the GPU of the trace; none on an unknown device or, as in
    the demo, for the page's own models. Collectives do not slow the computation down, because the browser computes
    the closed form for constant speeds.
    """
    memory = trace.workload.memory_bytes_per_s or memory_of(trace.workload.device_name)
    processor = (
        Processor()
        if memory is None or any(trace is one for one in models().values())
        else default_processor(memory).model_copy(update={"slow_down": 1.0, "slow_down_error": 0.0})
    )
    ring = Fabric.from_alpha_beta(alpha_ns=HOP_NS, bytes_per_s=gbit_per_s * 1e9 / 8)
    return ring.model_copy(update={"processor": processor})


def page() -> str:
    """Return the page."""
    return Template((FOLDER / "page.html").read_text()).substitute(
        style=style() + (FOLDER / "page.css").read_text(),
        timeline=markup(),
        stories="".join(map(story, SCENES)),
        words="".join(f"<dt>{word}</dt><dd>{escape(meaning(word))}</dd>" for word in WORDS),
        notes="".join(f"<p>{escape(note)}</p>" for note in NOTES),
        data=json.dumps(document(), separators=(",", ":")).replace("<", "\\u003c"),
        script="\n".join([constants(), timeline_script(), joined(*(FOLDER / name for name in SCRIPTS))]),
    )


def story(scene: Scene) -> str:
    """Return the HTML of a scene's prose, with the code that it is about."""
    steps = "".join(
        f"<p>{escape(prose)}</p><pre><code>{escape(source_of(ROOT / scene.path, method))}</code></pre>"
        for prose, method in scene.steps
    )
    methods = ", ".join(method for _, method in scene.steps)
    start = f"<h2>{scene.title}</h2><p>{escape(scene.sentence)}</p>"
    end = f"<p>{escape(scene.end)}</p><p><small>From {scene.path}: {methods}.</small></p>"
    return f"<article>{start}{steps}{end}</article>"


def constants() -> str:
    """Return the constants that the JavaScript takes from Python."""
    of_steps = {name: getattr(training_steps, name) for name in OF_TRAINING_STEPS}
    of_events = {"LONGEST_US": LONGEST_US, "MOST_EARLY_NS": MOST_EARLY_NS, "DTYPES": DTYPES}
    values = {"HOP_NS": HOP_NS, **of_events, **of_steps}
    return "\n".join(f"const {name} = {json.dumps(value)};" for name, value in values.items())


def document() -> dict[str, object]:
    """Return the data of the page as a JSON document."""
    return {
        "scenes": [
            {
                **{name: getattr(scene, name) for name in ("title", "question", "noun", "overlaps")},
                "copiesOut": scene.copies_out,
                "id": scene.title.lower(),
            }
            for scene in SCENES
        ],
        "caps": [{"id": _cap_id(cap), "name": _cap_name(cap), "bytes": bucket_caps(cap)} for cap in CAPS_MB],
        "gbit_per_s": NETWORKS_GBIT_PER_S,
        "world_sizes": WORLD_SIZES,
        "words": {
            "gbit": [f"{gbit} Gbit/s" for gbit in NETWORKS_GBIT_PER_S],
            "gpus": [str(world_size) for world_size in WORLD_SIZES],
            "cap": [_cap_name(cap) for cap in CAPS_MB],
        },
        "most_straggling": MOST_STRAGGLING,
        "start": {
            "scene": 0,
            "model": 0,
            "gbit": NETWORKS_GBIT_PER_S.index(GBIT_PER_S),
            "gpus": WORLD_SIZES.index(RANKS),
            "factor": 1,
            "cap": CAPS_MB.index(None),
        },
        "gpus": {
            "known": [
                [one.pattern, 1e9 * one.memory.gb_per_s, one.memory.gib] for one in read_catalogue().devices.values()
            ],
            "costs": {"copy_start_ns": COPY_START_NS, "launch_ns": LAUNCH_NS, "stall_ns": STALL_NS},
            "memory": {
                "states": STATES["adam"],
                "temporaries": TEMPORARIES["adam"],
                "workspace_bytes": WORKSPACE_BYTES,
                "usable": USABLE,
                "count_error": COUNT_ERROR,
                "fragments": FRAGMENTS,
                "context_bytes": CONTEXT_BYTES,
            },
        },
        "models": [_short(trace) for trace in models().values()],
    }


def _cap_id(cap_mb: float | None) -> str:
    return "default" if cap_mb is None else "Infinity" if math.isinf(cap_mb) else str(cap_mb)


def _cap_name(cap_mb: float | None) -> str:
    return "25 MiB (torch)" if cap_mb is None else "one bucket" if math.isinf(cap_mb) else f"{cap_mb} MiB"


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
