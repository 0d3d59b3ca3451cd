"""The discrete-event twin of `reference`: replays its traces under other buckets, networks and sizes."""

from .fabric import Fabric
from .prediction import Prediction, predict
from .spans import Span

__all__ = ["Fabric", "Prediction", "Span", "predict"]
