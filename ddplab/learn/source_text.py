"""The text of the learner's file to begin with: an empty class."""

from pathlib import Path

from reference.files.writing import write_atomically

TUTOR = Path(__file__).with_name("tutor.md")
"""Rules for an AI assistant that helps a learner."""
CLASS = "MyDDP"
"""Name of the learner's class."""
SKELETON = Path(__file__).with_name("skeleton.txt").read_text()


def write_skeleton(path: Path) -> bool:
    """Write an empty class to begin with, unless there is a file; returns whether it was written."""
    if path.exists():
        return False
    write_atomically(path, SKELETON.encode())
    return True
