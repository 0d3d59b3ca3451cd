"""The command `ddplab` in a process of its own, as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def unwrapped(shown: str) -> str:
    """Return what a command printed with each sentence on one line."""
    return re.sub(r"\n  (?=\S)", " ", shown)


def ddplab(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "ddplab", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)
