"""Count processes that abort at exit: `python -m tests.scripts.count_aborts RUNS CLASS HOW`.

In each run two ranks, each a new interpreter, train with our class or with torch's, destroy their process group, and
exit. Ranks that were forked do not abort: none of 500 pairs with torch's class did.

CLASS is `ours` or `torch`. HOW is one of:

- living: the data-parallel module lives until the interpreter ends;
- deleted: the module is deleted before the group is destroyed;
- run_ranks: the module lives, and `run_ranks` makes and destroys the group, as under torchrun.
"""

import collections
import os
import socket
import sys
import tempfile
from importlib import import_module
from subprocess import Popen

TIMEOUT_S = 100
KEPT = []


def train(_rank: int, _world_size: int, name: str) -> None:
    """Train with a class, and keep the module."""
    import torch
    from torch import nn

    if name == "ours":
        from reference.data_parallel import DistributedDataParallel
    else:
        from torch.nn.parallel import DistributedDataParallel  # type: ignore[assignment]
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    for _ in range(2):
        ddp(torch.ones(2, 8)).sum().backward()
    KEPT.append(ddp)


def be_rank(rank: int, folder: str, name: str, how: str) -> None:
    """Train as one of two ranks; for `run_ranks`, in torchrun's environment."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if how == "run_ranks":
        from reference.launch import run_ranks

        run_ranks(train, 2, name)
        return
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    if how == "deleted":
        import_module("torch.distributed.nn")  # its default arguments hold the group that exists at the import
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    train(rank, 2, name)
    if how == "deleted":
        KEPT.clear()
    dist.destroy_process_group()


def main(runs: int, name: str, how: str) -> None:
    """Run pairs of ranks and print their exit codes."""
    codes: collections.Counter[int] = collections.Counter()
    for run in range(1, runs + 1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torchruns = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        if how == "run_ranks":
            torchruns["TORCHELASTIC_RUN_ID"] = "test"
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.scripts.count_aborts", "rank"]
            ranks = [
                Popen([*command, str(rank), folder, name, how], env=os.environ | torchruns | {"RANK": str(rank)})
                for rank in range(2)
            ]
            for rank in ranks:
                codes[rank.wait(TIMEOUT_S)] += 1
        if run % 10 == 0 or run == runs:
            counted = ", ".join(f"{count} of exit code {code}" for code, count in sorted(codes.items()))
            print(f"{name}, {how}: {run} runs of two ranks: {counted}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        be_rank(int(sys.argv[2]), *sys.argv[3:])
    else:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
