"""Write the inputs and truths of the board, `data/board`, from the cases and runs of the score's parts (b) to (i).

    python -m validation.board_files

Inputs hold what was known before a prediction, and no usual cost of a GPU. Each part of the score makes its
predictions from the same inputs.
"""

import csv
import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ddplab.reference.files.writing import write_atomically
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric

from . import part_b_iterations as part_b
from . import part_c_schedules as part_c
from . import part_d_scaling as part_d
from . import part_e_bucket_caps as part_e
from . import part_fg_runs as part_fg
from . import part_h_profiles as part_h
from . import part_i_weak_scaling as part_i
from .board import BOARD, Row
from .cases import BucketCapsCase, Case, IterationsCase, ScalingCase, SchedulesCase, WeakScalingCase, load_case
from .comparison import Part, Stated
from .scale_model import ORIGINAL

CASES = Path(__file__).parent / "cases"
ONE_BUCKET_MB = 1e6
"""Cap in place of an infinite one, which JSON does not have."""
LICENCES = {
    "pytorch/pytorch": "BSD-3-Clause",
    "(BSD-3)": "BSD-3-Clause",
    "(MIT)": "MIT",
    "(Apache-2.0)": "Apache-2.0",
}
"""By a word in the source of a case."""
UNKNOWN_LICENCE = "facts of a publication"
OWN = "MIT (ddplab)"


class Entry(NamedTuple):
    """One row of the board with its truth, before files have names."""

    fields: dict[str, Any]  #: of `Row`, without the names of files
    stated: Stated
    measured_ns: float


def entries(cases: Sequence[Case], runs: Sequence[Path], profiles: Sequence[Path]) -> Iterator[Entry]:
    """Yield the rows in the order of the score; runs are folders of `ddplab validate`."""
    for case in cases:
        for kind, of_case in OF_CASE.items():
            if isinstance(case, kind):
                yield from of_case(case)
    for folder in runs:
        yield from _of_run(folder)
    for path in profiles:
        yield from _of_classes(path) if path.is_dir() else _of_profile(path)


def all_entries() -> list[Entry]:
    """Return all rows of the board."""
    cases = [load_case(path) for path in sorted(CASES.glob("*.toml"))]
    runs = [path.parent for path in sorted(part_fg.RUNS.glob("*/report.json"))]
    return list(entries(cases, runs, part_h.profiles()))


def _of_iterations(case: IterationsCase) -> Iterator[Entry]:
    fabric, models = part_b.fabric_with(case.inputs), {model.name: model for model in case.inputs.models}
    for truth in case.truth:
        stated = part_b.stated(case.inputs, fabric, models[truth.model], truth.bucket_mb)
        yield Entry(
            _fields(
                ("b", case, f"{truth.model}, {truth.bucket_mb:g} MB", truth.gpus),
                gpu="V100",
                gpus_per_node=min(truth.gpus, case.inputs.links[0].members or truth.gpus),
                known_ms=_step_ms(stated.trace),
                model=_published(truth.model),
            ),
            stated,
            part_b.iteration_ns(case.inputs.batch, truth.per_s),
        )


def _of_schedules(case: SchedulesCase) -> Iterator[Entry]:
    trace = part_c.one_gpu_trace(case.inputs)
    for truth in case.truth:
        stated = part_c.stated(case.inputs, trace, part_c.Cell(truth.gpus, truth.schedule))
        source = "rate from the published iteration without overlap, latency of NVIDIA/nccl, src/graph/tuning.cc"
        stated = stated._replace(fabric=stated.fabric.model_copy(update={"source": source}))
        yield Entry(
            _fields(
                ("c", case, truth.schedule, truth.gpus),
                gpu=None,
                gpus_per_node=min(truth.gpus, case.inputs.node_gpus),
                known_ms=_step_ms(trace),
                model=_published("ResNet-50"),
            ),
            stated,
            part_c.iteration_ns(case.inputs, truth),
        )


