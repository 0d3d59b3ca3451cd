"""Costs of collectives on a network, and the processor costs of running them."""

from .algorithms import CONCURRENCY
from .fabric import Fabric
from .link_sharing import LinkShare, Sharing
from .measured_tables import Segment, Timing
from .processor_costs import Linear, Processor
from .topology import Level, LevelEntry, Topology, TopologyFile, topology_of

__all__ = [
    "CONCURRENCY",
    "Fabric",
    "Level",
    "LevelEntry",
    "Linear",
    "LinkShare",
    "Processor",
    "Segment",
    "Sharing",
    "Timing",
    "Topology",
    "TopologyFile",
    "topology_of",
]
