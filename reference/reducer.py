"""The reducer: averages gradients over the ranks, bucket by bucket, while the backward pass still runs.

One iteration:

1. Forward. `prepare_for_forward` and `rebuild_if_due` run before the module, `prepare_for_backward` after it. The
   last one creates a `BackwardPass`; while no synchronised backward pass is due there is none.
2. Backward. Autograd calls `gradients_arrived` after it has accumulated the gradient of a parameter. When all
   gradients of bucket 0 are ready, its all-reduce is launched, then that of bucket 1, and so on, strictly in bucket
   order. So all ranks issue the same collectives in the same order, whatever order their gradients arrive in.
3. End. When the backward pass of autograd ends, `_backward_ends` waits for the buckets in order, copies the averages
   back into the gradients and drops the `BackwardPass`.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .buckets import Bucket, Buckets, Features, SecondGradientError
from .checks.backward import ErrorMessages, GradientCheck, NoSyncCheck
from .checks.launch_order import LaunchOrder
from .comm_hooks.interface import Hook, HookCaller
from .observer import Future, Observer, fail
from .torch_compat import ReducerNames
from .unused_parameters import make_tracker, reachable

AutogradHook = Callable[[Any, Any], None]
"""Called by an autograd node after its work: `hook(outputs, gradients)`."""

MOST_BUCKETS_TO_COUNT = 8
"""With more buckets left, counting how many gradients each of them lacks costs more than the calls that it saves."""
NEVER = 2**62
"""A number of gradients that never arrives."""

_engine: Any = torch.autograd.Variable._execution_engine
_NO_GRAPH_TASK = -1  # what torch returns outside of a backward pass


class Inbox:
    """Parameter indices whose gradients have arrived since the reducer last looked.

    The hook of each gradient appends its parameter index, and calls the reducer only when `limit` gradients have
    arrived. Between two layers of the backward pass, the layers' own code and data have displaced the interpreter
    from the CPU caches, so a Python call there costs many times as much as in a loop.

    Attributes:
        indices: Parameter indices, in the order in which their gradients arrived.
        limit: Number of gradients at which the reducer has something to do.
    """

    __slots__ = ("indices", "limit")

    def __init__(self) -> None:
        self.indices: list[int] = []  # never replaced by another list, because the hooks hold this one
        self.limit = 1

    def take(self) -> list[int]:
        """Remove and return all indices."""
        taken = self.indices.copy()
        self.indices.clear()
        return taken

    def reset(self) -> None:
        """Forget all gradients, and call the reducer for the next one."""
        self.indices.clear()
        self.limit = 1


class InFlight(NamedTuple):
    """A collective that was launched; `launch` is its number in the checked launch order, 0 without `debug`."""

    future: Future
    bucket: Bucket
    launch: int


@dataclass(slots=True, kw_only=True)
class BackwardPass:
    """One synchronised backward pass, from its forward pass until the averages are in the gradients.

    Attributes:
        count_ranks: Returns the number of ranks to divide by; called when the first gradient arrives.
        reachable: Parameter indices behind forward's outputs, for error messages. None: not searched.
        ready_order: Parameter indices in the order in which their gradients became ready.
        begun: Whether a gradient has arrived.
        launches_at_end: Whether all buckets are to be launched at the end: a static graph's first iteration.
        scale: Factor on each gradient that is packed.
        to_send: Indices of the buckets that are sent, in launch order.
        next_bucket: Index of the first bucket that has not been launched.
        in_flight: Launched collectives by bucket index.
        interrupted: Whether an exception ended the pass after only some of its buckets were launched.
        graph_changed: Whether a static graph produced more gradients than in its first iteration.
        error: The exception, if the reducer itself raised it.
    """

    count_ranks: Callable[[], int]
    reachable: frozenset[int] | None
    ready_order: list[int] = field(default_factory=list)
    begun: bool = False
    launches_at_end: bool = False
    scale: float = 1.0
    to_send: Sequence[int] = ()
    next_bucket: int = 0
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    interrupted: bool = False
    graph_changed: bool = False
    error: BaseException | None = None


class Reducer(ReducerNames):
    """Averages the gradients of `parameters` over `group` during every backward pass it was prepared for.

    Args:
        parameters: Trainable parameters by name; their order defines the parameter index.
        assignment: Parameter indices by bucket, in launch order.
        rebuild_caps_bytes: Caps for the rebuild in ready order. None: `assignment` stays.
        group: Ranks to average over; each must construct its reducer with the same arguments.
        sparse: Parameter indices whose gradients are sparse tensors.
        features: Optional behaviour.
        sync_enabled: False inside `no_sync()`.

    Attributes:
        buckets: The buckets in force.
        tracker: Finds unused parameters; see `unused_parameters`.
        iterations: Synchronised forward passes so far.
        ready_order: Parameter indices in ready order, as of the last synchronised backward pass.
        reduced_buckets: Number of buckets that were sent in that pass.
        observers: Called at each step; append between iterations.
        launch_order: Notified of every launch.
        after_backward: Futures that the coming backward pass waits for at its end.
        inbox: Gradients that have arrived but were not processed yet.
        optimizers_in_backward: Whether the comm hook steps optimisers and sets the gradients it has used to None.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        assignment: Sequence[Sequence[int]],
        *,
        rebuild_caps_bytes: Sequence[int] | None,
        group: dist.ProcessGroup,
        sparse: frozenset[int] = frozenset(),
        features: Features = Features(),  # noqa: B008 - frozen
        sync_enabled: Callable[[], bool] = lambda: True,
    ) -> None:
        self._parameters = list(parameters.values())
        self._group = group
        self.features = features
        self.buckets = Buckets(
            self._parameters, assignment, rebuild_caps_bytes=rebuild_caps_bytes, sparse=sparse, features=features
        )
        self._accumulators = accumulators(self._parameters)
        self.tracker = make_tracker(features, self._parameters, self._accumulators, group)
        self.iterations = 0
        self.ready_order: list[int] = []
        self.reduced_buckets = 0
        self.observers: list[Observer] = []
        self.launch_order = LaunchOrder()
        self.after_backward: list[Future] = []
        self.optimizers_in_backward = False
        self._collective: AllReduce | HookCaller = AllReduce(group)
        self._messages = ErrorMessages(parameters, dist.get_rank(group))
        self._gradient_check = GradientCheck(self._parameters, self._messages)
        self._no_sync_check = NoSyncCheck(self._messages, sync_enabled)
        self.inbox = Inbox()
        self._pass: BackwardPass | None = None
        self._in_backward = False  # autograd runs a backward pass that has reached this module
        self._joined_iterations = 0  # iterations of other ranks that this rank only matched
        self._parameter_observers: list[Callable[[int], None]] = []
        several_devices = len({parameter.device for parameter in self._parameters}) > 1
        self.detach = attach_hooks(self._accumulators, self, locked=several_devices)
        """Remove the autograd hooks for good; also happens when the reducer is garbage-collected."""

    # Construction

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have a hook communicate; see `DistributedDataParallel.register_comm_hook`."""
        if self.iterations > 0:
            raise RuntimeError("a comm hook should be registered before the training loop starts")
        if isinstance(self._collective, HookCaller):
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._collective = HookCaller(hook, state, self._group)

    def set_features(self, features: Features) -> None:
        """Change how unused parameters are found, between two iterations.

        Raises:
            RuntimeError: `static_graph` is set after the first iteration.
        """
        if features.static_graph and not self.features.static_graph and self.iterations > 0:
            fail(
                self.observers,
                "static_graph should be called before training loop starts, on the wrapped module",
            )
        self.features = self.buckets.features = features
        self.tracker = make_tracker(features, self._parameters, self._accumulators, self._group)

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on, as if the reducer had just been constructed.

        The buckets are those of construction again, because ranks that come from different groups may have rebuilt
        theirs at different times. A backward pass that is under way is forgotten.
        """
        self._group = self._collective.group = group
        self._messages.rank = dist.get_rank(group)
        self._pass = None
        self._in_backward = False
        self.iterations = self._joined_iterations = 0
        self.ready_order = []
        self.after_backward.clear()
        self.inbox.reset()
        self.buckets.reset()
        self.tracker = make_tracker(self.features, self._parameters, self._accumulators, group)
        self._gradient_check.thorough = True

    # Forward pass

    def prepare_for_forward(self, *, synchronized: bool) -> None:
        """Start a forward pass; `synchronized`: its gradients will be averaged."""
        if synchronized:
            self.iterations += 1
            for observer in self.observers:
                observer.forward_started()

    def rebuild_if_due(self) -> None:
        """Rebuild the buckets once, in ready order, as soon as that is known; all ranks must call this together.

        Raises:
            RuntimeError: The last backward pass left gradients out or was interrupted, so the averages never arrived;
                or the module was converted to another dtype or device after it was wrapped.
        """
        self.check_finished()
        if converted := self._gradient_check.converted_module(self.buckets):
            fail(self.observers, converted)
        if self.buckets.rebuild_if_due([] if self._pass else self.ready_order, self._group):
            self._gradient_check.thorough = True

    def prepare_for_backward(self, outputs: Sequence[Tensor], count_ranks: Callable[[], int] | None = None) -> None:
        """Expect one backward pass whose gradients are averaged.

        Args:
            outputs: Tensors that forward returned.
            count_ranks: Returns how many ranks to divide by; called when gradients arrive. None: the group's size.
        """
        for bucket in self.buckets:
            bucket.reset()
        self.inbox.reset()
        self._no_sync_check.forward_done(synchronized=True)
        self._parameter_observers = [o.parameter_ready for o in self.observers if o.watches_parameters]
        self.tracker.forward_done(outputs)
        if converted := self._gradient_check.converted_parameter(self.buckets, sorted(self.tracker.unused)):
            fail(self.observers, converted)  # autograd lost its gradient, so the parameter would count as unused
        self._pass = BackwardPass(
            count_ranks=count_ranks or partial(dist.get_world_size, self._group), reachable=self._search(outputs)
        )

    def prepare_without_averaging(self) -> None:
        """Leave the gradients of the coming backward pass alone."""
        self._pass = None
        self.inbox.reset()
        self._no_sync_check.forward_done(synchronized=False)
        self._parameter_observers = [o.parameter_ready for o in self.observers if o.watches_parameters]

    # Backward pass

    def backward_starts(self) -> None:
        """Called when autograd reaches forward's outputs, or else with the first gradient.

        Called at forward's outputs, it runs in the outermost backward pass. So `_backward_ends` runs after all
        re-entrant passes that activation checkpoints start in between.
        """
        if not self._in_backward:
            self._in_backward = True
            _engine.queue_callback(self._backward_ends)

    def outermost_backward_starts(self) -> None:
        """Called by the sink: if no bucket may be launched during this pass, launch all of them at its end."""
        self.backward_starts()
        if self._pass is not None and not self.tracker.launches_during_backward:
            self._pass.launches_at_end = True

    def gradients_arrived(self, gradient: Tensor | None) -> None:
        """Called by autograd when `inbox.limit` gradients have arrived; `gradient`: the last one, or None."""
        if not self._in_backward:
            self.backward_starts()
        backward = self._pass
        try:
            if backward is not None and not backward.begun:
                self._begin(backward)
            self._take_from_inbox(backward, gradient)
        except BaseException as error:
            if backward is not None:
                backward.error = error
            raise
        self.inbox.limit = self._gradients_until_next_step(backward)

    def _take_from_inbox(self, backward: BackwardPass | None, gradient: Tensor | None = None) -> None:
        arrived = self.inbox.take()
        if backward is not None and not self.tracker.counts_gradients and not self._parameter_observers:
            backward.ready_order += arrived
            self._mark_ready(backward, arrived)
            return
        for index in arrived:
            remaining = 0
            if self.tracker.counts_gradients:
                remaining = self.tracker.gradient_arrived(index, gradient, backward is not None)
            if self._parameter_observers and gradient is not None:
                for parameter_ready in self._parameter_observers:
                    parameter_ready(index)
            if backward is None:
                self._no_sync_check.gradient_arrived()
            elif remaining == 0:
                backward.ready_order.append(index)
                self._mark_ready(backward, [index])
            elif remaining < 0:
                backward.graph_changed = True
                fail(self.observers, self._messages.graph_changed(index, self.buckets.bucket_of[index]))

    def _gradients_until_next_step(self, backward: BackwardPass | None) -> int:
        """How many gradients can arrive before the reducer has anything to do."""
        if self.tracker.counts_gradients or self._parameter_observers:
            return 1
        if backward is None:
            return NEVER
        if len(self.buckets) - backward.next_bucket > MOST_BUCKETS_TO_COUNT:
            return 1
        return min((bucket.puts_until_pack for bucket in self.buckets if not bucket.ready), default=1)

    def _begin(self, backward: BackwardPass) -> None:
        backward.begun = True
        self._no_sync_check.gradient_arrived()
        # Multiplying is faster than dividing, and gives the same bits as torch's default path, which multiplies too.
        hooked = isinstance(self._collective, HookCaller)
        backward.scale = 1.0 if hooked else 1.0 / backward.count_ranks()
        for observer in self.observers:
            observer.backward_started()
        skip = self.tracker.unused if self.features.skip_all_reduce_unused_params else frozenset()
        backward.to_send = [n for n, bucket in enumerate(self.buckets) if not skip.issuperset(bucket.indices)]
        self._mark_ready(backward, sorted(self.tracker.unused))

    def _mark_ready(self, backward: BackwardPass, indices: Sequence[int]) -> None:
        for number, together in groupby(indices, self.buckets.bucket_of.__getitem__):
            bucket = self.buckets[number]
            try:
                should_pack = bucket.put(list(map(self.buckets.slot_of.__getitem__, together)))
            except SecondGradientError as error:
                unused = error.index in self.tracker.unused
                fail(self.observers, self._messages.ready_twice(error.index, number, unused=unused))
            if should_pack:
                self._pack(bucket, number, backward.scale)
            if bucket.ready:
                for observer in self.observers:
                    observer.bucket_ready(number)
                self._launch_ready_buckets(backward)

    def _pack(self, bucket: Bucket, number: int, scale: float) -> None:
        # All gradients in the first iteration, later one per bucket: modules are converted as a whole.
        slots = bucket.waiting if self._gradient_check.thorough else bucket.waiting[:1]
        if problem := self._gradient_check.problem(bucket, number, slots):
            fail(self.observers, problem)
        for observer in self.observers:
            observer.bucket_packing(number)
        bucket.pack(scale)

    def _launch_ready_buckets(self, backward: BackwardPass) -> None:
        while backward.next_bucket < len(self.buckets) and self.buckets[backward.next_bucket].ready:
            if backward.next_bucket in backward.to_send:
                self._launch(backward, backward.next_bucket)
            backward.next_bucket += 1
        if backward.next_bucket == len(self.buckets):
            self.tracker.launched_all()

    def _launch(self, backward: BackwardPass, number: int) -> None:
        for observer in self.observers:
            observer.bucket_launching(number)
        launched = self._send(self.buckets[number], number, is_last=number == backward.to_send[-1])
        backward.in_flight[number] = launched
        for observer in self.observers:
            observer.bucket_launched(number, launched.future)

    def _backward_ends(self) -> None:
        """Called by autograd at the end of a backward pass: finish if all buckets were launched.

        If not, another backward pass may bring the missing gradients. Until then the script may change those that
        have arrived, so they are packed now.
        """
        self._in_backward = False
        backward = self._pass
        if backward is None:
            self.inbox.reset()
            return
        try:
            self._take_from_inbox(backward)
            self.inbox.reset()
            if backward.launches_at_end:
                self._launch_everything(backward)
            if backward.next_bucket < len(self.buckets):
                if backward.begun:
                    for number in range(backward.next_bucket, len(self.buckets)):
                        self._pack(self.buckets[number], number, backward.scale)
                return
            self._finish(backward)
        except BaseException as error:
            backward.error = error
            self._recover()
            raise
        self._pass = None  # and with it the futures, which hold buffers that a rebuild frees

    def _launch_everything(self, backward: BackwardPass) -> None:
        if not backward.begun:
            self._begin(backward)
        self._mark_ready(backward, range(len(self._parameters)))

    @torch.no_grad()
    def _finish(self, backward: BackwardPass) -> None:
        for observer in self.observers:
            observer.backward_computed()
        self.ready_order = backward.ready_order
        self.reduced_buckets = len(backward.in_flight)
        untouched = self.tracker.untouched()
        if self.optimizers_in_backward:
            untouched |= {index for index, parameter in enumerate(self._parameters) if parameter.grad is None}
        for number, bucket in enumerate(self.buckets):
            if number in backward.in_flight:
                averages = self._wait(backward.in_flight, number)
                for observer in self.observers:
                    observer.bucket_done(number)
                bucket.copy_out(averages, unused=untouched)
                for observer in self.observers:
                    observer.bucket_copied_out(number)
        self._wait_for_others()
        self.tracker.finished()
        self._gradient_check.thorough = False

    def _wait_for_others(self) -> None:
        while self.after_backward:
            self.after_backward.pop(0).wait()

    # Sending buckets

    def _send(self, bucket: Bucket, number: int, *, is_last: bool) -> InFlight:
        """Launch the collective of a bucket; returns at once.

        Raises:
            RuntimeError: The comm hook failed.
        """
        self.launch_order.launching(number, bucket.size_bytes)
        try:
            future = self._collective.call(bucket, number, is_last=is_last)
        except RuntimeError as error:
            self._notify_of(error)
            raise
        return InFlight(future, bucket, self.launch_order.launches)

    def _wait(self, in_flight: dict[int, InFlight], number: int) -> Tensor | None:
        """Block until a bucket is done (on CUDA: make the current stream wait).

        Returns:
            The averages as a flat tensor. None: the averages are in the bucket's own buffer.

        Raises:
            RuntimeError: The collective failed; the message names ranks that left the launch order, if that is
                checked.
            TypeError: The comm hook's future holds something else than a tensor of the bucket's size.
        """
        future, bucket, launch = in_flight[number]
        try:
            return self._collective.wait(future, bucket, number)
        except TypeError as error:
            self._notify_of(error)
            raise
        except RuntimeError as error:
            if isinstance(self._collective, AllReduce):  # a collective that a comm hook started may never end
                for other in in_flight.values():  # the next iteration uses their buffers
                    with suppress(Exception):
                        other.future.wait()
            if explanation := self.launch_order.explain(launch):
                fail(self.observers, f"{explanation}. {error}")
            self._notify_of(error)
            raise

    def _notify_of(self, error: Exception) -> None:
        for observer in self.observers:
            observer.failed(str(error))

    # Errors

    def check_finished(self) -> None:
        """Raise RuntimeError if the last backward pass did not average its gradients; the message names the cause."""
        if self._in_backward and torch._C._current_graph_task_id() == _NO_GRAPH_TASK:
            self._in_backward = False  # autograd raised an exception, and then runs no callbacks
            self._recover()
        backward = self._pass
        if backward is not None and backward.interrupted:
            fail(
                self.observers,
                self._messages.interrupted(len(backward.in_flight), len(self.buckets), backward.error),
            )
        if backward is not None and backward.begun and not self._in_backward:
            missing = sorted(
                index
                for bucket in self.buckets
                for slot, index in enumerate(bucket.indices)
                if not bucket.is_put[slot]
            )
            if converted := self._gradient_check.converted_parameter(self.buckets, missing):
                fail(self.observers, converted)
            unlaunched = range(backward.next_bucket, len(self.buckets))
            fail(self.observers, self._messages.unfinished(missing, backward.reachable, unlaunched, self.features))

    def _recover(self) -> None:
        """After an exception in the backward pass: forget the pass, unless only some of its buckets were launched.

        If none was launched, this rank has only skipped a batch; if all were, every rank has issued the same
        collectives. Otherwise the first bucket of the next iteration would be paired with a later bucket of the ranks
        that go on.
        """
        self.tracker.abandoned()
        self.after_backward.clear()
        self.inbox.reset()
        backward = self._pass
        if backward is not None and backward.graph_changed:
            return  # `check_finished` reports it in every further forward pass, as torch does
        launched_some = backward is not None and 0 < len(backward.in_flight) < len(backward.to_send)
        if backward is not None and launched_some and dist.get_world_size(self._group) > 1:
            backward.interrupted = True
        else:
            self._pass = None

    def _search(self, outputs: Sequence[Tensor]) -> frozenset[int] | None:
        """Parameters behind the outputs, for error messages; None: not searched, to save time.

        The search in the first iteration finds every parameter that is never used.
        """
        if self.iterations > 1 and get_debug_level() == DebugLevel.OFF:
            return None
        return reachable(outputs, {node: index for index, node in enumerate(self._accumulators)})

    # Join

    def shadow_backward(self) -> None:
        """On a rank without inputs, match the collectives of the other ranks' backward pass with zeros."""
        last = len(self.buckets) - 1
        in_flight = {
            number: self._send(bucket.zeros(), number, is_last=number == last)
            for number, bucket in enumerate(self.buckets)
        }
        self.tracker.launched_all()
        for number in in_flight:
            self._wait(in_flight, number)
        self.tracker.untouched()
        self._wait_for_others()
        self.tracker.finished()
        self._joined_iterations += 1
        if self._joined_iterations + self.iterations > self.tracker.iterations_without_ready_order:
            self.ready_order = list(range(len(self._parameters)))  # the rebuild is due here when it is on other ranks