def _of_scaling(case: ScalingCase) -> Iterator[Entry]:
    runs = {run.name: run for run in case.inputs.one_gpu}
    for truth in case.truth:
        run = runs[truth.run]
        yield Entry(
            _fields(
                ("d", case, run.name, truth.gpus),
                gpu=run.node,
                gpus_per_node=truth.gpus,
                known_ms=part_d.one_gpu_ns(run) / 1e6,
                model=run.model,
            ),
            _with_source(part_d.stated(case.inputs, run, truth.gpus), case.inputs.node(run.node).source),
            run.samples * truth.gpus / truth.per_s * 1e9,
        )


def _of_bucket_caps(case: BucketCapsCase) -> Iterator[Entry]:
    for reducer in case.inputs.reducers:
        for truth in case.truth:
            if truth.reducer == reducer.name:
                stated = part_e.stated(case.inputs, reducer, truth.cap_mb)
                yield Entry(
                    _fields(
                        ("e", case, f"{reducer.name}, {truth.cap_mb:g} MB", reducer.gpus),
                        gpu=reducer.node,
                        gpus_per_node=reducer.gpus,
                        known_ms=reducer.compute_ms,
                        model=reducer.model,
                    ),
                    _with_source(stated, case.inputs.node(reducer.node).source),
                    truth.ms * 1e6,
                )


def _of_weak_scaling(case: WeakScalingCase) -> Iterator[Entry]:
    runs = {run.name: run for run in case.inputs.runs}
    for truth in case.truth:
        run = runs[truth.run]
        stated = part_i.stated(case.inputs, run)
        node = stated.fabric.topology and stated.fabric.topology.levels[0].members
        yield Entry(
            _fields(
                ("i", case, run.name, truth.gpus),
                gpu=case.inputs.gpu,
                gpus_per_node=min(truth.gpus, node or truth.gpus),
                known_gpus=run.gpus,
                known_ms=run.ms,
                model=run.model,
            ),
            stated,
            median(truth.ms) * 1e6,
        )


OF_CASE: dict[type[Case], Callable[[Any], Iterator[Entry]]] = {
    IterationsCase: _of_iterations,
    SchedulesCase: _of_schedules,
    ScalingCase: _of_scaling,
    BucketCapsCase: _of_bucket_caps,
    WeakScalingCase: _of_weak_scaling,
}


def _of_run(folder: Path) -> Iterator[Entry]:
    """Rows of a committed run; those of emulated devices have the bytes and times of the scale model, as they ran."""
    run = part_fg.RunFiles.read(folder)
    part: Part = "g" if run.recorded.scale_model is None else "f"
    # The error of medians in the spread of iterations comes from the truths of all runs.
    fabric = run.fabric.with_processor(iteration_spread=0.0)
    linked = re.search(r"nodes of (\d+) ranks", fabric.source)
    alone = 1 if "links of" in fabric.source else run.world_size
    for row in run.recorded.rows:
        configuration = run.scale.configuration(row.configuration)
        assert not isinstance(configuration.cap_mb, str)  # as in `policy_of`, without buckets of a plan
        settings = {"bucket_cap_mb": min(configuration.cap_mb, ONE_BUCKET_MB), "order": configuration.order}
        yield Entry(
            _fields(
                (part, folder.name, f"{row.configuration.cap} {row.order}", run.world_size),
                gpu=None,
                gpus_per_node=int(linked[1]) if linked else alone,
                known_ms=_step_ms(run.trace),
                model=row.model if part == "g" else None,  # tensors are smaller than the original's
                source=f"validation/runs/{folder.name}",
                licence=OWN,
            ),
            Stated(run.trace, fabric, settings),
            median(ns for turn in row.turns for ns in turn.times_ns) * run.scale.dilation,
        )


def _of_profile(path: Path) -> Iterator[Entry]:
    """Rows of a profile: what a step computed, without its waits, and the all-reduces of the other steps."""
    if path.is_relative_to(part_h.RUNS):
        return  # one GPU sent nothing, so every method is exact, and the score does not count these
    for number, (step, fabric, settings) in enumerate(part_h.stated(path)):
        gpus = step.workload.world_size
        computed = ORIGINAL.trace(step, 1)
        yield Entry(
            _fields(
                ("h", path.name.partition(".")[0], f"step {number}", gpus),
                gpu=step.workload.device_name,
                gpus_per_node=gpus,
                known_ms=_step_ms(computed),
                model=_published("ResNet-50") if "resnet50" in path.name else None,
                source="facebookresearch/HolisticTraceAnalysis@f4d0062c, tests/data (validation/profiler)",
                licence="MIT",
            ),
            Stated(computed, fabric, settings | {"broadcast_buffers": False}),
            part_h.duration_ns(step),
        )


