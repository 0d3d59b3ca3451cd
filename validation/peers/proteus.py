"""Proteus (Duan and others, arXiv 2306.02267): https://github.com/JF-D/Proteus, no licence stated.

What it models of DDP: operators, buckets of whole tensors up to a size (the first of 1 MB), one queue of all-reduces,
an optimiser after the last of them, 2 us between operators, bandwidth that collectives share, and a slow-down by 0.3,
the value of its examples, both of a computation beside an all-reduce and of an all-reduce beside computation. It has
no copies and no broadcasts of buffers.

What we gave it: its own ResNet and its own strategy for data parallelism. It measures operators on a GPU; instead we
take its roofline of a V100 and scale all operators so that its step on one GPU is the known one. For the latency and
the rate of a ring, it asks NCCL's tuning model through a binding that needs NVIDIA's compiler; the `Communicator` of
`proteus_step.py` stands in for it and answers from the row's links.

It takes ResNet-50, 101 and 152 under torch's rule for buckets. Its transformers are Megatron's and its other models
are on no row. Each row runs in a process and a folder of its own, because Proteus keeps tasks in globals and operator
costs in `cache.json`. torch is left out of that process; Proteus would only measure operators with it.
"""

import json
import sys
from functools import cache
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..board import Row
from . import PEERS, checkout, run
from .buckets_and_links import NO_LINKS, PARTS, links_of

URL = "https://github.com/JF-D/Proteus"
REVISION = "3db1b5df640ec4b1c91572fdbb9e48548488f846"
PACKAGES = ("toposort==1.10", "graphviz==0.21")
BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}
"""Bottleneck blocks of each stage."""
DEFAULT_BUCKET_MB = 25
SETTINGS = {"bucket_cap_mb", "broadcast_buffers"}
USUAL_BATCH = 32
LIMIT_S = 600
STEP = Path(__file__).with_name("proteus_step.py")


def method(row: Row) -> float:
    """Return the predicted milliseconds of an iteration; no interval.

    Raises:
        ValueError: Proteus has no such model, or no such buckets.
        RuntimeError: Proteus cannot be fetched, or fails on the row.
    """
    name = (row.model or "").rpartition(":")[2]
    blocks = BLOCKS.get(name.partition("_batch_")[0])
    if row.part not in PARTS:
        raise ValueError(NO_LINKS)
    if blocks is None:
        raise ValueError("another model than its ResNets")
    if set(row.settings) - SETTINGS:
        raise ValueError("buckets by another rule than torch's")
    links, batch = links_of(row), row.load_trace().workload.batch or USUAL_BATCH
    fixed_ms, scaled_ms = _alone_ms(blocks, batch)
    return simulated_ms(
        blocks=blocks,
        batch=batch,
        nodes=links.nodes,
        gpus=links.gpus,
        bucket_mb=ceil(row.settings.get("bucket_cap_mb") or DEFAULT_BUCKET_MB),
        factor=(row.known_ms - fixed_ms) / scaled_ms,
        gb_per_s=min(links.inside, links.between or links.inside) / 1e9,
        inside_us=links.inside_s * 1e6,
        between_us=links.between_s * 1e6,
    )


@cache
def _alone_ms(blocks: tuple[int, ...], batch: int) -> tuple[float, float]:
    """Return the milliseconds of a step on one GPU that do not grow with the times of operators, and the others."""
    alone = {"blocks": blocks, "batch": batch, "nodes": 1, "gpus": 1, "bucket_mb": DEFAULT_BUCKET_MB}
    once, twice = (simulated_ms(**alone, factor=factor) for factor in (1, 2))
    return 2 * once - twice, twice - once


def simulated_ms(**settings: Any) -> float:
    """Run `proteus_step.py` in a process of its own; return the milliseconds of Proteus's step."""
    sources, packages = _prepared()
    with TemporaryDirectory() as folder:
        (Path(folder) / "log").mkdir()
        paths = [str(sources), str(sources / "examples"), str(packages)]
        command = (sys.executable, str(STEP), json.dumps(settings), *paths)
        return float(run(*command, cwd=Path(folder), limit_s=LIMIT_S).split()[-1])


@cache
def _prepared() -> tuple[Path, Path]:
    """Fetch Proteus and the packages that it needs, once; return both folders."""
    sources, packages = checkout(URL, REVISION, "proteus"), PEERS / "proteus_packages"
    if not packages.exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), *PACKAGES, cwd=PEERS)
    return sources, packages
