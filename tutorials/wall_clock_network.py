"""Modelled network between processes: Gloo moves the data, and each collective takes the time that a fabric gives.

When all ranks have launched a collective, they share the latest launch time. Each rank then moves the data and
completes the future at the same moment. Collectives run one after the other, as those of one NCCL communicator. No
links are needed, so this works without Linux and root.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from ddplab.emulation.emulated_device import least_timer_slack
from ddplab.emulation.modelled_network import Arguments, CollectiveGroup, CollectiveMessage, ModelledWork
from simulator.fabric import Fabric
from simulator.step_costs import price

END_TIMEOUT_S = 1.0
"""How long to wait for the thread at the end; if another rank has failed, it waits for a launch that never comes."""


class _Launched(NamedTuple):
    """A collective that this rank has launched.

    Attributes:
        message: What this rank sends.
        latest: After `agreed`, launch time and size in bytes of the rank that was last, and of the largest message.
        agreed: Work of the all-reduce of `latest`.
        move: Moves the data.
        future: Its result.
        tensors: The result.
    """

    message: CollectiveMessage
    latest: Tensor
    agreed: dist.Work
    move: Callable[[], dist.Work]
    future: "torch.futures.Future[Any]"
    tensors: Any


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
        self.late_ns: list[int] = []
        self._launching = threading.Lock()  # a hook may launch in another thread
        self._launched: queue.Queue[_Launched | None] = queue.Queue()
        self._latest = dist.AllreduceOptions()
        self._latest.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._run, daemon=True, name="modelled network")
        self._thread.start()

    def close(self) -> None:
        """End the thread after the collectives in flight."""
        self._launched.put(None)
        self._thread.join(END_TIMEOUT_S)

    def _launch(self, message: CollectiveMessage, method: str, arguments: Arguments, opts: Any) -> ModelledWork:
        future: torch.futures.Future[Any] = torch.futures.Future()
        move = partial(getattr(self._gloo, method), *arguments, opts)
        with self._launching:  # so that launch times rise in launch order, on every rank
            latest = torch.tensor([time.monotonic_ns(), message.size_bytes])  # ranks may gather different sizes
            agreed = self._moments.allreduce([latest], self._latest)
            self._launched.put(_Launched(message, latest, agreed, move, future, arguments[0]))
        return ModelledWork(future)

    def _run(self) -> None:
        """Start each collective when all ranks have launched it and the one before has ended, and end it when due."""
        least_timer_slack()
        due_ns = 0
        while (one := self._launched.get()) is not None:
            try:
                one.agreed.wait()
                launched_ns, size_bytes = one.latest.tolist()
                message = one.message._replace(size_bytes=size_bytes)
                due_ns = max(due_ns, launched_ns) + int(price([message[:2]], self._fabric, self._ranks)[0])
                one.move().wait()
                time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            except Exception as error:  # noqa: BLE001 - whoever waits for the collective gets it
                one.future.set_exception(error)
            else:
                self.late_ns.append(time.monotonic_ns() - due_ns)
                one.future.set_result(one.tensors)


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


@cache
def _gloo_groups(_default: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return two groups of all ranks, which last as long as the process.

    The garbage collector may run in a callback. If it freed a group there, the group would be destroyed in its own
    thread, which ends the process.
    """
    return dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
