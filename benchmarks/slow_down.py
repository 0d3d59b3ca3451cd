"""How much NCCL's all-reduces slow the computation of a GPU, by the thread blocks that they occupy, and the reverse.

Two communicators of one process stand for two ranks that share the GPU, which NCCL allows from 2.30 on with
NCCL_MULTI_RANK_GPU_ENABLE=1. Both messages pass through the memory of this GPU, and nothing through NVLink. On one
node of Hopper GPUs whose switches reduce, an all-reduce occupies 16 blocks (NVIDIA/nccl v2.30.7-1,
src/transport/nvls.cc, NVLS_NCHANNELS_SM90). Messages lie in ordinary memory, or in memory that NCCL has allocated and
registered.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from types import SimpleNamespace

import torch

from ddplab import models, run_ranks

from .device import nccl_version
from .pairs import arguments, parse, save

RANKS = 2
FLOAT32, SUM = 7, 0
"""NCCL's numbers of the data type and of the operation."""
WARM_UP = 3


class SharedGpu:
    """Ranks that share a GPU: a communicator, a stream and a message each.

    Raises:
        RuntimeError: NCCL failed; older versions refuse two ranks on one GPU.
    """

    def __init__(self, message_bytes: int, *, registered: bool) -> None:
        self._nccl = ctypes.CDLL("libnccl.so.2")  # the one that torch has loaded
        self._communicators = (ctypes.c_void_p * RANKS)()
        self._streams = [torch.cuda.Stream() for _ in range(RANKS)]
        self._call("ncclCommInitAll", self._communicators, RANKS, (ctypes.c_int * RANKS)(*[0] * RANKS))
        allocate = self._registered if registered else partial(torch.empty, device="cuda")
        self._messages = [allocate(message_bytes // 4).fill_(1) for _ in range(RANKS)]
        torch.cuda.synchronize()

    def all_reduce(self) -> torch.cuda.Event:
        """Start an all-reduce of all ranks; return an event after it."""
        self._call("ncclGroupStart")
        for communicator, stream, message in zip(self._communicators, self._streams, self._messages, strict=True):
            place, handle = ctypes.c_void_p(message.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
            count, handle_of = ctypes.c_size_t(message.numel()), ctypes.c_void_p(communicator)
            self._call("ncclAllReduce", place, place, count, FLOAT32, SUM, handle_of, handle)
        self._call("ncclGroupEnd")
        done = torch.cuda.Event(enable_timing=True)
        done.record(self._streams[0])
        return done

    def _registered(self, elements: int) -> torch.Tensor:
        """Return a tensor in memory that NCCL has allocated and registered; it is never freed."""
        place, size = ctypes.c_void_p(), ctypes.c_size_t(4 * elements)
        self._call("ncclMemAlloc", ctypes.byref(place), size)
        for communicator in self._communicators:
            handle = ctypes.c_void_p()
            self._call("ncclCommRegister", ctypes.c_void_p(communicator), place, size, ctypes.byref(handle))
        array = {"shape": (elements,), "typestr": "<f4", "data": (place.value, False), "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device="cuda")

    def sums(self) -> list[float]:
        """Return the first element of each rank's message."""
        torch.cuda.synchronize()
        return [float(message[0]) for message in self._messages]

    def _call(self, function: str, *values: object) -> None:
        if error := getattr(self._nccl, function)(*values):
            raise RuntimeError(f"{function}: NCCL's error {error}")


Times = dict[str, list[float]]
"""Milliseconds by round, of what `measure` times."""


def measure_all(
    _rank: int, _world_size: int, names: Sequence[str], message_bytes: int, rounds: int
) -> dict[str, Times]:
    """Time models beside all-reduces in ordinary memory, and the first one also beside some in registered memory."""
    found = {}
    for memory in ("ordinary", "registered"):
        shared = SharedGpu(message_bytes, registered=memory == "registered")
        shared.all_reduce()
        if shared.sums() != [float(RANKS)] * RANKS:
            raise RuntimeError(f"{memory} memory: expected sums of {RANKS}, got {shared.sums()}")
        for name in names if memory == "ordinary" else names[:1]:
            found[f"{name}, {memory}"] = measure(name, shared, rounds)
    return found


def measure(name: str, shared: SharedGpu, rounds: int) -> Times:
    """Time forward and backward passes and all-reduces, alone and at once."""
    module, loss_fn = models.build(name)

    def step() -> None:
        module.zero_grad()
        loss_fn(module).backward()

    for _ in range(WARM_UP):
        step()
    found: Times = {"step": [], "step_beside": [], "all_reduce": [], "all_reduce_beside": []}
    for _ in range(rounds):
        torch.cuda.synchronize()
        ends = [shared.all_reduce() for _ in range(6)]
        torch.cuda.synchronize()
        found["all_reduce"].append(ends[0].elapsed_time(ends[-1]) / (len(ends) - 1))
        found["step"].append(timed(step))
        ends = [shared.all_reduce() for _ in range(round(4 * found["step"][-1] / found["all_reduce"][-1]) + 4)]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        if end.elapsed_time(ends[-1]) < 0:
            raise RuntimeError("the all-reduces ended before the step")
        found["step_beside"].append(begin.elapsed_time(end))
        inside = [one for one in ends if begin.elapsed_time(one) > 0 and one.elapsed_time(end) > 0]
        if len(inside) > 1:
            found["all_reduce_beside"].append(inside[0].elapsed_time(inside[-1]) / (len(inside) - 1))
    return found


def timed(step: Callable[[], None]) -> float:
    """Milliseconds of a step that follows another."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def main() -> None:
    """Print one line for each model and number of blocks."""
    parser = arguments(__doc__, "resnet50-224", "bert-large", "llama-3.2-1b")
    parser.add_argument("--blocks", nargs="+", type=int, default=[16, 8, 32], help="thread blocks of all ranks")
    parser.add_argument("--message-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    options = parse(parser)
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" or (nccl_version() or ()) < (2, 30):
        sys.exit("expected NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1, so that two ranks may share a GPU")
    found: dict[str, Times] = {}
    print(f"{__doc__}\n{'model, memory':26} {'blocks':>6} {'step ms':>9} {'beside/alone':>12} {'quartiles':>13} GB/s")
    for blocks in options.blocks:
        os.environ["NCCL_MIN_CTAS"] = os.environ["NCCL_MAX_CTAS"] = str(blocks // RANKS)
        what = (options.models, options.message_mib << 20, options.rounds)
        (of_blocks,) = run_ranks(measure_all, 1, *what, backend="nccl", timeout_s=60)
        for name, times in of_blocks.items():
            found[f"{name}, {blocks} blocks"] = times
            ratios = [beside / alone for beside, alone in zip(times["step_beside"], times["step"], strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            rate = (options.message_mib << 20) / median(times["all_reduce"]) / 1e6
            row = f"{median(times['step']):9.2f} {middle:12.3f} {low:6.3f}-{high:.3f} {rate:4.0f}"
            print(f"{name:26} {blocks:6} {row}", flush=True)
        save(options.json, found)


if __name__ == "__main__":
    main()