def _of_classes(run: Path) -> Iterator[Entry]:
    """Rows of data-parallel classes on one GPU, which copy gradients into buckets and send nothing."""
    for one in part_h.timed_classes(run):
        yield Entry(
            _fields(
                ("h", run.name, f"{one.model}, {one.name}", 1),
                gpu=one.trace.workload.device_name,
                gpus_per_node=1,
                known_ms=one.module_ns / 1e6,
                model=one.model,
                source=f"validation/gpu/{run.name}",
                licence=OWN,
            ),
            Stated(one.trace, one.fabric, {}),
            one.measured_ns,
        )


def _fields(about: tuple[Part, Any, str, int], **others: Any) -> dict[str, Any]:
    """Return the fields of a row; `about` has the part, the case or the name of a run, what was run, and the GPUs."""
    part, case, what, gpus = about
    fields = {"part": part, "system": case, "gpus": gpus, "known_gpus": 1, **others}
    if not isinstance(case, str):
        known = [licence for word, licence in LICENCES.items() if word in case.source]
        fields |= {"system": case.name, "source": case.source, "licence": (known or [UNKNOWN_LICENCE])[0]}
    return fields | {"name": f"{part}: {fields['system']}, {what}, {gpus} GPU" + ("s" if gpus > 1 else "")}


def _with_source(stated: Stated, source: str) -> Stated:
    return stated._replace(fabric=stated.fabric.model_copy(update={"source": source}))


def _published(model: str) -> str:
    return f"validation.published_models:{model.lower().replace('-', '')}"


def _step_ms(trace: Trace) -> float:
    return median(step.duration_ns for rank in trace.ranks for step in rank.iterations) / 1e6


def files(rows: Iterable[Entry]) -> dict[str, bytes]:
    """Return the content of all files of the board by name; equal traces and fabrics are one file."""
    made: dict[str, bytes] = {}
    lines, truths = [], []
    for row in rows:
        system = re.sub("[^a-z0-9]+", "-", row.fields["system"].lower()).strip("-")[:40]
        trace, fabric = row.stated.trace.model_dump_json().encode(), _fabric_json(row.stated.fabric)
        names = {"trace": f"{system}-{_digest(trace)}.json.gz", "fabric": f"{system}-{_digest(fabric)}.json"}
        made |= {f"traces/{names['trace']}": gzip.compress(trace, mtime=0), f"fabrics/{names['fabric']}": fabric}
        settings = json.loads(json.dumps(row.stated.settings))  # lists in place of tuples
        lines.append(Row(**row.fields | names, settings=settings))
        truths.append((lines[-1].name, row.measured_ns / 1e6))
    assert len({line.name for line in lines}) == len(lines), "rows have different names"
    made["inputs.jsonl"] = "".join(f"{line.model_dump_json()}\n" for line in lines).encode()
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [("name", "measured_ms"), *((n, f"{ms:.6f}") for n, ms in truths)]
    )
    made["truth.csv"] = text.getvalue().encode()
    return made


def _fabric_json(fabric: Fabric) -> bytes:
    """Return a fabric file, in which processor costs are left out if they are unknown, as by `Fabric.save`.

    Single costs that were not measured are 0 and not null, as when the files were named after their contents.
    """
    follows = {"concurrency", "processor"} - fabric.model_fields_set
    fabric = fabric.with_processor(**dict(fabric.processor))
    return (fabric.model_dump_json(indent=1, exclude=follows) + "\n").encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def main() -> None:
    """Write all files, and remove traces and fabrics that no row has any more."""
    made = files(all_entries())
    for folder in ("traces", "fabrics"):
        for path in (BOARD / folder).glob("*.json*"):
            if f"{folder}/{path.name}" not in made:
                path.unlink()
    for name, content in made.items():
        write_atomically(BOARD / name, content)
    print(f"{BOARD}: {len(made)} files, {sum(map(len, made.values())) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
