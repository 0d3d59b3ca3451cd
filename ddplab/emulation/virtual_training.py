"""Training of one rank in virtual time: a real reducer averages the gradients of an emulated model.

`RankTraining` takes the reducer to the phase that is measured, trains the measured cycles, notes which bucket each
collective belongs to, and charges the processor costs of the fabric where the reducer incurs them.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch._C._distributed_c10d import Reducer as TorchReducer
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..calibration.comm_hook_costs import real_hook
from ..reference.comm_hooks.allreduce import allreduce
from ..reference.comm_hooks.powersgd import PowerSGDState
from ..reference.data_parallel import DistributedDataParallel
from ..reference.message_sizes import READY_ORDER_BYTES, USED_MAP_BYTES
from ..reference.parameters import INTEGERS
from ..reference.recording.logging_data import buckets_of
from ..reference.recording.reducer_observer import Observer
from ..reference.trace import Workload
from ..simulator.fabric import Processor
from ..simulator.schedule.comm_hook_messages import NO_HOOK, CommHook, gradient_bytes
from ..simulator.schedule.policy import Policy
from ..simulator.schedule.schedule import CollectiveKind, Compute, ComputeKind
from .emulated_device import Activity, EmulatedModel, EmulatedOptimizer, IterationTimes
from .modelled_network import CollectiveMessage, ModelledGroup, NotModelledError, VirtualFuture
from .virtual_time import VirtualRank

Label = int | Literal["join end"] | None
"""What the ranks do between two common starts: a measured cycle, the end of an epoch under Join, or a warm-up."""


class TrainingPlan(NamedTuple):
    """What all ranks train."""

    workload: Workload
    policy: Policy
    plan: Sequence[Sequence[int]] | None
    """Explicit buckets in launch order. With None, the reducer assigns buckets by the caps."""
    reducer: Callable[..., nn.Module]  #: the class that averages gradients; see `emulate`
    hook: CommHook  #: the comm hook, with its costs
    processor: Processor  #: processor costs to charge
    warm_up: Mapping[int, IterationTimes]  #: by simulated rank, the times of each warm-up iteration
    cycles: int
    times: Callable[[int, int], Sequence[IterationTimes]]
    """Returns the times of a rank in each iteration of a cycle; all but the last are under `no_sync`."""
    inputs: Sequence[int] | None  #: by rank, the number of batches under Join; None without Join


class RankTraining:
    """One rank that trains; its methods run in the rank's thread, or in a callback of a collective."""

    def __init__(self, rank: VirtualRank, group: ModelledGroup, training: TrainingPlan) -> None:
        self.label: Label = None  #: what the rank does at present
        #: Kind and bucket of each collective since the last common start, by number.
        self.kinds: dict[int, tuple[CollectiveKind, int | None]] = {}
        self.buckets: Sequence[Sequence[int]] = ()  #: parameter indices by bucket, in launch order, at the end
        self._rank, self._training = rank, training
        self._launch_ns = training.processor.launch_on(group.size())
        self._hooked = False
        self._torch_ddp: Any = None  # a module whose reducer is written in C++
        self._doing: Literal["between", "forward", "backward", "step"] = "between"  # two iterations
        self._copies_buffers = False  # before the next forward pass
        self._unsynchronized: int | None = None  # index of the iteration under `no_sync`
        self._launching: int | None = None  # the bucket whose collectives are being launched
        self._launched_first = False
        self._second_due: list[tuple[int, int]] = []  # buckets whose second collective is due, with their bytes
        self._kind: tuple[CollectiveKind, int | None] = ("broadcast", None)
        self._last_of_bucket: dict[int, int] = {}  # number of the last collective of each bucket in this iteration
        self._results: dict[int, VirtualFuture] = {}  # what the comm hook returned for each bucket
        self._awaited: list[VirtualFuture] = []
        self._buckets_left = 0  # until torch's C++ reducer waits right after a launch; 0: it does not
        group.before_launch, group.after_launch = self._before_launch, self._after_launch

    def run(self) -> None:
        """Train all cycles; all ranks start each cycle together."""
        training = self._training
        if training.inputs is not None:
            self._run_under_join(training.inputs)
            return
        ddp: nn.Module | None = None
        for cycle in range(training.cycles):
            if ddp is None or training.policy.phase != "steady":
                ddp = self._prepare()
            self._start(cycle)
            for place, times in enumerate(training.times(self._rank.rank, cycle)):
                self._train(ddp, times, place)
            self._start(None)
            self.buckets = buckets_of(ddp) or ()

    def _run_under_join(self, inputs: Sequence[int]) -> None:
        training = self._training
        ddp = self._prepare()
        end = _EndOfIteration(ddp, lambda done: self._iteration_done(done, max(inputs)))
        self._start(0)
        with Join([ddp, end]):  # type: ignore[list-item]
            for number in range(inputs[self._rank.rank]):
                cycle, place = divmod(number, training.policy.sync_every)
                self._train(ddp, training.times(self._rank.rank, cycle)[place], place)
                end.notify()
        self._start(None)
        self.buckets = buckets_of(ddp) or ()

    def _iteration_done(self, done: int, most: int) -> None:
        cycle, place = divmod(done, self._training.policy.sync_every)
        if done == most:
            self._start("join end")
        elif not place:
            self._start(cycle if cycle < self._training.cycles else None)

    def _start(self, label: Label) -> None:
        self._rank.start_together()
        self.label = label
        self.kinds, self._awaited = {}, []

    # One iteration

    def _prepare(self) -> nn.Module:
        """Construct the reducer, and train until the phase that is measured."""
        training = self._training
        policy = training.policy
        self._device = EmulatedModel(training.workload, self.computing, sparse_density=policy.sparse_density)
        ddp = training.reducer(self._device, **ddp_arguments(training.reducer, policy, training.plan))
        if isinstance(ddp, DistributedDataParallel):
            ddp.reducer.observers.append(_Reports(self, ddp, training))
        elif isinstance(getattr(ddp, "reducer", None), TorchReducer):
            self._torch_ddp = ddp
            self._device.at_backward_end = self._wait_for_everything
        self._step: Callable[[], object] = self._device.step
        if policy.zero is not None:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch's module
                from torch.distributed.optim import ZeroRedundancyOptimizer
            local: Any = partial(EmulatedOptimizer, model=self._device)
            views = policy.zero == "buckets"
            self._step = ZeroRedundancyOptimizer(ddp.parameters(), local, parameters_as_bucket_view=views).step
        # On a rank without inputs, only a comm hook identifies the all-reduces of torch's buckets.
        self._hooked = training.hook != NO_HOOK or (self._torch_ddp is not None and training.inputs is not None)
        if self._hooked:
            hook, state = _real_hook(training.hook, policy)
            cast("Any", ddp).register_comm_hook(state, self._charged(hook))
        if self._torch_ddp is not None and policy.static_graph:
            self._buckets_left = _bucket_count(self._torch_ddp)
        warm_up = {"first": 0, "second": 1, "rebuild": 1 + policy.static_graph, "steady": 4}[policy.phase]
        for _ in range(warm_up):
            self._train(ddp, training.warm_up[self._rank.rank], policy.sync_every - 1)
        return ddp

    def _train(self, ddp: nn.Module, times: IterationTimes, place: int) -> None:
        synchronized = place == self._training.policy.sync_every - 1
        self._unsynchronized = None if synchronized else place
        self._device.times = times
        training, policy = self._training, self._training.policy
        self._doing = "forward"
        self._copies_buffers = policy.broadcast_buffers and not place and bool(training.workload.buffers)
        with nullcontext() if synchronized else cast("Any", ddp).no_sync():
            loss = ddp()
            if synchronized and policy.find_unused_parameters and not policy.static_graph:
                search_ns = training.processor.search_ns_per_parameter * len(training.workload.parameters)
                self.charge("search", None, round(search_ns))
            self._doing = "backward"
            loss.backward()
        self._doing = "step"
        (self._step if synchronized else self._device.step)()
        self._doing = "between"
        if synchronized:
            for parameter in self._device.parameters():
                parameter.grad = None

    @contextmanager
    def computing(self, duration_ns: int, activity: Activity) -> Iterator[None]:
        """Compute for the device; see `emulated_device.Computing`."""
        if self._copies_buffers:  # which arrived before this forward pass
            sizes = [buffer.size_bytes for buffer in self._training.workload.buffers]
            self.charge("copy_out", None, sum(map(self._training.processor.copy_out, sizes)))
            self._copies_buffers = False
        yield
        if self._unsynchronized is None:
            self.charge(activity, None, duration_ns)
        else:
            self._rank.compute(duration_ns, Compute("unsynchronized", iteration=self._unsynchronized))

    def charge(self, kind: ComputeKind, bucket: int | None, duration_ns: int) -> None:
        """Compute for the reducer."""
        self._rank.compute(duration_ns, Compute(kind, bucket))

    # Collectives

    def bucket_launches(self, bucket: int) -> None:
        """Called before the first collective of a bucket is launched."""
        self._launching, self._launched_first = bucket, False
        self._last_of_bucket.pop(bucket, None)

    def _charged(self, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a comm hook that computes for as long as its costs say."""
        costs = self._training.hook
        index_of = {id(parameter): index for index, parameter in enumerate(self._device.parameters())}

        def charged(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            number, density = bucket.index(), self._training.policy.sparse_density
            recorded = [self._training.workload.parameters[index_of[id(one)]] for one in bucket.parameters()]
            size = sum(gradient_bytes(recorded, density))
            message = costs.message(recorded, density)
            self.bucket_launches(number)
            self.charge("compress", number, costs.compress(size))
            self.charge("launch", number, self._launch_ns)
            self._second_due = [due for due in self._second_due if due[0] < number]  # not of an iteration before
            if message is not None and message.second_bytes is not None:
                self._second_due.append((number, size))
            future = hook(state, bucket)
            self._launching = None
            last = self._last_of_bucket.get(number)
            result = self._results[number] = VirtualFuture(self._rank, last, f"the comm hook of bucket {number}")
            result.after_wait = lambda: self.charge("decompress", number, costs.decompress(size))
            future.add_done_callback(lambda done: result.complete(done.value))
            self._awaited.append(result)
            self._bucket_launched()
            return result

        return charged

    def _before_launch(self, message: CollectiveMessage, tensors: Sequence[Tensor]) -> None:
        self._kind = kind, bucket = self._classified(message, tensors)
        if kind == "all_reduce" and not self._hooked:
            self.charge("launch", bucket, self._launch_ns)
        elif self._doing == "step":
            self.charge("launch", None, self._training.processor.launch_ns)

    def _classified(self, message: CollectiveMessage, tensors: Sequence[Tensor]) -> tuple[CollectiveKind, int | None]:
        if self._launching is not None and not self._launched_first:
            self._launched_first = True
            return "all_reduce", self._launching
        if self._launching is not None:
            bucket, size = self._second_due.pop(0)
            self.charge("recompress", bucket, self._training.hook.recompress(size))
            return "second_all_reduce", bucket
        if message.name == "send":
            raise NotModelledError("emulation: ranks that act alike share a thread, so none can send to another")
        if message[::2] == ("broadcast", ""):
            launched = {kind for kind, _ in self.kinds.values()}
            policy = self._training.policy
            is_order = policy.rebuilds and policy.phase == "rebuild" and "order" not in launched
            return ("order" if is_order and tensors[0].dtype == INTEGERS[READY_ORDER_BYTES] else "broadcast"), None
        if tensors and tensors[0].dtype == INTEGERS[USED_MAP_BYTES]:
            return "bitmap", None
        if self._doing != "backward":
            return "join", None
        return "all_reduce", sum(kind == "all_reduce" for kind, _ in self.kinds.values())

    def _after_launch(self, number: int, future: VirtualFuture) -> None:
        self.kinds[number] = kind, bucket = self._kind
        if bucket is not None:
            self._last_of_bucket[bucket] = number
            if kind == "second_all_reduce" and bucket in self._results:
                self._results[bucket].number = number
        if kind == "all_reduce" and not self._hooked:
            self._launching = None
            self._awaited.append(future)
            self._bucket_launched()
        elif kind == "order":
            future.after_wait = lambda: self.charge("rebuild", None, self._training.processor.rebuild_ns)

    def _wait_for_everything(self) -> None:
        """Wait for all buckets in order, as torch's C++ reducer does next, where virtual time cannot see it."""
        while self._awaited:
            self._awaited.pop(0).wait()

    def _bucket_launched(self) -> None:
        """Wait after the last launch where torch's C++ reducer waits as soon as all buckets are launched.

        It does so in the first iteration of a static graph, and on a rank without inputs.
        """
        if not self._buckets_left and self._doing == "between" and self._torch_ddp is not None:
            self._buckets_left = _bucket_count(self._torch_ddp)
        if self._buckets_left:
            self._buckets_left -= 1
            if not self._buckets_left:
                self._wait_for_everything()


def _real_hook(hook: CommHook, policy: Policy) -> tuple[Callable[[Any, Any], Any], Any]:
    if type(hook) is CommHook:  # sends gradients unchanged, but may compute
        return allreduce, None
    function, make_state = real_hook(hook.name)
    state = make_state()
    if policy.phase != "steady" and isinstance(state, PowerSGDState):
        state.start_powerSGD_iter = 0  # usually the third iteration, which comes after the phase
    return function, state


class _Reports(Observer):
    """Reports the launches of our reducer, also on a rank without inputs, and charges its copies."""

    def __init__(self, training: RankTraining, ddp: DistributedDataParallel, costs: TrainingPlan) -> None:
        self._training, self._ddp, self._costs = training, ddp, costs

    def bucket_sending(self, bucket: int) -> None:
        self._training.bucket_launches(bucket)

    def bucket_ready(self, bucket: int) -> None:
        self._charge("pack", bucket, self._costs.processor.pack)

    def bucket_copied_out(self, bucket: int) -> None:
        if not self._costs.policy.gradient_as_bucket_view:
            self._charge("copy_out", bucket, self._costs.processor.copy_out)

    def _charge(self, kind: ComputeKind, bucket: int, cost_ns: Callable[[int], int]) -> None:
        parameters, density = self._costs.workload.parameters, self._costs.policy.sparse_density
        sizes = gradient_bytes([parameters[one] for one in self._ddp.reducer.buckets[bucket].indices], density)
        self._training.charge(kind, bucket, sum(map(cost_ns, sizes)))


class _EndOfIteration(Joinable, JoinHook):
    """Calls a function with the number of iterations after each one under Join, on ranks with inputs and without.

    The reducer `ddp` comes first in Join's list.
    """

    def __init__(self, ddp: Any, done: Callable[[int], None]) -> None:
        super().__init__()
        self._ddp, self._done, self._count = ddp, done, 0

    def notify(self) -> None:
        """Call the function; on a rank without inputs, after the reducer has matched its collectives."""
        self._count += 1
        self._done(self._count)

    main_hook = notify

    def join_hook(self, **_: Any) -> JoinHook:
        return self

    join_device: Any = torch.device("cpu")
    join_process_group: Any = property(attrgetter("_ddp.process_group"))


ONE_BUCKET_MB = 2.0**30
"""A cap that no model reaches, for torch's class, which does not take an infinite one."""


def ddp_arguments(
    reducer: Callable[..., nn.Module], policy: Policy, plan: Sequence[Sequence[int]] | None
) -> dict[str, Any]:
    """Return the arguments of `replicate_modules`, or of a class like DDP, that differ from its defaults."""
    if policy.grouping == "module":
        return {} if policy.reduce_dtype is None else {"reduce_dtype": policy.reduce_dtype}
    cap, caps_mb = policy.bucket_cap_mb, policy.bucket_cap_mb_list
    caps: dict[str, Any] = {"bucket_cap_mb": None if cap is None else min(cap, ONE_BUCKET_MB)}
    if plan is not None:
        caps = {"plan": plan}
    elif caps_mb:
        caps = {"bucket_cap_mb_list": [min(one, ONE_BUCKET_MB) for one in caps_mb]}
    flags = ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params", "gradient_as_bucket_view")
    chosen = {name: True for name in flags if getattr(policy, name)}
    if policy.broadcast_buffers:
        return caps | chosen
    taken = inspect.signature(reducer).parameters
    older = "broadcast_buffers" in taken and "forward_sync_buffers" not in taken  # as in torch 2.11
    return caps | chosen | {"broadcast_buffers" if older else "forward_sync_buffers": False}


def _bucket_count(ddp: Any) -> int:
    data = ddp._get_ddp_logging_data()
    return len((data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(","))
