"""Modelled network between processes: Gloo moves the data, and each collective takes the time that a fabric gives.

Each rank simulates the network by the clock, on a `Cluster` of its own. When all ranks have launched a collective,
they share the latest launch time. Each rank then begins to move the data, and completes the future, at the moments
that its simulation gives. No links are needed, so this works without Linux and root.

A rank learns of a launch only after a message of Gloo. If its simulation has passed another event by then, the
collective starts late on this rank, and its end may differ between ranks by the delay of that message.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from simulator.engines.event_replay import Cluster, CollectiveCost, RunningCollective
from simulator.fabric import Fabric
from simulator.step_costs import price

from ..calibration.repeated_timing import of_slowest_rank
from .emulated_device import least_timer_slack
from .modelled_network import Arguments, CollectiveGroup, CollectiveMessage, ModelledWork

Result = TypeVar("Result")


class CollectiveOnAllRanks(NamedTuple):
    """A collective that all ranks have launched, the last one at `launched_ns`; numbers are in launch order."""

    number: int
    message: CollectiveMessage
    launched_ns: int
    result: Any


class Unfinished:
    """Futures of collectives in flight. Callbacks hold them, not the group, which Gloo's threads must not free.

    See `reference.comm_hooks.interface`.
    """

    def __init__(self) -> None:
        self.launching = threading.Lock()  # a hook may launch in a thread of Gloo
        self.count = 0
        self.late_ns: list[int] = []
        self._futures: dict[int, torch.futures.Future[Any]] = {}
        self._error: Exception | None = None

    def add(self, future: "torch.futures.Future[Any]") -> int:
        """Number a collective, or raise the error of one that failed before; the caller holds `launching`."""
        if self._error is not None:
            raise self._error
        number, self.count = self.count, self.count + 1
        self._futures[number] = future
        return number

    def finish(self, number: int, result: Any) -> None:
        """Give a collective its result, unless it has failed."""
        with self.launching:
            future = self._futures.pop(number, None)
        if future is not None:
            future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Give unfinished and further collectives this error."""
        with self.launching:
            self._error = self._error or error
            futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(error)


