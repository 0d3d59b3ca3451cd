"""Costs of collectives on a network, and the processor costs of running them."""

from .algorithms import CONCURRENCY
from .contention import Contention, LinkShare, Sharing, Slowdowns, slowdowns_of
from .fabric import Fabric
from .measured_tables import Segment, Timing
from .processor import Linear, Processor
from .topology import Level, LevelEntry, Topology, TopologyFile, load_topology, save_topology, topology_of

__all__ = [
    "CONCURRENCY",
    "Contention",
    "Fabric",
    "Level",
    "LevelEntry",
    "Linear",
    "LinkShare",
    "Processor",
    "Segment",
    "Sharing",
    "Slowdowns",
    "Timing",
    "Topology",
    "TopologyFile",
    "load_topology",
    "save_topology",
    "slowdowns_of",
    "topology_of",
]
