"""Memory of training steps on a GPU: what is there before a step, and the peak, by model, batch size and wrapper.

Bytes of tensors (`allocated`) are those of torch's caching allocator; `reserved` is what the allocator holds, with
fragments; `used` is what the device reports, with CUDA's context, libraries and NCCL.
"""

import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import nn

from ddplab import models
from reference.data_parallel import DistributedDataParallel
from reference.launch import RankPool, rank_device

from .pairs import arguments, parse, save

STEPS = 4
"""The optimiser allocates its states in the first step, and the buckets are rebuilt before the second."""
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
) -> dict[str, int]:
    """Train a few steps, and return bytes: see the description of this file.

    Without a batch size, the model has its own. With precision bf16, forward passes run under
    autocast.
    """
    torch.manual_seed(0)
    gc.collect()  # wrapper and optimiser of an earlier call are in cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    make: Any = models.resolve(name)
    device = rank_device()
    found = {"used at the start": _used(device)}
    with device:
        module, loss_fn = make() if batch is None else make(batch=batch)
    found["parameters"] = sum(parameter.nbytes for parameter in module.parameters())
    found["buffers"] = sum(buffer.nbytes for buffer in module.buffers())
    found["allocated, module and batch"] = _allocated(device)
    wrapped = WRAPPERS[wrapper](module)
    found["allocated, wrapped"] = _allocated(device)
    optimizer_of = OPTIMIZERS[optimizer](module.parameters(), lr=1e-4)
    for step in range(STEPS):
        if step == STEPS - 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found["allocated, between steps"] = _allocated(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_fn(wrapped)
        found["allocated, after forward"] = _allocated(device)
        loss.backward()
        found["allocated, after backward"] = _allocated(device)
        del loss
        optimizer_of.step()
        optimizer_of.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["peak allocated"] = torch.cuda.max_memory_allocated()
        found["peak reserved"] = torch.cuda.max_memory_reserved()
        found["used"] = _used(device)
    return found


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _used(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    """Print one line for each model, batch size, precision, optimiser and wrapper; all in one process."""
    parser = arguments(__doc__, "resnet50-224", "bert-large", "gpt2", "vit-b-16")
    parser.add_argument("--batches", nargs="+", type=int, help="batch sizes (default: that of the model)")
    parser.add_argument("--wrappers", nargs="+", default=list(WRAPPERS), choices=WRAPPERS)
    parser.add_argument("--optimizers", nargs="+", default=["sgd"], choices=OPTIMIZERS)
    parser.add_argument("--autocast", action="store_true", help="run forward passes in bfloat16")
    options = parse(parser)
    precision = "bf16" if options.autocast else "fp32"
    rows: dict[str, dict[str, int]] = {}
    print(__doc__)
    each = product(options.models, options.batches or [None], options.optimizers, options.wrappers)
    with RankPool(1, backend=options.backend) as pool:
        for model, batch, optimizer, wrapper in each:
            (found,) = pool.run(measure, model, batch, wrapper, optimizer, precision)
            name = f"{model}, batch {batch}, {precision}, {optimizer}, {wrapper}"
            rows[name] = found
            save(options.json, rows)
            print(f"{name:50} {found.get('peak allocated', 0) / 1e6:10,.0f} MB", flush=True)


if __name__ == "__main__":
    main()