class WallGroup(CollectiveGroup):
    """A process group of all ranks whose collectives take the time that a fabric gives, without its slow-down.

    Args:
        gloo: A process group that moves the data; nothing else may use it meanwhile.
        moments: One through which ranks agree on launch times; the same holds.
        fabric: Costs of the collectives, in the time of the clock.

    Attributes:
        late_ns: How late each collective ended on this rank.
    """

    def __init__(self, gloo: dist.ProcessGroup, moments: dist.ProcessGroup, fabric: Fabric) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # the annotations have a store
        self._gloo, self._moments, self._fabric = gloo, moments, fabric
        self._ranks = gloo.size()
        self._unfinished = Unfinished()
        self.late_ns = self._unfinished.late_ns
        self._moves: dict[int, Callable[[], dist.Work]] = {}
        # No SimpleQueue: in Python 3.11, its `get` blocks for ever if the time-out ends while it takes its lock.
        self._arrivals: queue.Queue[CollectiveOnAllRanks | None] = queue.Queue()
        self._cluster = Cluster(concurrency=fabric.concurrency)
        self._latest = dist.AllreduceOptions()
        self._latest.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        (self._origin_ns,) = of_slowest_rank([time.monotonic_ns()], moments)
        self._thread = threading.Thread(target=self._run, daemon=True, name="modelled network")
        self._thread.start()

    def close(self) -> None:
        """End the thread; collectives in flight fail."""
        self._arrivals.put(None)
        self._thread.join()
        self._unfinished.fail(RuntimeError("modelled network: closed with collectives in flight"))

    def _launch(self, message: CollectiveMessage, method: str, arguments: Arguments, opts: Any) -> ModelledWork:
        future: torch.futures.Future[Any] = torch.futures.Future()
        unfinished, arrivals = self._unfinished, self._arrivals
        with unfinished.launching:  # so that launch times rise with the numbers, on every rank
            number = unfinished.add(future)
            self._moves[number] = partial(getattr(self._gloo, method), *arguments, opts)
            latest = torch.tensor([time.monotonic_ns(), message.size_bytes])
            work = self._moments.allreduce([latest], self._latest)

        def launched_by_all(done: "torch.futures.Future[Any]") -> None:
            try:
                done.value()
                launched_ns, size_bytes = latest.tolist()  # ranks may gather different sizes; the largest counts
                largest = message._replace(size_bytes=size_bytes)
                arrivals.put(CollectiveOnAllRanks(number, largest, launched_ns, arguments[0]))
            except Exception as error:  # noqa: BLE001 - the ranks that wait get it
                unfinished.fail(error)

        work.get_future().add_done_callback(launched_by_all)
        return ModelledWork(future)

    def _run(self) -> None:
        """Run the cluster by the clock: start each collective when it was launched, and end it when it is due.

        An error ends all collectives.
        """
        least_timer_slack()
        waiting: dict[int, CollectiveOnAllRanks] = {}
        started = 0
        try:
            while True:
                with suppress(queue.Empty):
                    arrival = self._arrivals.get(timeout=self._until_next_event_s())
                    if arrival is None:
                        return
                    waiting[arrival.number] = arrival
                while started in waiting:
                    self._start(waiting.pop(started))
                    started += 1
                now_ns = time.monotonic_ns() - self._origin_ns
                while self._cluster.env.peek() <= now_ns:
                    self._cluster.env.step()
        except Exception as error:  # noqa: BLE001 - the ranks that wait get it
            self._unfinished.fail(error)

    def _until_next_event_s(self) -> float | None:
        due_ns = self._cluster.env.peek()
        if due_ns == inf:
            return None
        return max(0.0, (self._origin_ns + due_ns - time.monotonic_ns()) / 1e9)

    def _start(self, launched: CollectiveOnAllRanks) -> None:
        move, moved = self._moves.pop(launched.number), []

        def begin_to_move() -> None:
            moved.append(move().get_future())

        cost_ns = int(price([launched.message], self._fabric, self._ranks)[0])
        sharing = self._fabric.link_share(launched.message.size_bytes, self._ranks)
        collective = RunningCollective(self._cluster.env, CollectiveCost(cost_ns, sharing), begin_to_move)
        unfinished, origin_ns = self._unfinished, self._origin_ns

        def finish(due_ns: int, done: "torch.futures.Future[Any]") -> None:
            unfinished.late_ns.append(time.monotonic_ns() - origin_ns - due_ns)
            try:
                done.value()
                unfinished.finish(launched.number, launched.result)
            except Exception as error:  # noqa: BLE001 - the ranks that wait get it
                unfinished.fail(error)

        collective.done.callbacks.append(lambda _: moved[0].add_done_callback(partial(finish, collective.done_ns)))
        launch = self._cluster.env.timeout(max(0, launched.launched_ns - self._origin_ns - self._cluster.now_ns))
        launch.callbacks.append(lambda _: self._cluster.launched_by_all(collective))


@contextmanager
def modelled_network(fabric: Fabric) -> Iterator[WallGroup]:
    """Make a modelled network the default process group of this process, in place of Gloo's."""
    world = distributed_c10d._world
    before = world.default_pg
    assert before is not None
    group = WallGroup(*_gloo_groups(before), fabric)
    world.pg_map[group] = ("modelled", world.pg_map[before][1])
    world.pg_names[group] = GroupName("modelled")
    world.pg_group_ranks[group] = {rank: rank for rank in range(before.size())}
    world.pg_backend_config[group] = "cpu:modelled"
    world.default_pg = group
    try:
        yield group
    finally:
        world.default_pg = before
        for of_group in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            del of_group[group]
        group.close()


def on_network(
    rank: int, world_size: int, modelled: Fabric | None, body: Callable[..., Result], *arguments: Any
) -> Result:
    """Run a rank body on a modelled network, or on the real one if there is no fabric."""
    with nullcontext() if modelled is None else modelled_network(modelled):
        return body(rank, world_size, *arguments)


@cache
def _gloo_groups(_default: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return two groups of all ranks, which last as long as the process.

    The garbage collector may run in a callback. If it freed a group there, the group would be destroyed in its own
    thread, which ends the process.
    """
    return dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
