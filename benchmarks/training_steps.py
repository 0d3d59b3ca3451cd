"""Time and memory of training steps on a GPU: by model, batch size, precision, optimiser and wrapper.

Memory is what is there before a step, and the peak. Bytes of tensors (`allocated`) are those of torch's caching
allocator; `reserved` is what the allocator holds, with fragments; `used` is what the device reports, with CUDA's
context, libraries and NCCL. Times are those between events of the GPU, whose host may be behind it.
"""

import gc
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import nn

from ddplab import DistributedDataParallel, RankPool, models
from ddplab.reference.launch import rank_device

from .pairs import arguments, parse, save, time_once

STEPS = 4
"""The optimiser allocates its states in the first step, and the buckets are rebuilt before the second."""
TIMED_STEPS = 8
PRECISIONS = "fp32", "tf32", "bf16", "weights"
"""Of products and convolutions: float32 without or with tensor cores, bfloat16 by autocast, that of the weights."""
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "module": lambda module: module,
    "torch": nn.parallel.DistributedDataParallel,
    "torch, views": lambda module: nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True),
    "ours": DistributedDataParallel,
    "ours, views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def measure(
    _rank: int, _world_size: int, name: str, batch: int | None, wrapper: str, optimizer: str, precision: str
) -> dict[str, Any]:
    """Train a few steps, and return bytes and milliseconds: see the description of this file.

    Without a batch size, the model has its own. A step for which memory does not suffice has `out of memory`.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    gc.collect()  # wrapper and optimiser of an earlier call are in cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    make: Any = models.resolve(name)
    device = rank_device()
    found: dict[str, Any] = {"used at the start": _used(device)}
    try:
        with device:
            module, loss_fn = make() if batch is None else make(batch=batch)
        found |= _train(module, loss_fn, wrapper, optimizer, precision)
    except torch.OutOfMemoryError:
        found["out of memory"] = True
    return found


def _train(module: nn.Module, loss_fn: models.Loss, wrapper: str, optimizer: str, precision: str) -> dict[str, Any]:
    device = rank_device()
    found: dict[str, Any] = {
        "batch": getattr(loss_fn, "batch", None),
        "parameters": sum(parameter.nbytes for parameter in module.parameters()),
        "buffers": sum(buffer.nbytes for buffer in module.buffers()),
        "allocated, module and batch": _allocated(device),
    }
    wrapped = WRAPPERS[wrapper](module)
    found["allocated, wrapped"] = _allocated(device)
    optimizer_of = OPTIMIZERS[optimizer](module.parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_fn(wrapped)
        found["allocated, after forward"] = _allocated(device)
        loss.backward()
        found["allocated, after backward"] = _allocated(device)
        del loss
        optimizer_of.step()
        optimizer_of.zero_grad()

    for number in range(STEPS):
        if number == STEPS - 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found["allocated, between steps"] = _allocated(device)
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["peak allocated"] = torch.cuda.max_memory_allocated()
        found["peak reserved"] = torch.cuda.max_memory_reserved()
        found["used"] = _used(device)
    found["milliseconds"] = [1e3 * time_once(step) for _ in range(TIMED_STEPS)]
    return found


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _used(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    parser = arguments(
        f"{__doc__}\nMODEL@64 has a batch of 64, other models their own.",
        "resnet50-224",
        "bert-large",
        "gpt2",
        "vit-b-16",
    )
    parser.add_argument("--wrappers", nargs="+", default=list(WRAPPERS), choices=WRAPPERS)
    parser.add_argument("--optimizers", nargs="+", default=["sgd"], choices=OPTIMIZERS)
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=PRECISIONS)
    return parser


def cases(options: Namespace) -> Iterator[tuple[Any, ...]]:
    """Yield model, batch size (None: its own), precision, optimiser and wrapper of each training."""
    for named, *settings in product(options.models, options.precisions, options.optimizers, options.wrappers):
        model, _, batch = named.partition("@")
        yield model, int(batch) if batch else None, *settings


def main() -> None:
    """Print one line for each of the `cases`; all in one process."""
    options = parse(parser())
    rows: dict[str, dict[str, Any]] = {}
    print(__doc__)
    with RankPool(1, backend=options.backend) as pool:
        for model, batch, precision, optimizer, wrapper in cases(options):
            (found,) = pool.run(measure, model, batch, wrapper, optimizer, precision)
            name = f"{model}, batch {batch or found.get('batch')}, {precision}, {optimizer}, {wrapper}"
            rows[name] = found
            save(options.json, rows)
            ms, megabytes = median(found.get("milliseconds", [0])), found.get("peak allocated", 0) / 1e6
            print(f"{name:50} {ms:10.2f} ms {megabytes:10,.0f} MB", flush=True)


if __name__ == "__main__":
    main()
