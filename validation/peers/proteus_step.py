"""One step in Proteus, in a process of its own; `proteus.py` starts it and has what Proteus models.

Its arguments are the settings of `simulated_ms`, as JSON, and folders to import from.
"""

import collections
import collections.abc
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from unittest.mock import MagicMock

SLOW_DOWN = 0.3


class Communicator:
    """Stands in for Proteus's binding to NCCL; its methods have the names and units that Proteus expects."""

    gb_per_s = inside_us = between_us = 0.0

    def __init__(self, groups: object, ranks: object, gpus: int, nodes: int, topology: object) -> None:
        """Keep the number of GPUs and of nodes."""
        self.gpus, self.nodes = gpus, nodes

    def allreduce(self, size_bytes: int) -> tuple[float, float]:
        """Return GB per second of the message, and microseconds of latency."""
        steps, between = 2 * (self.gpus - 1), 2 * (self.nodes - 1)
        latency_us = 8.4 + (steps - between) * self.inside_us + between * self.between_us
        if self.nodes > 1 and size_bytes >= self.gpus / 16 * 65536:
            latency_us *= 1.9
        return self.gb_per_s * self.gpus / steps, latency_us

    def get_graph_type_intra(self) -> int:
        """Return the kind of links in a node: NVLink."""
        return 1

    def get_graph_type_inter(self) -> int:
        """Return the kind of path to the network: through the host."""
        return 5

    def get_cross_node(self) -> bool:
        """Return whether there are several nodes."""
        return self.nodes > 1


def simulated_ms(
    *, blocks: Sequence[int], batch: int, nodes: int, gpus: int, bucket_mb: int, factor: float, **links: float
) -> float:
    """Simulate a step.

    Args:
        blocks: Bottleneck blocks of each stage of the ResNet.
        batch: Images for each GPU.
        nodes: Number of nodes.
        gpus: GPUs of each node.
        bucket_mb: Size of a bucket.
        factor: Multiple of the times of operators by Proteus's roofline of a V100.
        links: Attributes of `Communicator`.
    """
    binding = ModuleType("proteus.binding")
    binding.Communicator = type("Communicator", (Communicator,), links)  # type: ignore[attr-defined]
    sys.modules |= {
        "proteus.binding": binding,
        "torch": MagicMock(),
        "torch.nn": MagicMock(),
        "scipy.optimize": MagicMock(),
    }
    collections.Iterable = collections.abc.Iterable  # type: ignore[attr-defined]  # as until Python 3.9
    proteus, torchapi, resnet = map(import_module, ("proteus", "proteus.torchapi", "models.resnet"))
    costs = import_module("proteus.simulator.cost_model").OpCostModel
    simulator = import_module("proteus.simulator.simulator")

    world = nodes * gpus
    model = resnet.ResNet(resnet.Bottleneck, list(blocks))
    model.train()
    cluster = import_module("proteus.ir").Cluster("", n_node=nodes, n_gpu_per_node=gpus, n_cpu_per_node=0)
    graph, tree = proteus.compile(
        model,
        {"input": ((batch * world, 3, 224, 224),), "label": ((batch * world,),)},
        torchapi.nn.CrossEntropyLoss(),
        torchapi.optim.SGD(model.parameters(), lr=0.1),
    )
    tree.init_config(cluster.dev_topo, stride=2)
    mesh = cluster.dev_topo.create_mesh((world,))
    for part, pieces in ((tree.root, world), (tree.optimizer, 1)):  # data parallelism, whole optimiser on each GPU
        part.split(0, pieces)
        part.map(mesh)
    tree.schedule()
    tree.set_bucket_size(bucket_mb)
    graph.init_config(tree)
    tree.propagate(graph)
    graph.propagate({})
    graph.symmetric_forward_backward()
    by_roofline, gpu = costs.measure_op_cost, cluster.dev_topo.dev(0)
    costs.measure_op_cost = staticmethod(
        lambda operator, _, *args, **kwargs: factor * by_roofline(operator, gpu, *args, **kwargs)
    )
    return float(
        simulator.Simulator(
            graph, tree, cost_type="roofline", optimizer_overlap=False, share_bandwidth=True, overlap_factor=SLOW_DOWN
        ).run()
    )


if __name__ == "__main__":
    _, settings, *paths = sys.argv
    sys.path[:0] = paths
    print(simulated_ms(**json.loads(settings)))
