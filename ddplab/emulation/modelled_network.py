"""Modelled network: a process group that moves real data, and whose collectives take the time that a fabric gives.

`ModelledNetwork` is shared by all simulated ranks. Each rank has a `ModelledGroup`, which torch and the reducers use
as any other process group. The n-th collective of each rank is matched with the n-th of the others. A simulated rank
stands for all ranks that behave the same, so a sum counts its tensor once for each of them.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, HashStore, _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d

from ..reference.errors import RanksUnmatchedError
from ..simulator.engines.event_replay import CollectiveCost, RunningCollective
from ..simulator.schedule.comm_hook_messages import INDEX_BYTES, Transport
from .virtual_streams import current_stream
from .virtual_time import Result, VirtualRank, VirtualTime

Arguments = tuple[Any, ...]
"""Tensors of a collective as lists: those to overwrite and, of an all-gather or a reduce-scatter, the inputs."""
Reduction = Callable[[Mapping[int, Arguments]], None]
"""Computes the result of a collective from the arguments by rank, and writes it into them."""
Compute = Callable[[Sequence[Tensor]], Tensor]
"""Computes a tensor from those of all simulated ranks."""


class NotModelledError(NotImplementedError):
    """A rank asks for what the modelled network, or its emulation, does not have."""


class CollectiveMessage(NamedTuple):
    """What a rank launches."""

    transport: Transport
    """The collective that takes as long. On a ring, each rank sends as much in a reduce-scatter as in an all-gather
    of the results, and in a reduce as in a broadcast (nccl-tests, `doc/PERFORMANCE.md`)."""
    size_bytes: int  #: bytes of that collective's message
    name: str = ""  #: the collective if it is another one


Price = Callable[[CollectiveMessage], CollectiveCost]


class VirtualFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future whose `wait` takes virtual time of a rank."""

    def __init__(self, rank: VirtualRank, number: int | None, description: str) -> None:
        super().__init__()
        self.number = number  #: of the collective that the result depends on last; None if on no collective
        self._rank, self._description = rank, description
        self.after_wait: Callable[[], None] | None = None  #: called once, by the rank that has waited

    def wait(self, limit: timedelta = timedelta(0)) -> Any:
        """Let virtual time pass until the future has a result, and return it, as `VirtualRank.wait` does."""
        self._rank.wait(self.number, self, self._description, 1000 * (limit // timedelta(microseconds=1)))
        if self.after_wait is not None:
            after_wait, self.after_wait = self.after_wait, None
            after_wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> "VirtualFuture":
        """See `torch.futures.Future.then`."""
        child = VirtualFuture(self._rank, self.number, self._description)
        self.add_done_callback(lambda done: child.complete(partial(callback, done)))
        return child

    def complete(self, compute: Callable[[], Any]) -> None:
        """Set the result that a function returns, or its error."""
        try:
            self.set_result(compute())
        except Exception as error:  # noqa: BLE001 - raised where the future is waited for
            self.set_exception(error)


class _ModelledWork(dist.Work):
    """A launched collective of one rank."""

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let virtual time pass until the collective is done, or let the current stream wait for it."""
        current_stream().wait(self._future, timeout)
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()


@dataclass(eq=False)
class ModelledCollective:
    """A collective that some ranks have launched."""

    message: CollectiveMessage  #: the same on all ranks; of messages that are gathered, the largest
    running: RunningCollective  #: its run on the cluster
    reduction: Reduction  #: computes its result from the arguments of each rank
    contributions: dict[int, Arguments] = field(default_factory=dict)
    futures: dict[int, VirtualFuture] = field(default_factory=dict)
    addresses: set[int] = field(default_factory=set)  #: of the tensors that ranks have launched so far


class ModelledNetwork:
    """The collectives between all ranks; `represented_by` has, for each rank, the simulated one that acts alike."""

    def __init__(self, time: VirtualTime[Any], represented_by: Sequence[int], price: Price) -> None:
        self._time, self._price = time, price
        counts = Counter(represented_by)
        self._counts = {rank.rank: counts[rank.rank] for rank in time.ranks if rank.rank in counts}
        self._groups: dict[tuple[int, ...], ModelledNetwork] = {}
        self._simulated, self.world_size = represented_by, len(represented_by)
        self.launched: list[ModelledCollective] = []  #: of the present iteration, in launch order
        #: Returns a context in which a rank's group is the default group.
        self.entered: Callable[[int], AbstractContextManager[None]] = lambda _rank: nullcontext()
        self._next = dict.fromkeys(self._counts, 0)
        self._unmatched: dict[Any, deque[tuple[Tensor, VirtualFuture]]] = defaultdict(deque)  # sends and receives

    def group_rank(self, rank: int) -> int:
        """Return the number of a rank in the group of the network's ranks."""
        return list(self._simulated).index(rank)

    def restart(self) -> list[ModelledCollective]:
        """Start an iteration without collectives; returns those of the last one.

        Raises RanksUnmatchedError if some ranks have launched a collective that others have not.
        """
        for number, one in enumerate(self.launched):
            if ranks := sorted(one.contributions):
                told = f"collective {number}, {_described(one.message)}: expected of all ranks, got of ranks {ranks}"
                raise RanksUnmatchedError(ranks[0], told)
        launched, self.launched = self.launched, []
        self._next = dict.fromkeys(self._counts, 0)
        return launched

    def of_some(self, ranks: Sequence[int], number: int) -> "ModelledNetwork":
        """Return the collectives of the group that all ranks make as their `number`-th one, with these ranks.

        Raises NotModelledError if a simulated rank stands for others.
        """
        if any(rank != one for rank, one in enumerate(self._simulated)):
            raise NotModelledError("modelled network: expected no group of some ranks")
        key = number, *ranks
        if key not in self._groups:
            self._groups[key] = ModelledNetwork(self._time, ranks, self._price)
            self._groups[key].entered = self.entered
        return self._groups[key]

    def launch(
        self, rank: VirtualRank, message: CollectiveMessage, contribution: Arguments, reduction: Reduction
    ) -> tuple[int, VirtualFuture]:
        """Launch a rank's next collective; returns its number and its future.

        Raises RanksUnmatchedError if another rank has launched a different collective.
        """
        number = self._next[rank.rank]
        self._next[rank.rank] += 1
        if number == len(self.launched):
            running = RunningCollective(self._time.cluster.env, self._price(message))
            self.launched.append(ModelledCollective(message, running, reduction))
        collective = self.launched[number]
        if message[::2] == collective.message[::2] == ("all_gather", ""):  # of sparse gradients, for example
            if message.size_bytes > collective.message.size_bytes:
                collective.message, collective.running.cost = message, self._price(message)
        elif message != collective.message:
            expected = f"{_described(collective.message)}, as on rank {next(iter(collective.contributions))}"
            told = f"rank {rank.rank}: expected its collective {number} to be {expected}, got {_described(message)}"
            raise RanksUnmatchedError(rank.rank, told)
        future = VirtualFuture(rank, number, f"collective {number}, {_described(message)}")
        addresses = {one.data_ptr() for one in contribution[0] if isinstance(one, Tensor) and not one.is_sparse} - {0}
        if addresses & collective.addresses:
            raise NotModelledError("modelled network: expected no tensor that ranks, which are threads, share")
        collective.addresses |= addresses
        collective.contributions[rank.rank] = contribution
        collective.futures[rank.rank] = future
        if len(collective.contributions) == len(self._counts):
            collective.running.done.callbacks.append(lambda _event: self._finish(collective))
            self._time.cluster.launched_by_all(collective.running)
        return number, future

    def transfer(self, rank: VirtualRank, tensor: Tensor, path: tuple[int, int, int]) -> VirtualFuture:
        """Send or receive a tensor; both ends wait for each other, as with NCCL. `path`: sender, receiver and tag."""
        sends = self.group_rank(rank.rank) == path[0]
        described = f"a send to rank {path[1]}" if sends else f"a receive from rank {path[0]}"
        mine = tensor, VirtualFuture(rank, None, described)
        if not (others := self._unmatched[path, not sends]):
            self._unmatched[path, sends].append(mine)
            return mine[1]
        theirs = others.popleft()
        (sent, _), (received, _) = (mine, theirs) if sends else (theirs, mine)
        message = CollectiveMessage("broadcast", tensor_bytes(sent), "send")
        running = RunningCollective(self._time.cluster.env, self._price(message))

        def finish(_event: Any) -> None:
            received.detach().copy_(sent.detach())
            for one, future in (mine, theirs):
                future.set_result([one])

        running.done.callbacks.append(finish)
        self._time.cluster.launched_by_all(running)
        return mine[1]

    def _finish(self, collective: ModelledCollective) -> None:
        with torch.inference_mode():  # the tensors may have been made in it
            collective.reduction(collective.contributions)
        for rank, future in collective.futures.items():
            with self.entered(rank):  # callbacks of the future may launch further collectives
                future.set_result(collective.contributions[rank][0])
        collective.contributions, collective.futures, collective.addresses = {}, {}, set()

    # What collectives compute

    def reduction(self, method: str, opts: Any) -> Reduction:
        """Return the function that overwrites the tensors of all ranks with the result of a collective."""
        if method == "allgather":
            return self._gather
        if method == "broadcast":
            source = list(self._counts).index(self._simulated[opts.rootRank])
            return partial(self._overwrite, lambda tensors: tensors[source])
        for operation, compute in (
            (dist.ReduceOp.SUM, self._sum),
            (dist.ReduceOp.AVG, lambda tensors: self._sum(tensors).div_(self.world_size)),
            (dist.ReduceOp.MAX, partial(reduce, torch.maximum)),
            (dist.ReduceOp.MIN, partial(reduce, torch.minimum)),
        ):
            if opts.reduceOp == operation and method == "reduce_scatter":
                return partial(self._scatter, compute)
            if opts.reduceOp == operation:
                only = self._simulated[opts.rootRank] if method == "reduce" else None
                return partial(self._overwrite, compute, only=only)
        raise NotModelledError(f"modelled network: expected SUM, AVG, MAX or MIN, got {opts.reduceOp}")

    def _overwrite(self, compute: Compute, contributions: Mapping[int, Arguments], only: int | None = None) -> None:
        """Overwrite the n-th tensor of every rank with what a function computes from those of all simulated ranks.

        `only`: the only rank whose tensors are overwritten.
        """
        for tensors in zip(*(contributions[rank][0] for rank in self._counts), strict=True):
            result = compute(tensors)
            for rank, tensor in zip(self._counts, tensors, strict=True):
                if tensor is not result and only in (None, rank):
                    tensor.copy_(result)

    def _scatter(self, compute: Compute, contributions: Mapping[int, Arguments]) -> None:
        """Overwrite every rank's output with what a function computes from the inputs for this rank."""
        for rank, (outputs, _) in contributions.items():
            own = self.group_rank(rank)
            for position, output in enumerate(outputs):
                output.copy_(compute([contributions[one][1][position][own].clone() for one in self._counts]))

    def _sum(self, tensors: Sequence[Tensor]) -> Tensor:
        weighted = zip(tensors, self._counts.values(), strict=True)
        first, *others = [tensor if count == 1 else tensor.mul_(count) for tensor, count in weighted]
        return sum(others, first)

    def _gather(self, contributions: Mapping[int, Arguments]) -> None:
        """Copy every rank's input into the outputs of all ranks."""
        for outputs, _ in contributions.values():
            for position, by_rank in enumerate(outputs):
                for rank, output in enumerate(by_rank):
                    output.copy_(contributions[self._simulated[rank]][1][position])


def _described(message: CollectiveMessage) -> str:
    name = message.name or message.transport
    return f"{'an' if name.startswith('a') else 'a'} {name} of {message.size_bytes} bytes"


class ModelledGroup(dist.ProcessGroup):
    """A rank's process group of the network's ranks; its methods are those that torch calls."""

    def __init__(self, rank: VirtualRank, network: ModelledNetwork, number: int = 0) -> None:
        super().__init__(network.group_rank(rank.rank), network.world_size)  # type: ignore[call-arg]  # the annotations have a store
        self._virtual_rank, self._network, self._number = rank, network, number
        #: Called with each message and its tensors before it is launched, in the thread that launches it.
        self.before_launch: Callable[[CollectiveMessage, Sequence[Tensor]], None] = lambda _message, _tensors: None
        #: Called with each collective's number and future after it was launched.
        self.after_launch: Callable[[int, VirtualFuture], None] = lambda _number, _future: None

    @property
    def group_name(self) -> Any:  # torch's type is new
        """Name by which a DeviceMesh finds the group; each rank of this process has its own."""
        return f"modelled {self._virtual_rank.rank}" + (f", {self._number}" if self._number else "")

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name of the backend."""
        return "modelled"

    def allreduce(self, tensors: Any, opts: Any = None) -> _ModelledWork:  # type: ignore[override]
        """Reduce tensors over all ranks, in place; the rows of sparse tensors are gathered."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        transport: Transport = "all_gather" if tensors[0].is_sparse else "all_reduce"
        return self._launch(transport, tensors, "allreduce", (tensors,), opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> _ModelledWork:  # type: ignore[override]
        """Overwrite tensors with those of one rank."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._launch("broadcast", tensors, "broadcast", (tensors,), opts or dist.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _ModelledWork:
        """Give every rank the tensors of all ranks."""
        outputs, inputs = ([outputs], [inputs]) if isinstance(inputs, Tensor) else (outputs, inputs)
        return self._launch("all_gather", inputs, "allgather", (outputs, inputs), opts or AllgatherOptions())

    def reduce(self, tensors: Any, opts: Any) -> _ModelledWork:  # type: ignore[override]
        """Reduce tensors over all ranks, for one rank."""
        return self._launch("broadcast", tensors, "reduce", (tensors,), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _ModelledWork:  # type: ignore[override]
        """Reduce a list of tensors over all ranks, one for each rank."""
        options = opts or dist.ReduceScatterOptions()
        return self._launch("all_gather", outputs, "reduce_scatter", (outputs, inputs), options)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> _ModelledWork:
        """Reduce a tensor of one part for each rank."""
        return self.reduce_scatter([output], [list(whole.view(self.size(), *output.shape))], opts)

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> _ModelledWork:
        """Give every rank the parts of all ranks, in one tensor."""
        return self.allgather([list(whole.view(self.size(), *part.shape))], [part], opts)

    def barrier(self, *_: Any, **_options: Any) -> _ModelledWork:
        """Wait for all ranks."""
        return self.allreduce([torch.zeros(0)])

    allreduce_coalesced: Any = allreduce
    monitored_barrier: Any = barrier
    _reduce_scatter_base: Any = reduce_scatter_single  # its name in torch 2.11
    _allgather_base: Any = all_gather_single

    def send(self, tensors: Any, peer: int, tag: int = 0) -> _ModelledWork:
        """Send a tensor to a rank."""
        return self._transfer(tensors, (self.rank(), peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> _ModelledWork:
        """Receive a tensor from a rank."""
        return self._transfer(tensors, (peer, self.rank(), tag))

    def of_some(self, ranks: Sequence[int], number: int) -> "ModelledGroup | None":
        """Return the group of these ranks that this rank makes as its `number`-th one; None if it is none of them."""
        network = self._network.of_some(ranks, number)
        return ModelledGroup(self._virtual_rank, network, number) if self.rank() in ranks else None

    def _not_modelled(self, *_arguments: Any, **_options: Any) -> _ModelledWork:
        raise NotModelledError("modelled network: expected NCCL's collectives, or a send and a receive")

    alltoall = alltoall_base = gather = scatter = recv_anysource = _not_modelled

    def _launch(self, transport: Transport, sent: Any, method: str, arguments: Arguments, opts: Any) -> _ModelledWork:
        """Launch a collective that a method of `ProcessGroup` with these arguments describes; `sent`: its tensors."""
        name = method if method.startswith("reduce") else ""
        message = CollectiveMessage(transport, sum(map(tensor_bytes, sent)), name)
        self.before_launch(message, [one if isinstance(one, Tensor) else one[0] for one in arguments[-1]])
        reduction = self._network.reduction(method, opts)
        number, future = self._network.launch(self._virtual_rank, message, arguments, reduction)
        if not self._number:
            self._virtual_rank.launched(number)
        self.after_launch(number, future)
        return _ModelledWork(future)

    def _transfer(self, tensors: Sequence[Tensor], path: tuple[int, int, int]) -> _ModelledWork:
        self.before_launch(CollectiveMessage("broadcast", tensor_bytes(tensors[0]), "send"), tensors)
        return _ModelledWork(self._network.transfer(self._virtual_rank, tensors[0], path))


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse tensor, those of its values and of the rows' indices."""
    return tensor._values().nbytes + tensor._nnz() * INDEX_BYTES if tensor.is_sparse else tensor.nbytes


# The default group of each rank


class RankWorld:
    """State of torch.distributed for one rank: the modelled group is the default group."""

    def __init__(self, group: ModelledGroup) -> None:
        self.default_pg = group
        self.pg_map: dict[dist.ProcessGroup, Any] = {}
        self.pg_names: dict[dist.ProcessGroup, str] = {}
        self.pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[dist.ProcessGroup, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[dist.ProcessGroup]] = {"": []}
        self.pg_to_tag: dict[dist.ProcessGroup, str] = {}
        self.pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = {}
        self.comms: list[Any] = []
        self.add(group, range(group.size()))

    def add(self, group: ModelledGroup, ranks: Sequence[int]) -> None:
        """Register a group of these ranks, also under its name, which a DeviceMesh looks up."""
        self.pg_map[group] = "gloo", HashStore()  # because a class may choose its calls by the name of the backend
        self.pg_names[group] = group.group_name
        self.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
        self.pg_backend_config[group] = "cpu:gloo"
        self.tags_to_pg[""].append(group)
        self.pg_to_tag[group] = ""
        _register_process_group(group.group_name, group)

    def new_group(self, ranks: Sequence[int] | None = None, *_: Any, **_options: Any) -> Any:
        """Make a group of some ranks, as `dist.new_group` does; None: of all."""
        members = list(range(self.default_pg.size()) if ranks is None else sorted(ranks))
        self.group_count += 1
        if (group := self.default_pg.of_some(members, self.group_count)) is None:
            return dist.GroupMember.NON_GROUP_MEMBER
        self.add(group, members)
        return group

    def close(self) -> None:
        """Forget the groups' names."""
        for group in self.tags_to_pg[""]:
            _unregister_process_group(group.group_name)


class WorldOfEachThread(threading.local):
    """Gives each rank's thread its own `RankWorld`, and all other threads what there was before.

    `torch.distributed.distributed_c10d._world` is the extension point that torch provides for this purpose.
    """

    def __init__(self, outside: Any) -> None:
        super().__setattr__("_present", outside)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._present, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._present, name, value)

    def new_group(self, *arguments: Any, **options: Any) -> Any:
        """Make a group of some ranks, in the world of this thread."""
        return self._present.new_group(*arguments, **options)

    @contextmanager
    def entered(self, world: RankWorld) -> Iterator[None]:
        """Make a rank's world that of this thread."""
        before = self._present
        super().__setattr__("_present", world)
        try:
            yield
        finally:
            super().__setattr__("_present", before)


def run_on_network(
    time: VirtualTime[Result], network: ModelledNetwork, body: Callable[[VirtualRank, ModelledGroup], Result]
) -> list[Result]:
    """Run a function on every rank, as `VirtualTime.run` does, with the rank's group as default group."""
    worlds = WorldOfEachThread(distributed_c10d._world)
    of_ranks = {rank.rank: RankWorld(ModelledGroup(rank, network)) for rank in time.ranks}
    network.entered = lambda rank: worlds.entered(of_ranks[rank])

    def on_rank(rank: VirtualRank) -> Result:
        with network.entered(rank.rank):
            return body(rank, of_ranks[rank.rank].default_pg)

    try:
        with (
            mock.patch.object(distributed_c10d, "_world", worlds),
            mock.patch.object(distributed_c10d, "new_group", worlds.new_group),
            mock.patch.object(dist, "new_group", worlds.new_group),
        ):
            return time.run(on_rank)
    finally:
        for world in of_ranks.values():
            world.close()
