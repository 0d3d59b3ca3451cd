"""Files of torch's profiler for tests: what a host calls and a GPU runs in a training step, with the true times."""

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

REAL = Path(__file__).parents[2] / "validation" / "profiler"
"""Published files of real training."""
MAIN, AUTOGRAD, LIBRARY = 1, 2, 20
"""Two threads of the host, and the stream of the communication library."""
COMPUTE = 7
COPY_OUT = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
CALL_NS = 5_000
"""Duration of every call of the host."""


@dataclass
class Gpu:
    """Writes events, and runs what is launched: each stream in order, after what it waits for."""

    vendor: str = "cuda"
    events: list[dict[str, Any]] = field(default_factory=list)
    free_ns: dict[int, int] = field(default_factory=dict)
    correlation: int = 0

    def host(self, name: str, thread: int, start_ns: int, end_ns: int, category: str = "cpu_op", **more: Any) -> None:
        self._event(category, name, 100, thread, start_ns, end_ns, more)

    def launch(
        self, name: str, thread: int, now_ns: int, ns: int, *, stream: int = COMPUTE, after_ns: int = 0, **more: Any
    ) -> tuple[int, int]:
        """Launch something; returns when it starts and ends on the GPU."""
        self.correlation += 1
        call = "hipLaunchKernel" if self.vendor == "hip" else "cudaLaunchKernel"
        self.host(call, thread, now_ns, now_ns + CALL_NS, f"{self.vendor}_runtime", correlation=self.correlation)
        start_ns = max(now_ns + CALL_NS, self.free_ns.get(stream, 0), after_ns)
        self.free_ns[stream] = start_ns + ns
        category = "gpu_memcpy" if "bytes" in more else "kernel"
        arguments = {"device": 0, "stream": stream, "correlation": self.correlation, **more}
        self._event(category, name, 0, stream, start_ns, start_ns + ns, arguments)
        return start_ns, start_ns + ns

    def _event(self, category, name, process, thread, start_ns, end_ns, arguments) -> None:
        times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
        event = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "args": arguments}
        self.events.append(event | times)


@dataclass(frozen=True)
class Script:
    """A training script and its GPU.

    Attributes:
        shapes: Shapes of the gradients, in the order in which they become ready.
        buckets: Number of gradients of each bucket, in launch order.
        kernel_ns: Duration of each gradient's kernel; 0: the kernel of the gradient before computes both.
        host_ns: Time between two calls of the host.
        all_reduce_ns: Duration of each bucket's all-reduce.
        steps: Number of steps.
        noted_shapes: Whether the file has shapes; if not, the copies out of the buckets show the bytes.
        vendor: "cuda" or "hip".
        world_size: Number of ranks.
    """

    shapes: tuple[tuple[int, ...], ...]
    buckets: tuple[int, ...]
    kernel_ns: tuple[int, ...]
    host_ns: int
    all_reduce_ns: tuple[int, ...]
    steps: int
    noted_shapes: bool
    vendor: str
    world_size: int = 2


SMALL = Script(
    shapes=((4, 3), (4,), (3, 2), (3,)), buckets=(1, 3), kernel_ns=(900_000, 400_000, 700_000, 300_000),
    host_ns=50_000, all_reduce_ns=(800_000, 600_000), steps=3, noted_shapes=True, vendor="cuda",
)  # fmt: skip


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Scripts whose host is slower or faster than their GPU."""
    count = draw(st.integers(1, 6))
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=count, max_size=count))
    edges = sorted(draw(st.sets(st.integers(1, count), max_size=3)) | {count})
    buckets = tuple(end - start for start, end in zip([0, *edges], edges, strict=False))
    times = st.integers(1_000, 5_000_000)
    return Script(
        shapes=tuple(shapes),
        buckets=buckets,
        kernel_ns=(draw(times), *draw(st.lists(times | st.just(0), min_size=count - 1, max_size=count - 1))),
        host_ns=draw(st.integers(10_000, 1_000_000)),
        all_reduce_ns=tuple(draw(st.lists(times, min_size=len(buckets), max_size=len(buckets)))),
        steps=draw(st.integers(1, 3)),
        noted_shapes=draw(st.booleans()),
        vendor=draw(st.sampled_from(["cuda", "hip"])),
    )


@dataclass
class Truth:
    """True times of one step in nanoseconds, from the start of the step."""

    iteration_ns: int
    ready_ns: list[int]
    all_reduces_ns: list[tuple[int, int]]
    copied_out_ns: int


def profile(script: Script) -> tuple[dict[str, Any], list[Truth]]:
    """Run a script; returns the file's document and the true times of each step."""
    gpu, truths = Gpu(script.vendor), []
    now = start_ns = 10_000_000
    for number in range(script.steps):
        truth, now = _step(gpu, script, number, now, start_ns)
        start_ns += truth.iteration_ns
        truths.append(truth)
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "a GPU"}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": script.world_size},
        "traceEvents": gpu.events,
    }, truths


