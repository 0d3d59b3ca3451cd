"""Uses ranks that a launcher has started; the argument says how."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from reference.errors import RankError
from reference.launch import RankPool, run_ranks
from reference.launcher import on_rank_0
from tests.reference import launch_bodies as bodies


def rank_and_size(rank: int, world_size: int) -> tuple[int, int]:
    return rank, world_size


def place(_rank: int, _world_size: int) -> str:
    return os.environ.get("SLURM_PROCID", "")


def wait(rank: int, _world_size: int) -> None:
    if rank == 0:
        print("ready", flush=True)
    time.sleep(600)


def main() -> None:
    case = sys.argv[1]
    if case == "some":
        with RankPool(2, members=[1, 2]) as last_two:
            print(run_ranks(rank_and_size, 3), run_ranks(rank_and_size, 2), last_two.run(place))
        return
    if case == "wait":
        run_ranks(wait, 2)
    failing = {"raise": bodies.fail_on, "die": bodies.die_on, "hang": bodies.hang_on}[case]
    with RankPool(3, timeout_s=60) as pool:
        pool.run(bodies.identify)
        try:
            pool.run(failing, 1, timeout_s=3)
        except RankError as error:
            assert pool.run(rank_and_size) == [(0, 3), (1, 3), (2, 3)]
            sys.exit(str(error))


if __name__ == "__main__":
    on_rank_0(main)
