"""What collectives and the processor cost."""

from .fabric import CONCURRENCY, AlphaBeta, Fabric, Sharing, Timing
from .processor import Linear, Processor

__all__ = ["CONCURRENCY", "AlphaBeta", "Fabric", "Linear", "Processor", "Sharing", "Timing"]
