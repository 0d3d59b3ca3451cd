"""A launcher that is killed while one rank computes, and another one waits for a message that never comes."""

import os
from multiprocessing import parent_process

import torch
import torch.distributed as dist

from reference.launch import RankPool, report_progress


def outlive(rank: int, _world_size: int) -> int:
    """Return a result after the launcher has ended."""
    if rank == 1:
        dist.recv(torch.ones(1), 0)
    launcher = parent_process()
    assert launcher is not None
    report_progress("computing", 0, 1)
    launcher.join()
    return rank


if __name__ == "__main__":
    RankPool(2, timeout_s=600).run(outlive, on_progress=lambda *_: os._exit(0))
