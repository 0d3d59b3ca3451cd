"""The reducer: averages gradients over the ranks, bucket by bucket, while the backward pass still runs.

An iteration, told once:

1. Forward: `prepare_for_forward`, then `rebuild_if_due`; afterwards `prepare_for_backward` expects gradients.
2. Backward: each gradient that autograd accumulates is put into its bucket. When bucket 0 has all of its
   gradients its all-reduce is launched, then bucket 1's, and so on: strictly in bucket order, so that all ranks
   issue the same collectives in the same order whatever order their gradients come in.
3. When the last bucket is launched, the reducer asks autograd to call it back at the end of the backward pass;
   there it waits for the buckets in order and copies the averages back into the gradients.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from .buckets import Bucket, Features, Layout
from .checks.backward import ErrorMessages, GradientCheck, NoSyncCheck
from .checks.launch_order import LaunchOrder
from .comm_hooks.interface import Hook, HookCaller
from .observer import Future, Observer, fail
from .torch_compat import ReducerNames
from .unused_parameters import make_tracker, reachable

_engine: Any = torch.autograd.Variable._execution_engine


class Reducer(ReducerNames):
    """Averages the gradients of `parameters` over `group` during every backward pass it was prepared for.

    Args:
        parameters: Trainable parameters by name; their order gives them their parameter index.
        buckets: Parameter indices by bucket, in launch order.
        rebuild_caps_bytes: Caps for the rebuild in ready order. None: `buckets` stays.
        group: Ranks to average over; each must construct its reducer with the same arguments.
        sparse: Parameter indices whose gradients are sparse tensors.
        features: What it does beyond the plain case.
        wants_averages: Whether gradients that arrive now should be averaged, as far as the user's script tells.

    Attributes:
        layout: The buckets in force.
        iterations: Forward passes so far whose gradients are averaged.
        ready_order: Parameter indices as their gradients became ready in the current or last such iteration.
        reduced_buckets: Buckets that were sent in the last such iteration.
        tracker: Which parameters take part in a backward pass.
        observers: Who watches; append at any time between iterations.
        communication: Sends buckets, and checks their order if asked to.
        after_backward: Futures that the coming backward pass waits for at its end.
        optimizers_in_backward: Whether the comm hook steps optimisers, and sets the gradients it has used to None.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        buckets: Sequence[Sequence[int]],
        *,
        rebuild_caps_bytes: Sequence[int] | None,
        group: dist.ProcessGroup,
        sparse: frozenset[int] = frozenset(),
        features: Features = Features(),  # noqa: B008 - frozen
        wants_averages: Callable[[], bool] = lambda: True,
    ) -> None:
        self._parameters = list(parameters.values())
        self._group = group
        self.features = features
        self.layout = Layout(
            self._parameters, buckets, rebuild_caps_bytes=rebuild_caps_bytes, sparse=sparse, features=features
        )
        self._accumulators = accumulators(self._parameters)
        self.tracker = make_tracker(features, self._parameters, self._accumulators, group)
        self.iterations = 0
        self.ready_order: list[int] = []
        self.reduced_buckets = 0
        self.observers: list[Observer] = []
        self.after_backward: list[Future] = []
        self.optimizers_in_backward = False
        self._messages = ErrorMessages(parameters, dist.get_rank(group))
        self.communication = Communication(group, self.observers)
        self._gradients = GradientCheck(self._messages)
        self._wishes = NoSyncCheck(self._messages, wants_averages)
        self._expecting = False  # gradients that arrive are averaged
        self._shadows = 0  # iterations of other ranks that this one only matched
        self._began = False  # one has arrived since forward
        self._in_pass = False  # autograd is at work
        self._reached: frozenset[int] | None = None
        self._watches: list[Callable[[int], None]] = []
        several_devices = len({parameter.device for parameter in self._parameters}) > 1
        self.detach = listen(self._accumulators, self, threads=several_devices)
        """Stop listening to autograd, for good; happens by itself when the reducer is garbage."""

    # Construction

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have a hook communicate; see `DistributedDataParallel.register_comm_hook`."""
        if self.iterations > 0:
            raise RuntimeError("a comm hook should be registered before the training loop starts")
        self.communication.register(state, hook)

    def set_static_graph(self) -> None:
        """Take the graph as static from the first iteration on."""
        if self.iterations > 0:
            fail(
                self.observers,
                "static_graph should be called before training loop starts, on the wrapped module",
            )
        self.features = self.layout.features = replace(self.features, static_graph=True)
        self.tracker = make_tracker(self.features, self._parameters, self._accumulators, self._group)

    # Forward pass

    def prepare_for_forward(self, *, averaging: bool) -> None:
        """A forward pass begins; `averaging` tells whether its gradients will be averaged."""
        if averaging:
            self.iterations += 1
            self._tell("forward_started")

    def rebuild_if_due(self) -> None:
        """Rebuild the buckets in ready order, once, as soon as that is known; all ranks must call it together.

        Raises:
            RuntimeError: The last backward pass left gradients out, so its averages never arrived; or the module
                has been converted to another dtype or device since it was wrapped.
        """
        self.check_finished()
        if converted := self._gradients.converted(self.layout.buckets):
            fail(self.observers, converted)
        known = [] if self._expecting else self.ready_order
        if self.layout.rebuild_if_due(known, self._group):
            self._gradients.thorough = True

    def prepare_for_backward(self, outputs: Sequence[Tensor], count_ranks: Callable[[], int] | None = None) -> None:
        """Expect every gradient in the coming backward pass, and average them.

        Args:
            outputs: Tensors that forward returned.
            count_ranks: How many ranks to divide by, asked when gradients arrive. None: the group's size.
        """
        for bucket in self.layout.buckets:
            bucket.reset()
        self._next_bucket = 0
        self.communication.begin()
        self._expecting, self._began, self._in_pass, self._end_queued = True, False, False, False
        self._wishes.forward_done(averaging=True)
        self._count_ranks = count_ranks or partial(dist.get_world_size, self._group)
        self._watches = [o.parameter_ready for o in self.observers if o.watches_parameters]
        self.ready_order = []
        self.tracker.forward_done(outputs)
        self._reached = self._search(outputs)

    def expect_nothing(self) -> None:
        """Leave the gradients of the coming backward pass alone."""
        self._expecting, self._began, self._in_pass = False, False, False
        self._wishes.forward_done(averaging=False)
        self._watches = [o.parameter_ready for o in self.observers if o.watches_parameters]

    # Backward pass

    def average_at_the_end(self) -> None:
        """At the start of a backward pass: have everything launched at its end, if it cannot be during the pass."""
        if self._expecting and not self.tracker.launches_during_backward and not self._end_queued:
            self._end_queued = True
            _engine.queue_callback(self._launch_everything)

    def arrived(self, index: int, gradient: Tensor | None) -> None:
        """The path of every gradient, None for an undefined one: as few steps as can be."""
        if not self._in_pass:
            self._begin_pass()
        to_come = self.tracker.arrived(index, gradient, self._expecting)
        if self._watches and gradient is not None:
            for watch in self._watches:
                watch(index)
        if to_come < 0:
            fail(self.observers, self._messages.graph_changed(index, self.layout.places[index][0]))
        if self._expecting and to_come == 0:
            self.ready_order.append(index)
            self._mark_ready(index)

    def _begin_pass(self) -> None:
        self._in_pass = True
        _engine.queue_callback(self._end_pass)
        self._wishes.gradient_arrived()
        if self._expecting and not self._began:
            self._begin_backward()

    def _end_pass(self) -> None:
        """Another backward pass may bring the rest; until then the user's script may change the gradients."""
        self._in_pass = False
        if self._expecting and self._began:
            for number in range(self._next_bucket, len(self.layout.buckets)):
                self._pack(self.layout.buckets[number], number)

    def _begin_backward(self) -> None:
        self._began = True
        # Multiplying beats dividing, and gives the same bits as torch's default path, which does so too.
        self._scale = 1.0 if self.communication.hooked else 1.0 / self._count_ranks()
        self._tell("backward_started")
        skip = self.tracker.unused if self.features.skip_all_reduce_unused_params else frozenset()
        buckets = self.layout.buckets
        self._to_send = [number for number, bucket in enumerate(buckets) if not skip.issuperset(bucket.indices)]
        for index in sorted(self.tracker.unused):
            self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        number, slot = self.layout.places[index]
        bucket = self.layout.buckets[number]
        if not bucket.is_pending(slot):
            fail(self.observers, self._messages.ready_twice(index, number, unused=index in self.tracker.unused))
        ready = bucket.put(slot)
        if ready or bucket.pack_early:
            self._pack(bucket, number)
        if ready:
            self._tell("bucket_ready", number)
            self._launch_in_order()

    def _pack(self, bucket: Bucket, number: int) -> None:
        # All gradients in the first iteration, later one a bucket: modules are converted as a whole.
        slots = bucket.waiting if self._gradients.thorough else bucket.waiting[:1]
        if complaint := self._gradients.complaint(bucket, number, slots):
            fail(self.observers, complaint)
        bucket.pack(self._scale)

    def _launch_in_order(self) -> None:
        buckets = self.layout.buckets
        while self._next_bucket < len(buckets) and buckets[self._next_bucket].ready:
            self._launch(self._next_bucket)
            self._next_bucket += 1
        if self._next_bucket == len(buckets):
            self.tracker.launched_all()
            _engine.queue_callback(self._finalize)

    def _launch(self, number: int) -> None:
        if number not in self._to_send:
            return
        self._tell("bucket_launching", number)
        future = self.communication.send(self.layout.buckets[number], number, is_last=number == self._to_send[-1])
        self._tell("bucket_launched", number, future)

    def _launch_everything(self) -> None:
        if not self._began:
            self._begin_backward()
        for index in range(len(self._parameters)):
            self._mark_ready(index)

    @torch.no_grad()
    def _finalize(self) -> None:
        self._expecting = False
        self._tell("backward_computed")
        untouched = self.tracker.untouched()
        if self.optimizers_in_backward:
            untouched |= {index for index, parameter in enumerate(self._parameters) if parameter.grad is None}
        self.reduced_buckets = self.communication.sent
        for number, bucket in enumerate(self.layout.buckets):
            if self.communication.was_sent(number):
                averages = self.communication.wait(number)
                self._tell("bucket_done", number)
                bucket.copy_out(averages, unused=untouched)
                self._tell("bucket_copied_out", number)
        while self.after_backward:
            self.after_backward.pop(0).wait()
        self.communication.begin()  # futures hold the buffers, which the rebuild wants freed
        self.tracker.finished()
        self._gradients.thorough = False

    def check_finished(self) -> None:
        """Raise RuntimeError, with what is missing, if the last backward pass left gradients out."""
        if self._expecting and self._began:
            buckets = self.layout.buckets
            missing = [i for i, (number, slot) in enumerate(self.layout.places) if buckets[number].is_pending(slot)]
            unlaunched = range(self._next_bucket, len(buckets))
            fail(self.observers, self._messages.unfinished(missing, self._reached, unlaunched, self.features))

    # Join

    def shadow_backward(self) -> None:
        """For a rank without inputs: match the collectives of the others' backward pass, with zeros."""
        self.communication.begin()
        last = len(self.layout.buckets) - 1
        for number, bucket in enumerate(self.layout.buckets):
            self.communication.send(bucket.zeros(), number, is_last=number == last)
        self.tracker.launched_all()
        for number in range(last + 1):
            self.communication.wait(number)
        self.tracker.untouched()
        while self.after_backward:
            self.after_backward.pop(0).wait()
        self.tracker.finished()
        self._shadows += 1
        if self._shadows + self.iterations > self.tracker.iterations_without_order:
            self.ready_order = list(range(len(self._parameters)))  # as ready for the rebuild as the others

    # Watching, and errors

    def _tell(self, step: str, *details: Any) -> None:
        for observer in self.observers:
            getattr(observer, step)(*details)

    def _search(self, outputs: Sequence[Tensor]) -> frozenset[int] | None:
        """Parameters behind the outputs, for error messages; only where it is worth the time.

        The first iteration is where a parameter shows that is never used.
        """
        if self.iterations > 1 and get_debug_level() == DebugLevel.OFF:
            return None
        return reachable(outputs, {node: index for index, node in enumerate(self._accumulators)})


