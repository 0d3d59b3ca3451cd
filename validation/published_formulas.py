"""Formulas of other projects for the iteration, from two baselines: computation alone, and without any overlap.

- *Calculon*: Isaev et al., "Calculon: a methodology and tool for high-level co-design of systems and large language
  models", SC'23; calculon/llm/llm.py of calculon-ai/calculon at caa4b11. A model is equal blocks. The all-reduce of
  the last block is exposed; those of the others as far as they take longer than the backward pass of the others.
  Where they are hidden, they slow the computation by the part of the processor that they use.
- *Primus*: "performance projection" of AMD-AGI/Primus at fd1eeabb (primus/core/projection/performance_projection).
  All-reduces are exposed as far as they take longer than the computation, and at least to a fifth. (An earlier
  version had no such fifth: overlapped all-reduces were free, which is *perfect scaling* here.)

Both take the sum of the all-reduces, which is what *no overlap* adds to computation.
"""

from .comparison import Comparison

BLOCKS = 16
"""Blocks of a model: ResNet-50, the model of most rows, has 16 residual ones; a transformer has 12 to 48."""
BACKWARD = 2 / 3
"""Part of the backward pass in computation: Calculon's gradients of inputs and weights cost a forward pass each."""
PROCESSOR_USAGE = 0.15, 0.02
"""Part of the processor that an all-reduce uses, on one node and on several (systems/a100_80g.json)."""
PRIMUS_EXPOSED = 0.2


def calculon_ns(alone_ns: float, all_reduces_ns: float, *, several_nodes: bool = False) -> float:
    """Return the iteration by Calculon's formula with one pipeline stage and an optimiser that is not sharded."""
    last_ns = all_reduces_ns / BLOCKS
    others_ns, window_ns = all_reduces_ns - last_ns, BACKWARD * alone_ns * (1 - 1 / BLOCKS)
    exposed_ns = others_ns - window_ns
    return alone_ns + last_ns + (exposed_ns if exposed_ns > 0 else PROCESSOR_USAGE[several_nodes] * others_ns)


def primus_ns(alone_ns: float, all_reduces_ns: float) -> float:
    """Return the iteration by Primus' formula with one micro-batch and an optimiser that is not sharded."""
    return alone_ns + max(PRIMUS_EXPOSED * all_reduces_ns, all_reduces_ns - alone_ns)


FORMULAS = "Calculon", "Primus"


def formula_error(name: str, row: Comparison) -> float:
    """Return predicted / measured - 1 by the formula of this name, from the baselines of a row of the score."""
    alone_ns = row.baselines_ns["perfect scaling"]
    all_reduces_ns = max(0.0, row.baselines_ns["no overlap"] - alone_ns)
    if name == "Calculon":
        return calculon_ns(alone_ns, all_reduces_ns, several_nodes=row.several_nodes) / row.measured_ns - 1
    return primus_ns(alone_ns, all_reduces_ns) / row.measured_ns - 1
