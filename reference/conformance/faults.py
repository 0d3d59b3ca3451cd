"""Faults: a rank dies or raises an error, and the others must end with an error in time.

The ranks are processes without a launcher that watches over them, as on a cluster: what ends them is the class.
"""

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from .bench import Bench
from .local_training import FindingError
from .subject import Subject

WORLD_SIZE = 2
COLLECTIVES_S = 8.0
"""Time-out of collectives."""
PATIENCE_S = 10.0
"""How long the others may live on."""
START_S = 60.0
WORDS = {"killed": "was killed", "raises": "raised an error"}
PLACES = {
    "forward": "before its forward pass",
    "between buckets": "during its backward pass",
    "after backward": "after its backward pass",
}


def check(bench: Bench, kind: str, places: tuple[str, ...]) -> None:
    """Let the last rank die at these places, in this way.

    Raises:
        FindingError: Another rank did not end, or ended without an error.
    """
    for place in places:
        outcome = outcome_of(bench.subject, kind, place)
        how = f"the last rank {WORDS[kind]} {PLACES[place]}"
        if outcome is None:
            raise FindingError(f"{how}: rank 0 was still running {PATIENCE_S:g} s later")
        if outcome == 0:
            raise FindingError(f"{how}: rank 0 ended without an error")


def outcome_of(subject: Subject, kind: str, place: str) -> int | None:
    """Return the exit status of rank 0 after the last rank failed; None if it did not end in time.

    Raises:
        FindingError: The ranks did not begin to train.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, subject.name, kind, place, str(Path(folder) / "store")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
            for rank in range(WORLD_SIZE)
        ]
        try:
            ranks[-1].wait(timeout=START_S)
            return ranks[0].wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            if ranks[-1].poll() is None:
                raise FindingError(f"the last rank did not reach its fault in {START_S:g} s") from None
            return None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _main(name: str, kind: str, place: str, store: str, rank: str) -> None:
    """Be a rank."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from . import bodies

    dist.init_process_group(
        "gloo",
        store=FileStore(store, WORLD_SIZE),
        rank=int(rank),
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=COLLECTIVES_S),
    )
    bodies.train_until(int(rank), WORLD_SIZE, Subject(name), place, kind)


if __name__ == "__main__":
    _main(*sys.argv[1:])
