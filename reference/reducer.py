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

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Concatenate, NoReturn, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.autograd.graph import Node

from .autograd_hooks import (
    NEVER,
    Inbox,
    PassEnd,
    accumulators,
    attach_hooks,
    distributed_autograd_runs,
    gradients_until_pack,
    reachable,
)
from .backward_pass import Expecting, Failed, Idle, InFlight, Reduction, Running, State
from .buckets import Bucket, Buckets, SecondGradientError
from .checks.changed_gradients import ChangedGradients, separate
from .checks.error_messages import ErrorMessages
from .checks.launch_order import CheckedLaunchOrder
from .comm_hooks.interface import Hook, HookCaller
from .errors import LaunchOrderError
from .recording.reducer_observer import Future, Observer, profiled
from .reducer_options import Features

NO_TASK = -1
"""The number that torch returns for the running backward pass when no backward pass runs."""

_engine: Any = torch.autograd.Variable._execution_engine
_current_task = torch._C._current_graph_task_id
P = ParamSpec("P")


class AllParametersUsed:
    """The tracker for models in which every parameter gets exactly one gradient in each backward pass.

    A tracker knows which parameters get a gradient. `unused_parameters` has the others, which override the methods.
    """

    counts_gradients = False  # whether `gradient_arrived` must be called
    needs_sink = False  # whether forward's outputs must pass through the sink; see `backward_sink`
    launches_during_backward = True  # False: all buckets are launched at the end of the backward pass
    iterations_without_ready_order = 0  # at the start
    unused: frozenset[int] = frozenset()  # parameter indices that get no gradient in the coming backward pass
    is_static = True  # whether the same parameters were unused in all iterations so far

    def forward_done(self, outputs: Iterable[Tensor]) -> None:
        """Called after a synchronised forward pass with the tensors that it returned."""

    def gradient_arrived(self, index: int, gradient: Tensor | None, expected: bool) -> int:  # noqa: FBT001 - in every hook
        """Called after `gradient` (None: an undefined one) was accumulated, and is `expected` to be averaged or not.

        Returns the number of gradients still expected for this parameter; negative if too many arrived.
        """
        return 0

    def all_arrived(self) -> bool:
        """Whether a first iteration that launches all buckets at its end has all the gradients that it waits for."""
        return True

    def launched_all(self) -> None:
        """Called after the last bucket was launched; a tracker exchanges here which parameters each rank used."""

    def untouched(self) -> frozenset[int]:
        """Parameter indices that no rank used, so their gradients must stay as they are."""
        return frozenset()

    def finished(self) -> None:
        """Called at the end of a synchronised backward pass."""

    def abandoned(self) -> None:
        """Called after an exception ended a backward pass before the first launch: the next pass starts again."""


TrackerMaker = Callable[[Features, Sequence[nn.Parameter], Sequence[Node], dist.ProcessGroup], AllParametersUsed]