class AllReduce:
    """What happens without a comm hook, with the methods of `HookCaller`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def call(self, bucket: Bucket, _number: int, *, is_last: bool) -> Future:
        """Start to add a bucket up over the ranks, in place."""
        return bucket.all_reduce(self._group)

    def wait(self, future: Future, _bucket: Bucket, _number: int) -> Tensor | None:
        """Block until it is done; the sums are in the bucket's own buffer."""
        future.wait()
        return None


class Communication:
    """Sends buckets over `group` and remembers those in flight.

    Args:
        group: The ranks.
        observers: Who is told of errors; the list may grow.

    Attributes:
        order: TargetRun of every launch, and asked when one fails.
        sent: Buckets sent since `begin`.
    """

    def __init__(self, group: dist.ProcessGroup, observers: list[Observer]) -> None:
        self._group = group
        self._observers = observers
        self._way: AllReduce | HookCaller = AllReduce(group)
        self.order = LaunchOrder()
        self.begin()

    def begin(self) -> None:
        """A new iteration."""
        self._in_flight: dict[int, tuple[Future, Bucket, int]] = {}

    @property
    def sent(self) -> int:
        """Buckets sent since `begin`."""
        return len(self._in_flight)

    @property
    def hooked(self) -> bool:
        """Whether a comm hook does the work, and so the averaging."""
        return isinstance(self._way, HookCaller)

    def register(self, state: Any, hook: Hook) -> None:
        """Have a hook send all buckets from now on.

        Raises:
            RuntimeError: There is one already.
        """
        if self.hooked:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._way = HookCaller(hook, state, self._group)

    def send(self, bucket: Bucket, number: int, *, is_last: bool) -> Future:
        """Start; returns at once.

        Raises:
            RuntimeError: The comm hook failed.
        """
        self.order.launching(number, bucket.size_bytes)
        try:
            future = self._way.call(bucket, number, is_last=is_last)
        except RuntimeError as error:
            self._tell(error)
            raise
        self._in_flight[number] = future, bucket, self.order.launches
        return future

    def was_sent(self, number: int) -> bool:
        """Whether a bucket was sent since `begin`."""
        return number in self._in_flight

    def wait(self, number: int) -> Tensor | None:
        """Block until a bucket has arrived (on CUDA: make the current stream wait).

        Returns:
            The averages, flat. None: they are in the bucket's own buffer.

        Raises:
            RuntimeError: It did not; with what is known of the ranks that left the order of launches.
            TypeError: The comm hook's future holds something else.
        """
        future, bucket, launch = self._in_flight[number]
        try:
            return self._way.wait(future, bucket, number)
        except TypeError as error:
            self._tell(error)
            raise
        except RuntimeError as error:
            self._let_all_end()
            if explanation := self.order.explain(launch):
                fail(self._observers, f"{explanation}. {error}")
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        for observer in self._observers:
            observer.failed(str(error))

    def _let_all_end(self) -> None:
        """Those in flight work on buffers that the next iteration uses; what a hook does may never end."""
        if not self.hooked:
            for future, _, _ in self._in_flight.values():
                with suppress(Exception):
                    future.wait()


