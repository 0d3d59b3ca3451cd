"""Primus' performance projection: https://github.com/AMD-AGI/Primus, MIT.

What it models: training of a language model by Megatron from the measured times of its layers. In data parallelism
all gradients are one all-reduce in 32 bits, priced by Primus' own model of RCCL (the cheapest of five algorithms with
four protocols); the whole computation hides it, except for a fifth, which is always exposed. A block has 4 h^2
parameters of attention and three matrices in the feed-forward layers, whatever the model has, and embeddings do not
count, so BERT-Base sends 432 MiB in place of 415. It has no buckets, no slow-down beside communication, no
broadcasts.

What we gave it, for its command `projection performance`:

- `--load-benchmark`: one layer of the model and the optimiser's step, so that it needs no GPU. Our trace divides the
  known step into the two passes and the optimiser; their sum is the known step.
- `--hardware-config`: rates and latencies of the row, the rest by Primus' defaults. It uses 70 % of all rates; that
  inside a node is a bus bandwidth already, so we divide it by 0.7. Each GPU has an adapter of its own, with its share
  of the node's rate, and `switch_topology` is false, as in all hardware files of its authors: only then do all
  adapters together have the node's rate. With one adapter a node and the default, true, each GPU's part of the
  gradients has the whole adapter for itself, and BERT-Base on 16 GPUs (batch 32) takes 269 ms in place of 278, 342
  measured.

Its constants were calibrated on AMD's MI325X; none was fitted to these rows. Nearly all seconds of a row are the
start of its command, which imports torch.

It takes the rows of transformers of equal blocks: BERT, ViT, GPT-2, Anemoi's size and CS336's XL, 50 of 334. It
cannot take convolutional networks and Transformer-XL, whose attention reaches over a memory (182 rows), and the parts
(f), (g) and (h), which have no links between GPUs (102).
"""

import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..board import Row
from . import checkout, run
from .buckets_and_links import Computation, Links, computation_of, links_of
from .transformers import Transformer, transformer_of

URL = "https://github.com/AMD-AGI/Primus"
REVISION = "fd1eeabbad15135e3702094087e96142b4b4eacb"
EFFICIENCY = 0.7
"""Part of all rates that collectives reach: Primus' `bw_eff`."""


def method(row: Row) -> float:
    """Return the predicted milliseconds of an iteration, without an interval.

    Raises:
        ValueError: Primus cannot take the row.
        RuntimeError: Primus cannot be fetched, or fails on the row.
    """
    shape = transformer_of(row)
    links = links_of(row)
    files = {
        "experiment.yaml": experiment(shape, links),
        "benchmark.json": benchmark(computation_of(row), shape.blocks),
        "hardware.yaml": hardware(links),
    }
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content))  # YAML contains JSON
        words = ["projection", "performance", "--config", "experiment.yaml", "--load-benchmark", "benchmark.json"]
        words += ["--hardware-config", "hardware.yaml", "--target-nodes", str(links.nodes)]
        sources = _prepared()
        env = {**os.environ, "PYTHONPATH": str(sources), "GPUS_PER_NODE": str(links.gpus)}
        program = str(sources / "primus" / "cli" / "main.py")
        return iteration_ms(run(sys.executable, program, *words, cwd=Path(folder), env=env, limit_s=120))


def experiment(shape: Transformer, links: Links) -> dict[str, Any]:
    """Return the content of the experiment's file: the model and data parallelism alone."""
    overrides = {
        "num_layers": shape.blocks,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.inner,
        "num_attention_heads": shape.heads,
        "padded_vocab_size": shape.vocabulary or 1000,
        "swiglu": shape.gated,
        "seq_length": shape.sequence,
        "max_position_embeddings": shape.sequence,
        "micro_batch_size": shape.batch,
        "global_batch_size": shape.batch * links.nodes * links.gpus,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": True,
    }
    trainer = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": "language_model.yaml",
        "overrides": overrides,
    }
    names = {"work_group": "none", "user_name": "none", "exp_name": "row", "workspace": "./output"}
    return names | {"modules": {"pre_trainer": trainer}}


def benchmark(computation: Computation, blocks: int) -> dict[str, Any]:
    """Return the content of a benchmark's file: milliseconds of one of the blocks and of the optimiser's step."""
    forward_ns, optimizer_ns = computation.forward_ns, computation.end_ns - computation.backward_ns
    block = {
        "type": "dense",
        "forward_time_ms": forward_ns / blocks / 1e6,
        "backward_time_ms": (computation.backward_ns - forward_ns) / blocks / 1e6,
    }
    results = {"0": block, "_optimizer_benchmark": {"step_time_ms": optimizer_ns / 1e6}}
    return {"schema_version": 2, "metadata": {}, "profiling_results": results, "memory_results": None}


def hardware(links: Links) -> dict[str, Any]:
    """Return the content of the hardware's file, in 10^9 bytes per second and microseconds."""
    share = (links.between or links.inside) / links.gpus
    return {
        "hardware_config": {
            "node_bw": links.inside / 1e9 / EFFICIENCY,
            "node_lat": links.inside_s * 1e6,
            "pod_bw": share / 1e9,
            "pod_lat": links.between_s * 1e6,
            "bw_eff": EFFICIENCY,
            "nics_per_node": links.gpus,
            "switch_topology": False,
        }
    }


def iteration_ms(printed: str) -> float:
    """Return milliseconds of the iteration from the command's output."""
    found = re.findall(r"Iteration Time: ([\d.]+) ms", printed)
    if not found:
        raise RuntimeError(f"Primus: expected an iteration time, got {printed.strip()[-200:]}")
    return float(found[-1])


@cache
def _prepared() -> Path:
    return checkout(URL, REVISION, "primus", paths=["/primus/", "/LICENSE"])
