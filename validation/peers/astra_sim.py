"""ASTRA-sim's analytical network ("our trace in ASTRA-sim"): https://github.com/astra-sim/astra-sim, MIT.

What it models: each GPU computes and sends what a Chakra trace lists, one computation and one collective at a time.
An all-reduce consists of the steps of its algorithm on each GPU, and a step of a latency and of bytes over a rate
(congestion-unaware mode). It has no slow-down of computation beside collectives, no copies, no choice of algorithms.

What we gave it: `Prediction.save_chakra`, so computation, ready times and buckets are ours, without what `predict`
assumes for a GPU (copies, launches, stalls); `with_our_gpu_costs` has them in the trace too. Durations of broadcasts
are ours too, because ASTRA-sim has no broadcast and replays them. The network is one ring, as NCCL's: its rate is
that of the slowest link, where all adapters of a node count as one; the latency of its steps is the mean over the
ring's hops. One level is deliberate: with a level for nodes, ASTRA-sim sends half of the bytes of NCCL's ring between
nodes. One chunk is active at a time, because chunks that are active together do not share a link in this mode. Its GB
is 2^30 bytes. If the known step is that of several GPUs, ASTRA-sim's ratio of the two steps is applied to it.

The submodules are those that the revision names, except for spdlog, a logger, of which any of version 1 does. Needs
cmake, g++, protobuf-compiler and libprotobuf-dev.

`python -m validation.peers.astra_sim --ring` compares its steps with ours on one ring of equal links, where both have
the same formula: the largest difference in 24 steps of four models on 2 to 64 GPUs is 0.0002 %.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from ddplab.simulator import Fabric, Prediction, predict
from ddplab.simulator.fabric import Level, Topology

from ..board import Row, rows
from . import LIMIT_S, PEERS, checkout, run
from .buckets_and_links import NO_LINKS, PARTS, Ring, links_of, ring_of

URL = "https://github.com/astra-sim/astra-sim"
REVISION = "4f387bcd04f8949923f7934c7181fb56a3d941d0"
SUBMODULES = {
    "extern/graph_frontend/chakra": (
        "https://github.com/astra-sim/chakra",
        "214f2c559c10f897bcc395f8e1502d80d14f1541",
    ),
    "extern/helper/fmt": ("https://github.com/fmtlib/fmt", "7e73566ce7bd3617cd4b14a2e3a19a2a30b524c7"),
    "extern/helper/spdlog": ("https://github.com/gabime/spdlog", "62302019babd8fdf63c1c6dc4c9faa48d441a7f0"),
    "extern/network_backend/analytical": (
        "https://github.com/astra-sim/astra-network-analytical",
        "599a0473a9a74f5383f73b3cea5a12b9bc5ebaef",
    ),
    "extern/network_backend/analytical/extern/yaml-cpp": (
        "https://github.com/jbeder/yaml-cpp",
        "3d2888cc8a45da2f420454ad728cdfad01a3d54f",
    ),
    "extern/network_backend/analytical/extern/googletest": (
        "https://github.com/google/googletest",
        "1204d634444b0ba6da53201a8b6caf2a502d883c",
    ),
    "extern/remote_memory_backend/analytical": (
        "https://github.com/astra-sim/astra-memory-analytical",
        "641cce854d256bfd288b1de9607b6757313363f9",
    ),
}
GIB = 2**30
SYSTEM = {
    "scheduling-policy": "FIFO",
    "endpoint-delay": 0,
    "local-reduction-delay": 0,
    "active-chunks-per-dimension": 1,
    "preferred-dataset-splits": 1,
    "collective-optimization": "baseline",
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
}


def method(row: Row) -> float:
    """Return the predicted milliseconds of an iteration; no interval.

    Raises:
        ValueError: The row has no links between GPUs.
        RuntimeError: ASTRA-sim cannot be fetched or built, or fails on the row.
    """
    return _from_known_ms(row, assume=False)


def with_our_gpu_costs(row: Row) -> float:
    """Return the same with the copies, launches and stalls in the traces that `predict` assumes for a GPU."""
    return _from_known_ms(row, assume=True)


def _from_known_ms(row: Row, *, assume: bool) -> float:
    if row.part not in PARTS:
        raise ValueError(NO_LINKS)
    predicted_ms = _step_ms(row, row.gpus, assume=assume)
    if row.known_gpus == 1:
        return predicted_ms
    return row.known_ms * predicted_ms / _step_ms(row, row.known_gpus, assume=assume)


def _step_ms(row: Row, gpus: int, *, assume: bool) -> float:
    trace, fabric = row.load_trace(), row.load_fabric()
    prediction = predict(trace, fabric, world_size=gpus, assume=assume, **row.settings)
    return simulated_ms(prediction, ring_of(links_of(row, gpus)))


def simulated_ms(prediction: Prediction, ring: Ring) -> float:
    """Run ASTRA-sim on a prediction's Chakra traces; return the milliseconds until the last GPU has finished."""
    with TemporaryDirectory() as folder:
        here = Path(folder)
        prediction.save_chakra(here / "trace")
        (here / "system.json").write_text(json.dumps(SYSTEM))
        (here / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
        network = {
            "topology": "Ring",
            "npus_count": ring.gpus,
            "bandwidth": f"{ring.bytes_per_s / GIB:.9f}",
            "latency": f"{ring.latency_s * 1e9:.3f}",
        }
        (here / "network.yml").write_text("".join(f"{name}: [ {value} ]\n" for name, value in network.items()))
        files = {
            "workload": "trace",
            "system": "system.json",
            "remote-memory": "memory.json",
            "network": "network.yml",
        }
        options = [f"--{name}-configuration={file}" for name, file in files.items()]
        return finished_ms(run(str(program()), *options, cwd=here, limit_s=300), ring.gpus)


def finished_ms(log: str, gpus: int) -> float:
    """Return the milliseconds of the slowest GPU from ASTRA-sim's log, whose cycles are nanoseconds."""
    ends = [int(cycles) for cycles in re.findall(r"sys\[\d+\] finished, (\d+) cycles", log)]
    if len(ends) != gpus:
        raise RuntimeError(f"ASTRA-sim: expected the end of {gpus} GPUs in its log, got {len(ends)}")
    return max(ends) / 1e6


@cache
def program() -> Path:
    """Fetch and build ASTRA-sim once, in some minutes; return its program."""
    sources = checkout(URL, REVISION, "astra_sim", SUBMODULES)
    build = PEERS / "astra_sim_build"
    made = build / "bin" / "AstraSim_Analytical_Congestion_Unaware"
    if not made.exists():
        if missing := [name for name in ("cmake", "g++", "protoc") if which(name) is None]:
            packages = "cmake g++ protobuf-compiler libprotobuf-dev"
            raise RuntimeError(f"ASTRA-sim: no {' and no '.join(missing)}; run `apt-get install {packages}`")
        print("ASTRA-sim: building, about six minutes", file=sys.stderr)
        schema = sources / "extern/graph_frontend/chakra/schema/protobuf"
        run("protoc", "et_def.proto", "--cpp_out=.", cwd=schema)
        build.mkdir(exist_ok=True)
        project = sources / "build" / "astra_analytical"
        run("cmake", "-DBUILDTARGET=congestion_unaware", str(project), cwd=build)
        run("cmake", "--build", ".", "-j", "2", cwd=build, limit_s=2 * LIMIT_S)
    return made


def compare_on_rings(models: int = 4) -> None:
    """Print our step and ASTRA-sim's for the largest models of the board, on rings of equal links of 10 Gbit/s."""
    level = Level(name="ring", latency_ns=5000, bytes_per_s=1.25e9)
    fabric = Fabric(topology=Topology(levels=(level,)), algorithm="ring")
    worst = 0.0
    print(f"{'model':50} {'GPUs':>5} {'one GPU':>9} {'ours':>9} {'ASTRA-sim':>9}  milliseconds")
    by_model = {row.model: row for row in rows() if row.model is not None and row.part in "di"}
    for model in sorted(by_model)[:: max(1, len(by_model) // models)]:
        trace = by_model[model].load_trace()
        for gpus in (2, 4, 8, 16, 32, 64):
            ours = predict(trace, fabric, world_size=gpus, assume=False, broadcast_buffers=False)
            theirs_ms = simulated_ms(ours, Ring(gpus, level.bytes_per_s, level.latency_ns / 1e9))
            ours_ms, alone_ms = ours.iteration_ns / 1e6, ours.compute_ns / 1e6
            worst = max(worst, abs(theirs_ms / ours_ms - 1))
            print(
                f"{model:50} {gpus:5} {alone_ms:9.3f} {ours_ms:9.3f} {theirs_ms:9.3f}  {theirs_ms / ours_ms - 1:+.4%}"
            )
    print(f"largest difference {worst:.4%}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--ring"]:
        sys.exit("usage: python -m validation.peers.astra_sim --ring")
    compare_on_rings()
