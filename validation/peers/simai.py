"""SimAI's analytical mode ("our trace in SimAI"): https://github.com/aliyun/SimAI, Apache-2.0.

What it models: the all-reduce of each layer's weight gradients at a bus bandwidth that follows from the links (a ring
in NCCL's sense), with a fixed time for messages below 1 MiB. It has no latency above that, no network contention and
no overlap: a user may state which part of data-parallel communication is hidden (`-dp_o`), and the default is none,
which we keep. So an iteration is computation plus the sum of the all-reduces. Its constants are its authors'; none
was fitted to these rows.

What we gave it: a workload file with one layer for each bucket of torch's rule. Its computation is ours, from the
trace, since SimAI measures it on a GPU that we don't have. Links: `-nv`, the bus bandwidth inside a node; `-nic`, all
adapters of a node as one. Its GB is 2^30 bytes, so our rates are converted. With one GPU in a tensor-parallel group
SimAI counts each rank of a data-parallel group as a node and uses the rate of the adapters, which is right on several
nodes; on one node, where no adapter takes part, `-nic` is the rate inside the node as well. Broadcasts of buffers
have no counterpart. If the known step is that of several GPUs, SimAI's ratio of the two steps is applied to it.

It takes all rows of the parts (b) to (e) and (i), whose links are known: 232 of 334. (f) and (g) are on emulated
links or shared cores, for which it has no model; (h) replays steps whose all-reduces were measured, without links.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ..board import Row
from . import LIMIT_S, checkout, run
from .buckets_and_links import NO_LINKS, PARTS, Computation, Links, computation_of, links_of

URL = "https://github.com/aliyun/SimAI"
REVISION = "f5efb5a93ea9be7db25a8843f9f7ff54044f6062"
SOURCES = "astra-sim-alibabacloud"
GIB = 2**30


def method(row: Row) -> float:
    """Return the predicted milliseconds of an iteration, without an interval.

    Raises:
        ValueError: SimAI cannot take the row.
        RuntimeError: SimAI cannot be fetched or built, or fails on the row.
    """
    if row.part not in PARTS:
        raise ValueError(NO_LINKS)
    computation = computation_of(row)
    predicted_ms = _run(computation, links_of(row))
    if row.known_gpus == 1:
        return predicted_ms
    return row.known_ms * predicted_ms / _run(computation, links_of(row, row.known_gpus))


def workload(computation: Computation, gpus: int) -> str:
    """Return the content of a workload file: a header, the number of layers, and a line for each layer.

    A line has the layer's name and a number that is not used, then computation in nanoseconds, collective and bytes
    of the forward pass, of the gradients of inputs and of the gradients of weights, and the time of an update. SimAI
    computes no less than 1 ns in each pass. Layers stand in the order of the forward pass, so the first bucket comes
    last; the optimiser is a layer without gradients, as in the files of its authors.
    """
    lines = list(_layers(computation))
    header = (
        f"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 1 ep: 1 pp: 1 vpp: 1 ga: 1 all_gpus: {gpus} "
        "checkpoints: 0 checkpoint_initiates: 0 pp_comm 0"
    )
    return "\n".join([header, str(len(lines)), *lines, ""])


def _layers(computation: Computation) -> Iterator[str]:
    previous_ns, of_buckets = computation.forward_ns, []
    for number, bucket in enumerate(computation.buckets):
        of_buckets.append(
            _layer(f"bucket_{number}", 1, bucket.ready_ns - previous_ns, "ALLREDUCE", bucket.size_bytes)
        )
        previous_ns = bucket.ready_ns
    yield _layer("optimizer", computation.forward_ns, computation.end_ns - previous_ns, "NONE", 0)
    yield from reversed(of_buckets)


def _layer(name: str, forward_ns: int, backward_ns: int, collective: str, size_bytes: int) -> str:
    fields = (name, -1, forward_ns, "NONE", 0, 1, "NONE", 0, max(1, backward_ns), collective, size_bytes, 100)
    return "\t".join(map(str, fields))


def arguments(links: Links) -> list[str]:
    """Return the command's options for these links."""
    network = links.between or links.inside
    options = {
        "-g": links.nodes * links.gpus,
        "-g_p_s": links.gpus,
        "-nv": links.inside / GIB,
        "-nic": network / GIB,
        "-n_p_s": 1,
    }
    return [str(word) for option in options.items() for word in option]


def _run(computation: Computation, links: Links) -> float:
    program, sources = _prepared()
    with TemporaryDirectory() as folder:
        here = Path(folder)
        (here / SOURCES).symlink_to(sources / SOURCES)  # it reads tables of ratios from there
        (here / "results").mkdir()
        (here / "workload.txt").write_text(workload(computation, links.nodes * links.gpus))
        run(str(program), "-w", "workload.txt", *arguments(links), "-r", "row-", cwd=here, limit_s=120)
        return total_ms((here / "results" / "row-EndToEnd.csv").read_text())


def total_ms(report: str) -> float:
    """Return milliseconds of the iteration from SimAI's report, whose second line ends with its microseconds."""
    names, values, *_ = report.splitlines()
    assert names.endswith("Total time"), names
    return float(values.rsplit(",", 1)[1]) / 1000


@cache
def _prepared() -> tuple[Path, Path]:
    """Fetch and build SimAI once; return its program and its sources."""
    sources = checkout(URL, REVISION, "simai", paths=[f"/{SOURCES}/", "/LICENSE"])
    build = sources / "build"  # goes with the sources if the revision changes
    program = build / "simai_analytical" / "SimAI_analytical"
    if not program.exists():
        print("SimAI: building, some minutes", file=sys.stderr)
        build.mkdir(exist_ok=True)
        project = sources / SOURCES / "build" / "simai_analytical"
        run("cmake", "-DUSE_ANALYTICAL=TRUE", str(project), cwd=build, limit_s=LIMIT_S)
        run("make", "-j2", "SimAI_analytical", cwd=build, limit_s=LIMIT_S)
    return program, sources
