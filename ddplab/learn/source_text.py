"""The text of the learner's file, before torch is loaded: an empty class to begin with, and errors of syntax."""

import warnings
from pathlib import Path

from reference.files.reading import read_text
from reference.files.writing import write_atomically

CLASS = "MyDDP"
"""Name of the learner's class."""
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


def check_syntax(path: Path) -> None:
    """Compile a file and forget the result; this takes no ranks.

    Raises:
        ValueError: The file cannot be read or compiled; the message has the line and its text.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(read_text(path), str(path), "exec")
    except SyntaxError as error:
        text = f"\n    {error.text.strip()}" if error.text else ""
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}{text}") from None