def _step(gpu: Gpu, script: Script, number: int, begin: int, start_ns: int) -> tuple[Truth, int]:
    """One step that the host begins at `begin`, and the GPU at `start_ns`."""
    now = begin + script.host_ns
    forward = now
    gpu.launch("forward", MAIN, now, script.kernel_ns[0])
    now += CALL_NS + script.host_ns
    gpu.host("DistributedDataParallel.forward", MAIN, forward - 1, now, "user_annotation")
    now += script.host_ns
    sizes = [4 * prod(shape) for shape in script.shapes]
    last = [sum(script.buckets[: bucket + 1]) - 1 for bucket in range(len(script.buckets))]
    end_ns, ready, reduced = 0, [], []
    for place, (shape, kernel_ns) in enumerate(zip(script.shapes, script.kernel_ns, strict=True)):
        if kernel_ns:
            gpu.host("autograd::engine::evaluate_function: MmBackward0", AUTOGRAD, now, now + CALL_NS)
            _, end_ns = gpu.launch(f"gradient {place}", AUTOGRAD, now, kernel_ns)
            now += CALL_NS + script.host_ns
        ready.append(end_ns - start_ns)
        outer, noted = now, {"Input Dims": [list(shape)], "Input type": ["float"]} if script.noted_shapes else {}
        gpu.host("torch::autograd::AccumulateGrad", AUTOGRAD, now + 1_000, now + 2_000, **noted)
        now += 3_000
        gpu.host("torch::distributed::reducer::mul_out", AUTOGRAD, now, now + 2 * CALL_NS)
        _, packed_ns = gpu.launch("mul", AUTOGRAD, now + 1_000, 2_000)
        now += 3 * CALL_NS
        if place in last:
            bucket = last.index(place)
            members = sizes[place + 1 - script.buckets[bucket] : place + 1]
            reduced.append(_all_reduce(gpu, script, bucket, sum(members), now, packed_ns))
            now += 4 * CALL_NS
        gpu.host("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", AUTOGRAD, outer, now)
        now += script.host_ns
    copied_ns = 0
    for place, size in enumerate(sizes):
        bucket = next(bucket for bucket, end in enumerate(last) if place <= end)
        gpu.host(COPY_OUT, AUTOGRAD, now, now + 2 * CALL_NS)
        _, copied_ns = gpu.launch(
            "Memcpy DtoD", AUTOGRAD, now + 1_000, 1_500, after_ns=reduced[bucket][1], bytes=size
        )
        now += 3 * CALL_NS
    gpu.host("Optimizer.step#SGD.step", MAIN, now, now + 2 * CALL_NS, "user_annotation")
    _, done_ns = gpu.launch("step", MAIN, now + 1_000, 50_000)
    now += 3 * CALL_NS
    gpu.host(f"ProfilerStep#{number}", MAIN, begin, now, "user_annotation")
    truth = Truth(
        iteration_ns=max(done_ns, now) - start_ns,
        ready_ns=ready,
        all_reduces_ns=[(begin_ns - start_ns, end_ns - start_ns) for begin_ns, end_ns in reduced],
        copied_out_ns=copied_ns - start_ns,
    )
    return truth, now


def _all_reduce(gpu: Gpu, script: Script, bucket: int, size: int, now: int, packed_ns: int) -> tuple[int, int]:
    gpu.host("c10d::allreduce_", AUTOGRAD, now, now + 3 * CALL_NS)
    described = {"In msg nelems": size // 4, "dtype": "Float", "Collective name": "allreduce"}
    gpu.host("record_param_comms", AUTOGRAD, now + 100, now + 2 * CALL_NS, **described)
    gpu.host("nccl:all_reduce", AUTOGRAD, now + 200, now + 2 * CALL_NS, "user_annotation")
    name = "ncclDevKernel_Generic" if script.vendor == "hip" else "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    return gpu.launch(name, AUTOGRAD, now + 1_000, script.all_reduce_ns[bucket], stream=LIBRARY, after_ns=packed_ns)


def write(document: dict[str, Any], path: Path) -> Path:
    """Write a file as the profiler does."""
    path.write_text(json.dumps(document))
    return path


def without(document, *names):
    """The document without the events whose names begin like this."""
    events = [one for one in document["traceEvents"] if not one["name"].startswith(names)]
    return document | {"traceEvents": events}