class Reducer:
    """Averages the gradients of `parameters` over `group` during every backward pass it was prepared for.

    Args:
        parameters: Trainable parameters by name; their order defines the parameter index.
        buckets: Their buckets.
        group: Ranks to average over; each must construct its reducer with the same arguments.
        make_tracker: Makes the tracker of unused parameters that the features need; see `unused_parameters`.
        sync_enabled: False inside `no_sync()`.

    Attributes:
        features: Optional behaviour, as of the buckets.
        tracker: Finds unused parameters.
        iterations: Synchronised forward passes so far, including those that this rank only matched under Join.
        ready_order: Parameter indices in ready order, as of the last synchronised backward pass.
        reduced_buckets: Number of buckets that were sent in that pass.
        observers: Called at each step; append between iterations.
        alarm: Called once, when a synchronised forward pass begins and `iterations` has reached `alarm_at`.
        on_error: Called with the message of every error.
        launch_order: Notified of every launch. None: launches are not checked.
        after_backward: Futures that the coming backward pass waits for at its end.
        inbox: Gradients that have arrived but were not processed yet.
        optimizers_in_backward: Whether the comm hook steps optimisers and sets the gradients it has used to None.
        detach: Removes the autograd hooks for good, as garbage collection of the reducer does.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        buckets: Buckets,
        *,
        group: dist.ProcessGroup,
        make_tracker: TrackerMaker,
        sync_enabled: Callable[[], bool],
    ) -> None:
        self._parameters = list(parameters.values())
        self._group = group
        self.buckets, self.features = buckets, buckets.features
        self._accumulators = accumulators(self._parameters)
        self.make_tracker = make_tracker
        self.tracker = make_tracker(self.features, self._parameters, self._accumulators, group)
        self.iterations = 0
        self.ready_order: list[int] = []
        self._averaged = 0  # iterations whose gradients were averaged
        self.reduced_buckets = 0
        self.observers: list[Observer] = []
        self.alarm: Callable[[], None] = lambda: None
        self.alarm_at = math.inf
        self.on_error: Callable[[str], None] = lambda _message: None
        self.launch_order: CheckedLaunchOrder | None = None
        self.after_backward: list[Future] = []
        self.optimizers_in_backward = False
        self._hook: HookCaller | None = None
        self._messages = ErrorMessages(parameters, group.rank())
        self._thorough = True  # check every gradient: in the first iteration and in the one after the rebuild
        self._changes = ChangedGradients()
        self._separates = False  # whether gradients have shared memory
        self._sync_enabled = sync_enabled
        self._forward_under_no_sync = False
        self._warned_of_local = False
        self._compared_with_forward = True  # whether `no_sync` is known to be the same in forward and backward
        self.inbox = Inbox()
        self._state: State = Idle()
        self._parameter_observers: list[Callable[[int], None]] = []
        several_devices = len({parameter.device for parameter in self._parameters}) > 1
        self.detach = attach_hooks(self._accumulators, self, locked=several_devices)

    def notify(self, event: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call this method of `Observer` on all observers."""
        for observer in tuple(self.observers):  # one may remove itself
            getattr(observer, event.__name__)(*args, **kwargs)

    def fail(self, message: str, kind: Callable[[str], RuntimeError] = RuntimeError) -> NoReturn:
        """Raise RuntimeError, or a subclass, after `on_error`."""
        self.on_error(message)
        raise kind(message)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have a hook communicate; see `DataParallel.register_comm_hook`."""
        now = self._state
        if isinstance(now, Running) or (isinstance(now, Expecting) and now.reduction.begun):
            raise RuntimeError(
                "register_comm_hook: expected a call between two iterations, got one in a backward pass, or between "
                "two of one forward pass"
            )
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook = HookCaller(hook, state, self._group)

    # Forward pass

    def prepare_for_forward(self, *, synchronized: bool = True) -> None:
        """Start a forward pass; `synchronized`: its gradients will be averaged."""
        if synchronized:
            if distributed_autograd_runs():
                self.fail(self._messages.distributed_autograd())
            match self._state:
                case Running(reduction=Reduction(begun=True)) if _current_task() != NO_TASK:
                    self.fail(self._messages.forward_inside_backward())
            self.iterations += 1
            if self.iterations >= self.alarm_at:
                self.alarm_at = math.inf
                self.alarm()
            self.notify(Observer.forward_started)

    def rebuild_if_due(self) -> None:
        """Rebuild the buckets once, as soon as the ready order is known; all ranks call this together.

        Raises:
            RuntimeError: The last backward pass left gradients out or was interrupted, so the averages never arrived;
                or the module was converted to another dtype or device after it was wrapped.
        """
        self.check_finished()
        every = range(len(self._parameters))
        self._check_not_converted(every if self._thorough else [bucket.indices[0] for bucket in self.buckets])
        if self.buckets.rebuild_if_due(self.ready_order if isinstance(self._state, Idle) else [], self._group):
            self._thorough = True

    def _check_not_converted(self, indices: Iterable[int]) -> None:
        """Raise RuntimeError if one of these parameters was converted: autograd does not call its hook any more.

        One that was converted back has another accumulating node.
        """
        for index in indices:
            now, kind = self._parameters[index], self.buckets.kinds[index]
            node = accumulators([now])[0] if now.requires_grad else self._accumulators[index]
            if (now.dtype, now.device) != kind or node is not self._accumulators[index]:
                self.fail(self._messages.converted(index, self.buckets.bucket_of[index], now, *kind))

    def prepare_for_backward(self, outputs: Sequence[Tensor], count_ranks: Callable[[], int] | None = None) -> None:
        """Average the gradients of the coming backward pass, which starts at `outputs`.

        `count_ranks` returns how many ranks to divide by; called when gradients arrive. None: the group's size.
        """
        with profiled("torch.distributed.ddp.reducer::search_unused_parameters"):
            for bucket in self.buckets:
                bucket.reset()
            self.tracker.forward_done(outputs)
        self._check_not_converted(sorted(self.tracker.unused))  # a converted one would count as unused
        behind = None  # parameters behind the outputs, for error messages
        if self.iterations <= 1 or get_debug_level() != DebugLevel.OFF:  # the first search finds what is never used
            behind = reachable(outputs, {node: index for index, node in enumerate(self._accumulators)})
        count_ranks = count_ranks or self._group.size
        self._state = Expecting(Reduction(count_ranks=count_ranks, reachable=behind))
        self._watch_gradients(synchronized=True)

    def prepare_without_averaging(self) -> None:
        """Add nothing to what is to be averaged: the forward pass ran under `no_sync`."""
        self._watch_gradients(synchronized=False)

    def _watch_gradients(self, *, synchronized: bool) -> None:
        if not isinstance(self._state, Running):  # an activation checkpoint runs forward inside a backward pass
            self.inbox.reset()
        self._forward_under_no_sync, self._compared_with_forward = not synchronized, False
        self._parameter_observers = [o.parameter_ready for o in self.observers if o.watches_parameters]

    # Backward pass: what autograd calls

    def backward_starts(self) -> None:
        """Called when autograd reaches the outputs of a synchronised forward pass; it is averaged even in `no_sync`.

        There the outermost backward pass is running. So `_backward_ends` runs after all re-entrant passes that
        activation checkpoints start in between.
        """
        if isinstance(self._state, Running) and self._state.task != _current_task():
            self._backward_raises(self._state.task)  # autograd has not dropped the end of a pass that raised, yet
        self._enter_backward()
        match self._state:
            case Running(task=task, reduction=None, before=Expecting(reduction) as before):
                self._state = Running(task, reduction, before, reduction.arrived)

    def _enter_backward(self) -> None:
        """Autograd has reached an output that has the reducer's hook or, if none has one, a parameter."""
        state = self._state
        if not isinstance(state, Idle | Expecting):
            return
        from torch._dynamo import compiled_autograd  # loaded by the first forward pass; see `not_compiled`

        task = _current_task()
        if compiled_autograd.in_compiled_autograd_region:  # it traces the hooks, and may swallow the error
            self._state = Failed(self._messages.compiled_autograd(), resumes=False)
            self.fail(self._state.message)
        if (
            distributed_autograd_runs()
        ):  # it reports no error of a hook in the hook's words; the next forward pass does
            self._state = Failed(self._messages.distributed_autograd(), resumes=False)
            self.fail(self._state.message)
        # After a forward pass under `no_sync`, an earlier synchronised one keeps waiting for its gradients.
        stays_local = self._forward_under_no_sync and not self._sync_enabled()
        if isinstance(state, Expecting) and not stays_local:
            self._state = Running(task, state.reduction, state, state.reduction.arrived)
        else:
            self._state = Running(task, None, state)
        _engine.queue_callback(PassEnd(task, self._backward_ends, self._backward_raises))

    def gradients_arrived(self, gradient: Tensor | None) -> None:
        """Called by autograd when `inbox.limit` gradients have arrived; `gradient`: the last one, or None."""
        self._enter_backward()
        state = self._state
        if isinstance(state, Failed):
            message = self._messages.retried(state.message)
            self._state = Failed(message, resumes=False) if state.resumes else state
            self.inbox.reset()
            self.fail(message)
        assert isinstance(state, Running)
        try:
            if state.reduction is not None and not state.reduction.begun:
                self._begin(state.reduction)
            self._take_from_inbox(state.reduction, gradient)
        except BaseException as error:
            self._backward_raises(state.task, error)
            raise
        if self.tracker.counts_gradients or self._parameter_observers:
            self.inbox.limit = 1
        elif state.reduction is None:
            self.inbox.limit = NEVER
        elif self._thorough or self._separates:
            self.inbox.limit = 1
        else:
            self.inbox.limit = gradients_until_pack(self.buckets, state.reduction.next_bucket)

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
        complete = state.reduction is not None and state.reduction.next_bucket == len(self.buckets)
        self._state = Idle() if complete else state.before

    def _backward_raises(self, task: int, error: BaseException | None = None) -> None:
        """An exception, `error` if the reducer raised it, ends the backward pass: every further pass raises an error.

        `ExceptionSafeReducer` lets training go on where that is possible.
        """
        if isinstance(self._state, Running) and self._state.task == task:
            self.inbox.reset()
            self._state = Failed(self._messages.interrupted(0, len(self.buckets), error), resumes=False)

    def check_finished(self) -> None:
        """Raise RuntimeError if the last backward pass did not average its gradients; the message names the cause."""
        if isinstance(self._state, Running) and _current_task() == NO_TASK:
            self._backward_raises(self._state.task)  # autograd has not dropped the end of a pass that raised, yet
        match self._state:
            case Failed(resumes=True):
                self._state = Idle()
            case Failed(message):
                self.fail(message)
            case Expecting(Reduction(begun=True) as reduction):
                self.fail(self._unfinished(reduction))

    def _missing(self) -> list[int]:
        """Parameter indices whose gradients are not ready."""
        buckets = self.buckets
        return sorted(
            index for bucket in buckets for slot, index in enumerate(bucket.indices) if not bucket.is_put[slot]
        )

    def _unfinished(self, reduction: Reduction) -> str:
        """Error: the last backward pass left gradients out."""
        missing = self._missing()
        self._check_not_converted(missing)
        unlaunched = range(reduction.next_bucket, len(self.buckets))
        return self._messages.unfinished(missing, reduction.reachable, unlaunched, self.features)

    # Averaging

    def _begin(self, reduction: Reduction) -> None:
        """The first gradient has arrived."""
        self._compare_with_forward(averaged=True)
        # Multiplying is faster than dividing, and gives the same bits as torch's default path, which multiplies too.
        reduction.scale = 1.0 if self._hook is not None else 1.0 / reduction.count_ranks()
        self.notify(Observer.backward_started)
        skip = self.tracker.unused if self.features.skip_all_reduce_unused_params else frozenset()
        reduction.to_send = [n for n, bucket in enumerate(self.buckets) if not skip.issuperset(bucket.indices)]
        reduction.begun = True
        self._mark_ready(reduction, sorted(self.tracker.unused))

    def _compare_with_forward(self, *, averaged: bool) -> None:
        """Warn if one of forward and backward ran inside `no_sync`, or if nothing waits for the gradients."""
        inside = not self._sync_enabled()
        differs = inside if averaged else self._forward_under_no_sync and not inside
        if differs and not self._compared_with_forward:
            warnings.warn(self._messages.changed_mind(averaged=averaged), stacklevel=2)
        elif not averaged and not inside and not self._warned_of_local:
            self._warned_of_local = True
            warnings.warn(self._messages.not_expected(), stacklevel=2)
        self._compared_with_forward = True

    def _take_from_inbox(self, reduction: Reduction | None, gradient: Tensor | None = None) -> None:
        arrived = self.inbox.take()
        if reduction is not None:
            reduction.arrived += len(arrived)
            if self._separates or self._thorough or self.tracker.counts_gradients:
                for index in arrived:
                    self._separates |= separate(self._parameters[index], reduction.owners)
            if self._thorough:
                for index in arrived:
                    self._changes.arrived(index, self._parameters[index].grad)
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
                self._compare_with_forward(averaged=False)
            elif remaining == 0:
                reduction.ready_order.append(index)
                self._mark_ready(reduction, [index])
            elif remaining < 0:
                # As in torch, every further forward pass reports the gradients that are missing.
                self._state = Failed(self._unfinished(reduction), resumes=False)
                self.fail(self._messages.graph_changed(index, self.buckets.bucket_of[index]))

    def _mark_ready(self, reduction: Reduction, indices: Sequence[int]) -> None:
        for number, together in groupby(indices, self.buckets.bucket_of.__getitem__):
            bucket = self.buckets[number]
            try:
                should_pack = bucket.put(list(map(self.buckets.slot_of.__getitem__, together)))
            except SecondGradientError as error:
                unused = error.args[0] in self.tracker.unused
                self.fail(self._messages.ready_twice(error.args[0], number, unused=unused))
            if should_pack:
                self._pack(bucket, number, reduction.scale)
            if bucket.ready:
                self.notify(Observer.bucket_ready, number)
                self._launch_ready_buckets(reduction)

    def _pack(self, bucket: Bucket, number: int, scale: float) -> None:
        for slot in bucket.misfits(thorough=self._thorough):
            if error := self._messages.misfit(bucket, number, slot):
                self.fail(error)
        if self._thorough and (changed := self._changes.first_changed(bucket)) is not None:
            self.fail(self._messages.changed(changed, number))
        self.notify(Observer.bucket_packing, number)
        with profiled("torch::distributed::reducer::mul_out"):
            bucket.pack(scale)

    def _launch_ready_buckets(self, reduction: Reduction) -> None:
        while reduction.next_bucket < len(self.buckets) and self.buckets[reduction.next_bucket].ready:
            if reduction.next_bucket in reduction.to_send:
                self._launch(reduction, reduction.next_bucket)
            reduction.next_bucket += 1
        if reduction.next_bucket == len(self.buckets):
            self.tracker.launched_all()

    def _launch(self, reduction: Reduction, number: int) -> None:
        self.notify(Observer.bucket_launching, number)
        reduction.launches += 1
        launched = self.send(self.buckets[number], number, is_last=number == reduction.to_send[-1])
        reduction.in_flight[number] = launched
        self.notify(Observer.bucket_launched, number, launched.future)

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
        self.notify(Observer.backward_computed)
        untouched = self.tracker.untouched()
        if self.optimizers_in_backward:
            untouched |= {index for index, parameter in enumerate(self._parameters) if parameter.grad is None}
        for number, bucket in enumerate(self.buckets):
            if number in reduction.in_flight:
                averages = self.wait(reduction.in_flight, number)
                self.notify(Observer.bucket_done, number)
                with profiled("torch.distributed.ddp.reducer::copy_bucket_to_grad"):
                    bucket.copy_out(averages, unused=untouched)
                if (replaced := bucket.replaced(untouched)) is not None:
                    self.fail(self._messages.replaced(replaced, number))
                self.notify(Observer.bucket_copied_out, number)
        self._close(reduction)

    def _close(self, reduction: Reduction) -> None:
        """After the last bucket: remember what the next iteration needs, on all ranks alike."""
        self._note_ready_order(reduction.ready_order)
        self.reduced_buckets = len(reduction.in_flight)
        self.wait_for_others()
        self.tracker.finished()
        self._thorough = False

    def matched(self) -> None:
        """A rank without inputs has matched an iteration under Join; a forward pass that still waits is over."""
        self.iterations += 1
        self._state = Idle()
        self._note_ready_order([])

    def _note_ready_order(self, ready_order: list[int]) -> None:
        """Ranks rebuild together, so what they share decides: the number of averaged iterations."""
        self._averaged += 1
        if self._averaged > self.tracker.iterations_without_ready_order:
            self.ready_order = ready_order or list(range(len(self._parameters)))

    def wait_for_others(self) -> None:
        """Wait for the futures in `after_backward`."""
        while self.after_backward:
            self.after_backward.pop(0).wait()

    # Sending buckets

    def send(self, bucket: Bucket, number: int, *, is_last: bool) -> InFlight:
        """Launch the collective of a bucket; returns at once. Raises RuntimeError if the comm hook failed."""
        self.notify(Observer.bucket_sending, number)
        launch = self.launch_order.launching(number, bucket.size_bytes) if self.launch_order is not None else 0
        if self._hook is None:
            return InFlight(bucket.all_reduce(self._group), bucket, launch)
        try:
            return InFlight(self._hook.call(bucket, number, is_last=is_last), bucket, launch)
        except RuntimeError as error:
            self.on_error(str(error))
            raise

    def wait(self, in_flight: dict[int, InFlight], number: int) -> Tensor | None:
        """Block until a bucket is done (on CUDA: make the current stream wait); see `HookCaller.wait`.

        An error names ranks that left the launch order, if that is checked.
        """
        future, bucket, launch = in_flight[number]
        try:
            if self._hook is not None:
                return self._hook.wait(future, bucket, number)
            future.wait()
            return None
        except (TypeError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and self.launch_order and (why := self.launch_order.explain(launch)):
                self.fail(f"{why}. {error}", partial(LaunchOrderError, self._group.rank()))
            self.on_error(str(error))
            raise
