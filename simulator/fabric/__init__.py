"""What collectives and the processor cost."""

from .contention import Contention, Slowdowns, slowdowns_of
from .fabric import Fabric
from .level import Level
from .libraries import CONCURRENCY
from .processor import Linear, Processor
from .segments import Segment
from .sharing import Sharing
from .tables import Timing
from .topology import Topology
from .topology_file import LevelEntry, TopologyFile, load_topology, save_topology

__all__ = [
    "CONCURRENCY",
    "Contention",
    "Fabric",
    "Level",
    "LevelEntry",
    "Linear",
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
]
