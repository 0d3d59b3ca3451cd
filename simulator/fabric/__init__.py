"""What collectives and the processor cost."""

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
    "Fabric",
    "Level",
    "LevelEntry",
    "Linear",
    "Processor",
    "Segment",
    "Sharing",
    "Timing",
    "Topology",
    "TopologyFile",
    "load_topology",
    "save_topology",
]
