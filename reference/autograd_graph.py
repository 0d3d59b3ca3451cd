"""The autograd graph: the nodes that accumulate gradients, and which of them a backward pass can reach."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed.rpc
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge


def accumulators(parameters: Sequence[nn.Parameter]) -> list[Node]:
    """The autograd node that accumulates each parameter's gradient; the caller must keep the nodes alive.

    Raises:
        TypeError: A parameter is not a leaf of autograd's graph, so nothing accumulates its gradient.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a subclass of Tensor may put nodes of its own in between
        nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    for index, (parameter, node) in enumerate(zip(parameters, nodes, strict=True)):
        if node.name() != "torch::autograd::AccumulateGrad":
            raise TypeError(
                f"expected autograd to accumulate the gradient of parameter {index} ({type(parameter).__name__}, "
                f"shape {tuple(parameter.shape)}), got the node {node.name()}. Wrap a module whose parameters are "
                "leaves of autograd's graph"
            )
    return nodes


def distributed_autograd_runs() -> bool:
    """Whether a context of `torch.distributed.autograd` is open in this thread, or a backward pass of it runs."""
    rpc: Any = torch.distributed.rpc
    if not (rpc.is_available() and rpc._is_current_rpc_agent_set()):
        return False
    autograd = torch._C._distributed_autograd
    try:
        return autograd._current_context() is not None
    except RuntimeError:  # no context is open, or only in another thread
        return int(autograd._get_debug_info()["num_current_backward_passes"]) > 0


def reachable(outputs: Iterable[Tensor], indices: dict[Node, int]) -> frozenset[int]:
    """Indices of the parameters that a backward pass from `outputs` can reach; `indices` are by accumulating node."""
    found = set()
    seen: set[Node] = set()
    pending = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in indices:
            found.add(indices[node])
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return frozenset(found)
