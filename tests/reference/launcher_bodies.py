"""Uses ranks that a launcher has started; the case says how."""

import time
from functools import partial
from unittest import mock

from ddplab.calibration import repeated_timing
from ddplab.reference.errors import RankError
from ddplab.reference.launch import RankPool, run_ranks
from ddplab.reference.ranks import launcher, pool_members
from ddplab.reference.ranks.fork_server import Surroundings
from ddplab.reference.ranks.launcher import on_rank_0
from ddplab.training_runs import record_computation

from . import launch_bodies as bodies


def rank_and_size(rank: int, world_size: int) -> tuple[int, int]:
    return rank, world_size


def distance_of_clocks(rank: int, world_size: int) -> int:
    """Nanoseconds by which the clock that all ranks share differs, after this rank's was moved by an hour."""
    true_ns = time.perf_counter_ns

    def moved_ns() -> int:
        return true_ns() + rank * 3600 * 10**9

    with mock.patch.object(time, "perf_counter_ns", moved_ns):
        repeated_timing.share_clock(rank, world_size)
        return repeated_timing.clock_ns() - true_ns()


def wait(rank: int, _world_size: int) -> None:
    if rank == 0:
        print("ready", flush=True)
    time.sleep(600)


def serve_or_run(surroundings: Surroundings, case: str) -> None:
    """Be the process of one rank; that of rank 0 runs the program."""
    surroundings.enter()
    launcher.LATE_S = 2.0
    on_rank_0(partial(main, case))


def main(case: str) -> None:
    if case == "hang":
        pool_members.LEAVE_S = 3.0  # the rank that hangs never leaves
    if case == "some":
        print(run_ranks(rank_and_size, 3), run_ranks(rank_and_size, 2))
        traces = [run_ranks(record_computation, 2, "tests.models_for_cli:tiny", 1)[0] for _ in range(2)]
        print([len(trace.ranks) for trace in traces])  # what a pool has made does not outlive it in a process
        with RankPool(3) as pool:
            apart_ns = max(map(abs, pool.run(distance_of_clocks)))
            print(pool.nodes, apart_ns < 10**9)
    if case == "wait":
        run_ranks(wait, 2)
    failing = {"some": bodies.fail_on, "exit": bodies.die_on, "hang": bodies.hang_on}[case]
    with RankPool(3, timeout_s=60) as pool:
        pool.run(bodies.identify)
        try:
            pool.run(failing, 1, timeout_s=3)
        except RankError as error:
            print(error, flush=True)
        print(pool.run(rank_and_size))
