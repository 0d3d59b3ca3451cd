"""Text that a learner begins with: a file with an empty class, and gaps in the cells of notebooks."""

from pathlib import Path

from ..reference.files.writing import write_atomically

TUTOR = Path(__file__).with_name("tutor.md")
"""Rules for an AI assistant that helps a learner."""
CLASS = "MyDDP"
"""Name of the learner's class."""
TO_WRITE = "...  # your code"
"""Stands in a cell for the part that the learner writes."""
SKELETON = Path(__file__).with_name("skeleton.txt").read_text()


def write_skeleton(path: Path) -> bool:
    """Write an empty class to begin with, unless there is a file; returns whether it was written."""
    if path.exists():
        return False
    write_atomically(path, SKELETON.encode())
    return True