AutogradHook = Callable[[Any, Any], None]
"""What an autograd node calls after its work: `hook(outputs, gradients)`."""


class Listener(Protocol):
    """Who wants to be told."""

    def arrived(self, index: int, gradient: Tensor | None) -> None:
        """A parameter's gradient has been accumulated; None: an undefined one passed, and nothing was added."""


def accumulators(parameters: Sequence[Parameter]) -> list[Node]:
    """The autograd node that accumulates each parameter's gradient. It only lives while someone holds it."""
    return [get_gradient_edge(parameter).node for parameter in parameters]


def listen(nodes: Sequence[Node], listener: Listener, *, threads: bool) -> weakref.finalize:  # type: ignore[type-arg]  # not generic
    """Call `listener.arrived` after each of `nodes` has accumulated a gradient, hooks of the user's included.

    Args:
        nodes: The accumulating nodes, by parameter index; whoever listens must hold them.
        listener: Held weakly: hooks do not keep it alive.
        threads: Whether gradients come from several threads, as for a module on several devices; then the
            listener is told of one at a time.

    Returns:
        A function that ends it; also called when the listener is garbage.
    """
    hooks = [_hook(weakref.ref(listener), index) for index in range(len(nodes))]
    if threads:
        lock = threading.RLock()
        hooks = [_locked(hook, lock) for hook in hooks]
    handles = [node.register_hook(hook) for node, hook in zip(nodes, hooks, strict=True)]
    return weakref.finalize(listener, _remove, handles)


def _hook(listener: "weakref.ref[Listener]", index: int) -> AutogradHook:
    def gradient_arrived(_outputs: Any, gradients: Any) -> None:
        if (alive := listener()) is not None:
            alive.arrived(index, gradients[0])

    return gradient_arrived


def _locked(hook: AutogradHook, lock: Any) -> AutogradHook:
    def gradient_arrived(outputs: Any, gradients: Any) -> None:
        with lock:
            hook(outputs, gradients)

    return gradient_arrived


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
