"""A launcher that is killed while its ranks compute."""

import os
from multiprocessing import parent_process

from reference.launch import RankPool, report_progress


def outlive(rank: int, _world_size: int) -> int:
    """A result that nobody is there to take."""
    launcher = parent_process()
    assert launcher is not None
    report_progress("computing", 0, 1)
    launcher.join()
    return rank


if __name__ == "__main__":
    RankPool(2, timeout_s=60).run(outlive, on_progress=lambda *_: os._exit(0))