class AllReduce:
    """Averages a bucket without a comm hook; has the methods of `HookCaller`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def call(self, bucket: Bucket, _number: int, *, is_last: bool) -> Future:
        """Start to sum a bucket over the ranks, in place."""
        return bucket.all_reduce(self.group)

    def wait(self, future: Future, _bucket: Bucket, _number: int) -> Tensor | None:
        """Block until the sums are in the bucket's own buffer."""
        future.wait()
        return None


# Autograd hooks


class GradientListener(Protocol):
    """An object that `attach_hooks` reports gradients to."""

    inbox: Inbox

    def gradients_arrived(self, gradient: Tensor | None) -> None:
        """`inbox.limit` gradients have been accumulated; `gradient`: the last of them, None: undefined."""


def accumulators(parameters: Sequence[nn.Parameter]) -> list[Node]:
    """The autograd node that accumulates each parameter's gradient; a node lives only while someone holds it."""
    return [get_gradient_edge(parameter).node for parameter in parameters]


def attach_hooks(nodes: Sequence[Node], listener: GradientListener, *, locked: bool) -> weakref.finalize:  # type: ignore[type-arg]  # not generic
    """Put the index of each of `nodes` into the listener's inbox after it has accumulated a gradient.

    Hooks on the nodes run after the user's hooks on the parameters, and also for undefined gradients.

    Args:
        nodes: The accumulating nodes, by parameter index; the listener must hold them.
        listener: Held weakly: hooks do not keep it alive.
        locked: Whether gradients come from several threads, as for a module on several devices; then a lock lets one
            of them through at a time.

    Returns:
        A function that removes the hooks; also called when the listener is garbage-collected.
    """
    hooks = [_gradient_hook(weakref.ref(listener), listener.inbox, index) for index in range(len(nodes))]
    if locked:
        lock = threading.RLock()
        hooks = [_with_lock(hook, lock) for hook in hooks]
    handles = [node.register_hook(hook) for node, hook in zip(nodes, hooks, strict=True)]
    return weakref.finalize(listener, _remove, handles)


def _gradient_hook(listener: "weakref.ref[GradientListener]", inbox: Inbox, index: int) -> AutogradHook:
    indices = inbox.indices

    def gradient_accumulated(_outputs: Any, gradients: Any) -> None:
        indices.append(index)
        if len(indices) >= inbox.limit and (alive := listener()) is not None:
            alive.gradients_arrived(gradients[0])

    return gradient_accumulated


def _with_lock(hook: AutogradHook, lock: Any) -> AutogradHook:
    def gradient_accumulated(outputs: Any, gradients: Any) -> None:
        with lock:
            hook(outputs, gradients)

    return gradient_accumulated


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
