"""Calculon (Isaev et al., SC'23): https://github.com/calculon-ai/calculon, Apache-2.0.

What it models: a transformer of equal blocks by its operations and its accesses to memory. In data parallelism the
gradients of each block are one all-reduce, hidden by the backward pass of the other blocks except for their accesses
to memory; the last one is exposed; a hidden all-reduce takes a part of the processor. It has no embeddings (neither
their computation nor their gradients: 24 of BERT-Base's 110 million parameters), no buckets and no broadcasts.

What we gave it, the three files of its command `llm`:

- Application: width, heads, blocks, sequence. Execution: data parallelism alone, one micro-batch, overlap, no sharded
  optimiser, float32, because DDP all-reduces gradients in float32.
- System: its authors' A100 (`a100_80g.json`, at the rates for 16 bits) made slower or faster: one factor on the rates
  of the matrix unit, the vector unit and the memory, such that its computation on one GPU (forward, backward,
  optimiser) equals the known step. So it keeps its authors' ratio of operations to accesses to memory, on which the
  overlap depends. Memory is so large that everything fits, as it did in training.
- Networks: rates and latencies of the row. A rank's rate in a ring over several nodes is that of all adapters of a
  node together, of which Calculon uses 90 %, as its authors have it; rates inside a node are measured or reduced
  already. A hidden all-reduce takes 15 % of the processor inside a node and 2 % between nodes, as its authors have
  it.

Its efficiencies are those of its authors for A100s; none was fitted to these rows.

It takes the rows of transformers of equal blocks with two matrices in a feed-forward layer: BERT, ViT, GPT-2 and
Anemoi's size, 34 of 334. It cannot take convolutional networks and Transformer-XL, whose attention reaches over a
memory (182 rows), CS336's XL with SwiGLU (16), and the parts (f), (g) and (h), which have no links between GPUs
(102).
"""

import json
import logging
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..board import Row
from . import checkout
from .buckets_and_links import Links, links_of
from .transformers import Transformer, transformer_of

URL = "https://github.com/calculon-ai/calculon"
REVISION = "caa4b11f8fe1fee3ba57adaacb7590d7deabd053"
RING = {"p2p": [1.0, None], "reduce_scatter": [1.0, -1], "all_gather": [1.0, -1], "all_reduce": [2.0, -1]}
"""Factors on the bytes of a collective, and on its bytes divided by the ranks: a ring, as NCCL has it."""
SWITCHES = (
    *("fused_activation", "optimizer_sharding", "seq_par_ag_redo"),
    *("weight_offload", "activations_offload", "optimizer_offload"),
)
"""Features of an execution that DDP does not have."""


def method(row: Row) -> float:
    """Return the predicted milliseconds of an iteration, without an interval.

    Raises:
        ValueError: Calculon cannot take the row.
        RuntimeError: Calculon cannot be fetched.
    """
    shape = transformer_of(row)
    if shape.gated:
        raise ValueError("three matrices in a feed-forward layer")
    links = links_of(row)
    given = _run(shape, links, 1.0)
    speed = (given["fw_time"] + given["bw_time"] + given["optim_step_time"]) / (row.known_ms / 1000)
    return float(_run(shape, links, speed)["total_time"]) * 1000


def application(shape: Transformer) -> dict[str, int]:
    """Return the content of the application's file."""
    return {
        "hidden": shape.hidden,
        "feedforward": shape.inner,
        "seq_size": shape.sequence,
        "attn_heads": shape.heads,
        "attn_size": shape.hidden // shape.heads,
        "num_blocks": shape.blocks,
    }


def execution(shape: Transformer, links: Links) -> dict[str, Any]:
    """Return the content of the execution's file."""
    gpus, network = links.nodes * links.gpus, int(links.nodes > 1)
    off = dict.fromkeys(SWITCHES, False)
    return off | {
        "num_procs": gpus,
        "tensor_par": 1,
        "pipeline_par": 1,
        "data_par": gpus,
        "tensor_par_net": 0,
        "pipeline_par_net": 1 - network,
        "data_par_net": network,
        "batch_size": shape.batch * gpus,
        "microbatch_size": shape.batch,
        "datatype": "float32",
        "attention_type": "multihead",
        "activation_recompute": "none",
        "pipeline_interleaving": 1,
        "tensor_par_comm_type": "ar",
        "tensor_par_overlap": "none",
        "data_par_overlap": True,
        "training": True,
    }


def system(given: dict[str, Any], speed: float, links: Links) -> dict[str, Any]:
    """Return the content of the system's file: another system with our links.

    Args:
        given: A system of Calculon's authors, with a network inside a node and one between nodes.
        speed: Factor on the rates of its processor and memory.
        links: The links.
    """
    units = {}
    for unit in ("matrix", "vector"):
        sheet = given[unit]["float16"]
        units[unit] = {"float32": sheet | {"tflops": sheet["tflops"] * speed}}
    memory = given["mem1"] | {"GBps": given["mem1"]["GBps"] * speed, "GiB": 100_000}
    inside, between = given["networks"]
    inside |= {"bandwidth": links.inside / 1e9, "latency": links.inside_s, "size": links.gpus}
    inside |= {"efficiency": 1.0, "ops": RING}
    between |= {"bandwidth": (links.between or links.inside) / 1e9, "latency": links.between_s, "ops": RING}
    return given | units | {"mem1": memory, "networks": [inside, between]}


def _run(shape: Transformer, links: Links, speed: float) -> dict[str, Any]:
    """Return Calculon's statistics, as its command `llm` computes them from the three files."""
    calculon, sources = _prepared()
    given = json.loads((sources / "systems" / "a100_80g.json").read_text())
    llm = calculon.Llm
    model = llm(llm.Application(application(shape)), logging.getLogger("calculon"))
    model.compile(calculon.System(system(given, speed, links)), llm.Execution.from_json(execution(shape, links)))
    model.run(model.sys)
    stats: dict[str, Any] = model.get_stats_json(include_layers=False)
    return stats


@cache
def _prepared() -> tuple[Any, Path]:
    """Fetch Calculon once; return its package, in which importing takes most of the time, and its sources."""
    sources = checkout(URL, REVISION, "calculon")
    sys.path.append(str(sources))
    return import_module("calculon"), sources
