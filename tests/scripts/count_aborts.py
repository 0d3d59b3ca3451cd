"""Count processes that abort at exit: `python -m tests.scripts.count_aborts RUNS CLASS HOW`.

In each run two ranks train with our class or with torch's, destroy their process group, and exit as an interpreter
does. They are forked from this process, which has imported torch.

CLASS is `ours` or `torch`. HOW is one of:

- living: the data-parallel module lives until the interpreter ends;
- deleted: the module is deleted before the group is destroyed;
- run_ranks: the module lives, and `run_ranks` starts and destroys the group, as under torchrun.
"""

import collections
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from reference.data_parallel import DistributedDataParallel
from reference.launch import choose_network, run_ranks

CLASSES = {"ours": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}
TIMEOUT_S = 60
living: list[nn.Module] = []


def train(_rank: int, _world_size: int, name: str) -> None:
    ddp = CLASSES[name](nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    for _ in range(2):
        ddp(torch.ones(2, 8)).sum().backward()
    living.append(ddp)


def be_rank(rank: int, folder: str, port: int, name: str, how: str) -> None:
    choose_network(None)
    torch.set_num_threads(1)
    if how == "run_ranks":
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run_ranks(train, 2, name)
        return
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    train(rank, 2, name)
    if how == "deleted":
        living.clear()
    dist.destroy_process_group()


def main(runs: int, name: str, how: str) -> None:
    codes: collections.Counter[int] = collections.Counter()
    gc.collect()
    gc.freeze()  # the ranks end sooner
    for run in range(1, runs + 1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder = tempfile.mkdtemp()
        ranks = []
        for rank in range(2):
            if not (pid := os.fork()):
                signal.alarm(TIMEOUT_S)  # a rank that hangs ends with exit code -14
                be_rank(rank, folder, port, name, how)
                return
            ranks.append(pid)
        for pid in ranks:
            codes[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
        shutil.rmtree(folder)
        if run % 50 == 0 or run == runs:
            counted = ", ".join(f"{count} of exit code {code}" for code, count in sorted(codes.items()))
            print(f"{name}, {how}: {run} runs of two ranks: {counted}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
