"""The reducer: averages gradients over the ranks, bucket by bucket, while the backward pass still runs.

One iteration:

1. Forward. `prepare_for_forward` and `rebuild_if_due` run before the module, `prepare_for_backward` after it. The
   last one creates a `Reduction`, and the reducer's state is *expecting*; see `backward_pass` for all states.
2. Backward. Autograd calls `gradients_arrived` after it has accumulated gradients. When all gradients of bucket 0 are
   ready, its all-reduce is launched, then that of bucket 1, and so on, strictly in bucket order. So all ranks issue
   the same collectives in the same order, whatever order their gradients arrive in.
3. End. When the backward pass of autograd ends, `_backward_ends` waits for the buckets in order and copies the
   averages back into the gradients.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from .backward_pass import (
    NO_TASK,
    Expecting,
    Failed,
    Idle,
    InFlight,
    PassEnd,
    Reduction,
    Running,
    State,
    backward_ends,
    backward_raises,
    backward_starts,
    forward_begins,
    gradient_after_failure,
    synchronized_outputs_reached,
)
from .buckets import Bucket, Buckets, Features, SecondGradientError
from .checks.backward import ErrorMessages, GradientCheck, NoSyncCheck
from .checks.launch_order import LaunchOrder
from .comm_hooks.interface import Hook, HookCaller
from .gradient_inbox import NEVER, Inbox, accumulators, attach_hooks, gradients_until_pack
from .observer import Future, Observer, fail
from .torch_compat import ReducerNames
from .unused_parameters import make_tracker, reachable

_engine: Any = torch.autograd.Variable._execution_engine


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
        iterations: Synchronised forward passes so far, including those that this rank only matched under Join.
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
        self._state: State = Idle()
        self._parameter_observers: list[Callable[[int], None]] = []
        several_devices = len({parameter.device for parameter in self._parameters}) > 1
        self.detach = attach_hooks(self._accumulators, self, locked=several_devices)
        """Remove the autograd hooks for good; also happens when the reducer is garbage-collected."""

    # Construction

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have a hook communicate; see `DistributedDataParallel.register_comm_hook`."""
        now = self._state
        if isinstance(now, Running) or (isinstance(now, Expecting) and now.reduction.begun):
            raise RuntimeError(
                "register_comm_hook: expected a call between two iterations, got one in a backward pass, or between "
                "two of one forward pass"
            )
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
        theirs at different times. A backward pass that is under way is forgotten. Its collectives may never end, so
        nothing waits for them; they keep the old buckets' memory.
        """
        self._group = self._collective.group = group
        self._messages.rank = dist.get_rank(group)
        self._state = Idle()
        self.iterations = 0
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
        if self.buckets.rebuild_if_due(self.ready_order if isinstance(self._state, Idle) else [], self._group):
            self._gradient_check.thorough = True

    def prepare_for_backward(self, outputs: Sequence[Tensor], count_ranks: Callable[[], int] | None = None) -> None:
        """Average the gradients of the coming backward pass.

        Args:
            outputs: Tensors that forward returned.
            count_ranks: Returns how many ranks to divide by; called when gradients arrive. None: the group's size.
        """
        for bucket in self.buckets:
            bucket.reset()
        self.tracker.forward_done(outputs)
        if converted := self._gradient_check.converted_parameter(self.buckets, sorted(self.tracker.unused)):
            fail(self.observers, converted)  # autograd lost its gradient, so the parameter would count as unused
        self._state = Expecting(
            Reduction(
                count_ranks=count_ranks or partial(dist.get_world_size, self._group), reachable=self._search(outputs)
            )
        )
        self._watch_gradients(synchronized=True)

    def prepare_without_averaging(self) -> None:
        """Add nothing to what is to be averaged: the forward pass ran under `no_sync`."""
        self._watch_gradients(synchronized=False)

    def _watch_gradients(self, *, synchronized: bool) -> None:
        if not isinstance(self._state, Running):  # an activation checkpoint runs forward inside a backward pass
            self.inbox.reset()
        self._no_sync_check.forward_done(synchronized=synchronized)
        self._parameter_observers = [o.parameter_ready for o in self.observers if o.watches_parameters]

    # Backward pass: the events

    def backward_starts(self) -> None:
        """Called when autograd reaches the outputs of a synchronised forward pass.

        There the outermost backward pass is running. So `_backward_ends` runs after all re-entrant passes that
        activation checkpoints start in between.
        """
        task = torch._C._current_graph_task_id()
        if isinstance(self._state, Running) and self._state.task != task:
            self._backward_raises(self._state.task)  # autograd has not dropped the end of a pass that raised, yet
        self._enter_backward()
        self._state = synchronized_outputs_reached(self._state)

    def _enter_backward(self) -> None:
        if isinstance(self._state, Idle | Expecting):
            task = torch._C._current_graph_task_id()
            self._state = backward_starts(self._state, task, stays_local=self._no_sync_check.both_inside())
            _engine.queue_callback(PassEnd(task, self._backward_ends, self._backward_raises))

    def gradients_arrived(self, gradient: Tensor | None) -> None:
        """Called by autograd when `inbox.limit` gradients have arrived; `gradient`: the last one, or None."""
        self._enter_backward()
        state = self._state
        if not isinstance(state, Running):
            assert isinstance(state, Failed)
            message = self._messages.retried(state.message)
            self._state = gradient_after_failure(state, message)
            self.inbox.reset()
            fail(self.observers, message)
        try:
            if state.reduction is not None and not state.reduction.begun:
                self._begin(state.reduction)
            self._take_from_inbox(state.reduction, gradient)
        except BaseException as error:
            self._backward_raises(state.task, error)
            raise
        self.inbox.limit = self._gradients_until_next_step(state.reduction)

    def _backward_ends(self, task: int) -> None:
        """Called by autograd at the end of a backward pass: finish if all buckets were launched.

        If not, another backward pass may bring the missing gradients. Until then the script may change those that
        have arrived, so they are packed now.
        """
        state = self._state
        if not isinstance(state, Running) or state.task != task:
            return
        try:
            if state.reduction is not None:
                self._end(state.reduction)
        except BaseException as error:
            self._backward_raises(task, error)
            raise
        self.inbox.reset()
        self._state = backward_ends(state, len(self.buckets))

    def _backward_raises(self, task: int, error: BaseException | None = None) -> None:
        """An exception ends the backward pass; `error`: the exception, if the reducer itself raised it.

        If training may go on, all collectives in flight have ended when this returns, because the next pass, or a
        script that clears its gradients in place, writes into their buffers. After an error of the reducer's own it
        may not: other ranks may have launched less, and the error must not wait for them.
        """
        state = self._state
        if not isinstance(state, Running) or state.task != task:
            return
        reduction = state.reduction
        launched, arrived = 0, len(self.inbox.indices)
        if reduction is not None:
            launched, arrived = len(reduction.in_flight), arrived + reduction.arrived - state.arrived_before
        self.inbox.reset()
        message = self._messages.interrupted(launched, len(self.buckets), error)
        by_reducer = isinstance(error, Exception)  # not Ctrl-C
        after = backward_raises(state, message, arrived=arrived, by_reducer=by_reducer, alone=self._group.size() == 1)
        self._state = Failed(message, resumes=False)  # stays if a collective fails too, or Ctrl-C ends the waiting
        with suppress(Exception):
            if reduction is not None and isinstance(after, Expecting) and arrived:
                self._start_again(reduction)
            elif reduction is not None and isinstance(after, Failed) and after.resumes:
                self._wait_for_all(reduction)
                self._close(reduction)
            self._state = after

    def check_finished(self) -> None:
        """Raise RuntimeError if the last backward pass did not average its gradients; the message names the cause."""
        if isinstance(self._state, Running) and torch._C._current_graph_task_id() == NO_TASK:
            self._backward_raises(self._state.task)  # autograd has not dropped the end of a pass that raised, yet
        self._state = forward_begins(self._state)
        if isinstance(self._state, Failed):
            fail(self.observers, self._state.message)
        if isinstance(self._state, Expecting) and self._state.reduction.begun:
            fail(self.observers, self._unfinished(self._state.reduction))

    # Averaging

    def _begin(self, reduction: Reduction) -> None:
        """The first gradient has arrived."""
        self._no_sync_check.gradient_arrived(averaged=True)
        # Multiplying is faster than dividing, and gives the same bits as torch's default path, which multiplies too.
        hooked = isinstance(self._collective, HookCaller)
        reduction.scale = 1.0 if hooked else 1.0 / reduction.count_ranks()
        for observer in self.observers:
            observer.backward_started()
        skip = self.tracker.unused if self.features.skip_all_reduce_unused_params else frozenset()
        reduction.to_send = [n for n, bucket in enumerate(self.buckets) if not skip.issuperset(bucket.indices)]
        reduction.begun = True
        self._mark_ready(reduction, sorted(self.tracker.unused))

    def _take_from_inbox(self, reduction: Reduction | None, gradient: Tensor | None = None) -> None:
        arrived = self.inbox.take()
        if reduction is not None:
            reduction.arrived += len(arrived)
        if reduction is not None and not self.tracker.counts_gradients and not self._parameter_observers:
            reduction.ready_order += arrived
            self._mark_ready(reduction, arrived)
            return
        for index in arrived:
            remaining = 0
            if self.tracker.counts_gradients:
                remaining = self.tracker.gradient_arrived(index, gradient, reduction is not None)
            if self._parameter_observers and gradient is not None:
                for parameter_ready in self._parameter_observers:
                    parameter_ready(index)
            if reduction is None:
                self._no_sync_check.gradient_arrived(averaged=False)
            elif remaining == 0:
                reduction.ready_order.append(index)
                self._mark_ready(reduction, [index])
            elif remaining < 0:
                # As in torch, every further forward pass reports the gradients that are missing.
                self._state = Failed(self._unfinished(reduction), resumes=False)
                fail(self.observers, self._messages.graph_changed(index, self.buckets.bucket_of[index]))

    def _gradients_until_next_step(self, reduction: Reduction | None) -> int:
        """How many gradients can arrive before the reducer has anything to do."""
        if self.tracker.counts_gradients or self._parameter_observers:
            return 1
        return NEVER if reduction is None else gradients_until_pack(self.buckets, reduction.next_bucket)

    def _mark_ready(self, reduction: Reduction, indices: Sequence[int]) -> None:
        for number, together in groupby(indices, self.buckets.bucket_of.__getitem__):
            bucket = self.buckets[number]
            try:
                should_pack = bucket.put(list(map(self.buckets.slot_of.__getitem__, together)))
            except SecondGradientError as error:
                unused = error.index in self.tracker.unused
                fail(self.observers, self._messages.ready_twice(error.index, number, unused=unused))
            if should_pack:
                self._pack(bucket, number, reduction.scale)
            if bucket.ready:
                for observer in self.observers:
                    observer.bucket_ready(number)
                self._launch_ready_buckets(reduction)

    def _pack(self, bucket: Bucket, number: int, scale: float) -> None:
        # All gradients in the first iteration, later one per bucket: modules are converted as a whole.
        slots = bucket.waiting if self._gradient_check.thorough else bucket.waiting[:1]
        if problem := self._gradient_check.problem(bucket, number, slots):
            fail(self.observers, problem)
        for observer in self.observers:
            observer.bucket_packing(number)
        bucket.pack(scale)

    def _launch_ready_buckets(self, reduction: Reduction) -> None:
        while reduction.next_bucket < len(self.buckets) and self.buckets[reduction.next_bucket].ready:
            if reduction.next_bucket in reduction.to_send:
                self._launch(reduction, reduction.next_bucket)
            reduction.next_bucket += 1
        if reduction.next_bucket == len(self.buckets):
            self.tracker.launched_all()

    def _launch(self, reduction: Reduction, number: int) -> None:
        for observer in self.observers:
            observer.bucket_launching(number)
        reduction.launches += 1
        launched = self._send(self.buckets[number], number, is_last=number == reduction.to_send[-1])
        reduction.in_flight[number] = launched
        for observer in self.observers:
            observer.bucket_launched(number, launched.future)

    def _end(self, reduction: Reduction) -> None:
        self._take_from_inbox(reduction)
        if not self.tracker.launches_during_backward and self.tracker.all_arrived():
            self._mark_ready(reduction, range(len(self._parameters)))
        if reduction.next_bucket == len(self.buckets):
            self._finish(reduction)
        elif reduction.begun:
            for number in range(reduction.next_bucket, len(self.buckets)):
                self._pack(self.buckets[number], number, reduction.scale)

    @torch.no_grad()
    def _finish(self, reduction: Reduction) -> None:
        for observer in self.observers:
            observer.backward_computed()
        untouched = self.tracker.untouched()
        if self.optimizers_in_backward:
            untouched |= {index for index, parameter in enumerate(self._parameters) if parameter.grad is None}
        for number, bucket in enumerate(self.buckets):
            if number in reduction.in_flight:
                averages = self._wait(reduction.in_flight, number)
                for observer in self.observers:
                    observer.bucket_done(number)
                bucket.copy_out(averages, unused=untouched)
                for observer in self.observers:
                    observer.bucket_copied_out(number)
        self._close(reduction)

    def _close(self, reduction: Reduction) -> None:
        """After the last bucket: remember what the next iteration needs, on all ranks alike."""
        self.ready_order = reduction.ready_order
        self.reduced_buckets = len(reduction.in_flight)
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
            if explanation := self.launch_order.explain(launch):
                fail(self.observers, f"{explanation}. {error}")
            self._notify_of(error)
            raise

    def _notify_of(self, error: Exception) -> None:
        for observer in self.observers:
            observer.failed(str(error))

    # Exceptions in the backward pass

    def _start_again(self, reduction: Reduction) -> None:
        """Forget all gradients that have arrived: no bucket was launched, and a further pass brings them again."""
        self._wait_for_others()
        for bucket in self.buckets:
            bucket.unpack(reduction.scale)
            bucket.reset()
        reduction.begun = False
        reduction.arrived = reduction.next_bucket = 0  # buckets without used parameters may have been skipped
        reduction.ready_order = []
        self.tracker.abandoned()

    def _wait_for_all(self, reduction: Reduction) -> None:
        """Wait for all collectives; the future of a comm hook may hold an error, but must have a result."""
        for number, (future, bucket, _) in reduction.in_flight.items():
            try:
                self._collective.wait(future, bucket, number)
            except Exception:
                if not future.done():
                    raise
        self.tracker.untouched()

    def _unfinished(self, reduction: Reduction) -> str:
        """Error: the last backward pass left gradients out."""
        missing = sorted(
            index for bucket in self.buckets for slot, index in enumerate(bucket.indices) if not bucket.is_put[slot]
        )
        if converted := self._gradient_check.converted_parameter(self.buckets, missing):
            return converted
        unlaunched = range(reduction.next_bucket, len(self.buckets))
        return self._messages.unfinished(missing, reduction.reachable, unlaunched, self.features)

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
        self.iterations += 1
        if self.iterations > self.tracker.iterations_without_ready_order:
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
