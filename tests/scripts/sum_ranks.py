"""A user's script: each rank gives its rank plus one, and learns the sum."""

import torch
import torch.distributed as dist

from reference.launch import run_ranks


def body(rank: int, _world_size: int) -> float:
    """The sum over all ranks."""
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value.item()


if __name__ == "__main__":
    print(run_ranks(body, 2, timeout_s=60))
