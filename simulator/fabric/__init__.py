"""Costs of collectives on a network, and the processor costs of running them."""

from .algorithms import CONCURRENCY as CONCURRENCY
from .fabric import Fabric as Fabric
from .link_sharing import LinkShare as LinkShare
from .link_sharing import Sharing as Sharing
from .measured_tables import Segment as Segment
from .measured_tables import Timing as Timing
from .processor_costs import Linear as Linear
from .processor_costs import Processor as Processor
from .topology import Level as Level
from .topology import LevelEntry as LevelEntry
from .topology import Topology as Topology
from .topology import TopologyFile as TopologyFile
from .topology import topology_of as topology_of
