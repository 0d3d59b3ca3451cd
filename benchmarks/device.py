"""The device of this machine: versions, clocks, and the rates of its memory and of matrix products by precision."""

import ctypes
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddplab import RankPool
from ddplab.calibration.device_rates import measure_device
from ddplab.calibration.repeated_timing import time_ns
from ddplab.reference.errors import Error

from .pairs import arguments, parse, save

SMI = (
    "name,driver_version,vbios_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,"
    "temperature.gpu,ecc.mode.current,mig.mode.current,pcie.link.gen.current,pcie.link.width.current"
)
"""What nvidia-smi is asked for."""
PACKAGES = ("torch", "numpy", "pydantic", "msgspec", "typer", "pytest", "hypothesis")
PRECISIONS = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
    "float64": (torch.float64, "highest"),
}
"""Type of the elements, and torch's precision of products of float32 matrices."""
REFUSAL_S = 60.0


def nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL that torch has loaded, which may not be the one that it was built with."""
    if not dist.is_nccl_available():
        return None
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def versions() -> dict[str, Any]:
    """Return versions, and what the driver reports of the GPU; None: not there."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": nccl_version(),
        "nvidia_smi": None,
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        fields = ("name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size")
        found["gpu"] = {field: getattr(properties, field, None) for field in fields}
        found["gpu"]["count"] = torch.cuda.device_count()
        command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"]
        try:
            found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found["nvidia_smi"] = f"{type(error).__name__}: {error}"
    return found


def all_reduce_once(_rank: int, _world_size: int) -> float:
    """Sum a one from each rank."""
    ones = torch.ones(1, device="cuda")
    dist.all_reduce(ones)
    return float(ones)


def allocates_for_nccl(_rank: int, _world_size: int) -> bool:
    """Return whether torch's NCCL group allocates memory itself, for buckets that NCCL has registered."""
    group: Any = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda", torch.cuda.current_device())
    return bool(group._get_backend(device).supports_tensor_alloc(device))


GRADIENT_BYTES = [1 << 10, 1 << 16, 1 << 20, 1 << 23]
COPIES = 100


def copies_of_torch(_rank: int, _world_size: int) -> dict[str, dict[int, list[float]]]:
    """Return nanoseconds a gradient, by its bytes, of the kernels with which torch's class packs and empties buckets.

    It has one for each gradient: a product into the bucket, and a copy out of it.
    """
    found: dict[str, dict[int, list[float]]] = {"pack": {}, "copy_out": {}}
    for size in GRADIENT_BYTES:
        pairs = [[torch.randn(size // 4, device="cuda") for _ in range(2)] for _ in range(COPIES)]
        for name, action in (("pack", _pack), ("copy_out", _copy_out)):
            found[name][size] = [time_ns(action, pairs) / COPIES for _ in range(6)][1:]
    return found


def _pack(pairs: Sequence[Sequence[torch.Tensor]]) -> None:
    for gradient, view in pairs:
        torch.mul(gradient, 0.5, out=view)


def _copy_out(pairs: Sequence[Sequence[torch.Tensor]]) -> None:
    for gradient, view in pairs:
        gradient.copy_(view)


def attempt(body: Callable[..., Any], world_size: int) -> Any:
    """Run ranks with NCCL; return what the first of them returned, or the last line of its error."""
    with RankPool(world_size, backend="nccl", timeout_s=REFUSAL_S) as pool:
        try:
            return pool.run(body)[0]
        except (Error, RuntimeError) as error:
            return str(error).strip().splitlines()[-1]


def main() -> None:
    """Print and write what was found; each value is written as soon as it is known."""
    options = parse(arguments(__doc__))
    found: dict[str, Any] = {"versions": versions()}
    save(options.json, found)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{found['versions']}\n\n{'precision':12} {'TFLOP/s':>10} {'GB/s':>10}")
    for name, (dtype, precision) in PRECISIONS.items():
        if device.type == "cpu" and dtype != torch.float32:
            continue
        torch.set_float32_matmul_precision(precision)
        rates = measure_device(device=device, dtype=dtype)
        found[name] = rates.model_dump(mode="json")
        save(options.json, found)
        row = f"{rates.flops_per_s / 1e12:10.1f} {rates.bytes_per_s / 1e9:10.1f}"
        print(f"{name:12} {row}", flush=True)
    found["nccl_with_two_ranks"] = attempt(all_reduce_once, 2)  # which share a GPU if there is one only
    found["allocates_for_nccl"] = attempt(allocates_for_nccl, options.world_size)
    save(options.json, found)
    found["copies_of_torch"] = attempt(copies_of_torch, 1)
    save(options.json, found)
    for name in ("nccl_with_two_ranks", "allocates_for_nccl", "copies_of_torch"):
        print(f"\n{name}: {str(found[name])[:1000]}")


if __name__ == "__main__":
    main()
