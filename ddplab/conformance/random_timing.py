"""Any timing: collectives that take any time and end in any order, between ranks that compute for any time.

A program runs in virtual time on a modelled network. A seed determines the time of each collective and of each
gradient, so a failure repeats exactly, and a rank that waits for ever is named at once.
"""

import random
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Reducer as TorchReducer

from ..emulation.modelled_network import (
    CollectiveMessage,
    ModelledGroup,
    ModelledNetwork,
    VirtualFuture,
    run_on_network,
)
from ..emulation.virtual_time import NoTurnError, VirtualRank, VirtualTime
from ..reference.errors import RankError
from ..simulator.engines.event_replay import Cluster, CollectiveCost
from ..simulator.fabric import LinkShare
from ..simulator.schedule.schedule import Compute
from .check_runner import Bench, HangError, cause_of
from .class_under_test import NotSupportedError, Subject
from .local_training import FindingError, findings, run_locally
from .training_programs import PLAIN, Net, Program, Script, Seen, Weight, program_of

DURATIONS_NS = (0, 1, 10, 1000)
"""Times of collectives, and of gradients; so that any of them may be the longest."""
MOST_AT_A_TIME = 3
WORLD_SIZES = (2, 4, 5, 6, 7, 8)
"""Further numbers of ranks; 1/7 rounds so much that averages are not exact."""

LARGE, LATE_FIRST = (Weight((3,)), Weight((800, 800))), (5, 6)
"""Weights that a class may send in several pieces, and seeds with which the first piece ends after the last one."""


def run_in_virtual_time(subject: Subject, program: Program, world_size: int, seed: int) -> list[list[Seen]]:
    """Run a program on ranks in virtual time, each a thread; returns what each rank saw, by rank and step.

    The seed determines all durations.

    Raises:
        RankError: A rank raised an error, the ranks wait for each other, or they launch different collectives.
    """
    chosen = random.Random(seed)
    cluster = partial(Cluster, concurrency=chosen.randint(1, MOST_AT_A_TIME))

    def price(_message: CollectiveMessage) -> CollectiveCost:
        return CollectiveCost(cost_ns=chosen.choice(DURATIONS_NS), sharing=LinkShare())

    time: VirtualTime[list[Seen]] = VirtualTime(cluster, range(world_size))
    network = ModelledNetwork(time, range(world_size), price)

    with warnings.catch_warnings():  # a class may choose the order of its averages in memory
        warnings.filterwarnings("ignore", message="grad and param do not obey")
        return run_on_network(time, network, partial(_train, subject, program, seed))


def _train(subject: Subject, program: Program, seed: int, rank: VirtualRank, group: ModelledGroup) -> list[Seen]:
    chosen = random.Random(f"{seed} {rank.rank}")

    def computed(_parameter: Tensor) -> None:
        rank.compute(chosen.choice(DURATIONS_NS), Compute("backward"))

    net = Net(program, rank.rank)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(computed)
    script = Script(subject, program, rank.rank, group.size(), net)
    if isinstance(getattr(script.wrapped, "reducer", None), TorchReducer):
        _wait_after_backward(script.wrapped, group)
    return list(script.run_all())


def _wait_after_backward(wrapped: nn.Module, group: ModelledGroup) -> None:
    """Let a rank wait for its all-reduces right before torch's reducer does, in C++, where no virtual time passes."""
    awaited: list[VirtualFuture] = []
    queue = torch.autograd.Variable._execution_engine.queue_callback
    group.after_launch = lambda _number, future: awaited.append(future)

    def wait() -> None:
        while awaited:
            awaited.pop(0).wait()

    def after_forward(_wrapped: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _gradient: queue(wait))

    wrapped.register_forward_hook(after_forward)


def not_modelled(error: RankError) -> NotSupportedError | None:
    """Return the same as "not supported" if a rank used what the modelled network does not have."""
    is_missing = isinstance(error.__cause__, NotImplementedError)
    return NotSupportedError(f"virtual time: {cause_of(error)}") if is_missing else None


def check_timing(bench: Bench) -> None:
    """Results never depend on when collectives end and gradients become ready, on any number of ranks."""

    def attempt(program: Program, world_size: int = bench.world_size, rtol: float = 0.0) -> None:
        expected = run_locally(program, world_size)
        at_fault = f"with seed {program.seed} in virtual time, on {world_size} ranks"
        try:
            seen = run_in_virtual_time(bench.subject, program, world_size, program.seed)
            _, problem = next(findings(seen, expected, rtol), (0, ""))
        except NoTurnError as error:
            raise HangError(cause_of(error)) from None  # another program would take as long
        except RankError as error:
            if reason := not_modelled(error):
                raise reason from None
            raise FindingError(f"{at_fault}: {cause_of(error)}", program) from error
        if problem:
            raise FindingError(f"{at_fault}: {problem}", program)

    try:
        bench.try_random(attempt, examples=bench.effort)
        for size in WORLD_SIZES:
            attempt(program_of(PLAIN, ["train"] * 2, size, options={"bucket_cap_mb": 5e-5}), size, 1e-6)
        for seed in LATE_FIRST:
            attempt(program_of(LARGE, ["train"], bench.world_size, seed=seed))
    except HangError as error:
        bench.not_in_virtual_time = str(error)
        raise NotSupportedError(str(error)) from None
