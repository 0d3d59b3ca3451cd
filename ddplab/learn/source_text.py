"""Text that a learner begins with: a file with an empty class, and gaps in the cells of notebooks."""

from pathlib import Path

from reference.files.writing import write_atomically

TUTOR = Path(__file__).with_name("tutor.md")
"""Rules for an AI assistant that helps a learner."""
CLASS = "MyDDP"
"""Name of the learner's class."""
TO_WRITE = "...  # your code"
"""Stands in a cell for the part that the learner writes."""
SKELETON = f'''"""My reducer. `ddplab learn` names the next rung; `ddplab learn --hint` helps."""

import torch
import torch.distributed as dist
from torch import nn


class {CLASS}(nn.Module):
    """Wraps a module; on every rank, each gradient shall become the average over all ranks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def average_gradients(self) -> None:
        """Called by the script after each backward pass, until rung 4."""
'''


def write_skeleton(path: Path) -> bool:
    """Write an empty class to begin with, unless there is a file; returns whether it was written."""
    if path.exists():
        return False
    write_atomically(path, SKELETON.encode())
    return True
