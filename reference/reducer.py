"""The reducer: averages gradients over the ranks, bucket by bucket, while the backward pass still runs.

One iteration:

1. Forward. `prepare_for_forward` and `rebuild_if_due` run before the module, `prepare_for_backward` after it. The
   last one creates a `Reduction`, and the reducer's state is *expecting*; see `backward_pass` for all states.
2. Backward. Autograd calls `gradients_arrived` after it has accumulated gradients. When all gradients of bucket 0 are
   ready, its all-reduce is launched, then that of bucket 1, and so on, strictly in bucket order. So all ranks issue
   the same collectives in the same order, whatever order their gradients arrive in.
3. End. When the backward pass of autograd ends, `_backward_ends` waits for the buckets in order and copies the
   averages back into the gradients. If an exception ends the pass, `backward_exceptions` decides what follows.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count, groupby
from typing import Any, Concatenate, NoReturn, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.autograd.graph import Node

from . import backward_exceptions
from .autograd_hooks import Inbox, PassEnd, accumulators, arrivals_until_pack, attach_hooks, transforms_active
from .backward_exceptions import NO_TASK, distributed_autograd_runs
from .backward_pass import Expecting, Failed, Idle, InFlight, Reduction, Running, Snapshot, State
from .buckets import NEVER, Bucket, Buckets, SecondGradientError
from .checks.changed_gradients import ChangedGradients, misfit, separate, snapshot, warn_of_changes, watch_steps
from .checks.error_messages import ErrorMessages, Text
from .checks.launch_order import CheckedLaunchOrder
from .comm_hooks.interface import HookCaller
from .constructor_arguments import Options
from .errors import LaunchOrderError
from .features.delayed_all_reduce import DelayedAllReduce
from .parameters import reachable
from .recording.reducer_observer import Future, Observer

_engine: Any = torch.autograd.Variable._execution_engine
_current_task = torch._C._current_graph_task_id
_rpc_runs: Callable[[], bool] = getattr(dist.rpc, "_is_current_rpc_agent_set", lambda: False)
_NOTHING = nullcontext()
P = ParamSpec("P")
_reducers: "weakref.WeakSet[Reducer]" = weakref.WeakSet()  # of this process
TrackerMaker = Callable[[Options, Sequence[nn.Parameter], Sequence[Node], dist.ProcessGroup], "AllParametersUsed"]


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

    def seldom_unused(self) -> Iterable[int]:
        """Parameters that count as unused and may not be: a converted one has another accumulating node."""
        return ()

    def gradient_arrived(self, index: int, *, defined: bool, expected: bool) -> int:
        """Called after a gradient, `defined` or not, was accumulated, and is `expected` to be averaged or not.

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


class Reducer:
    """Averages the gradients of `parameters` over `group` during every backward pass it was prepared for.

    Args:
        parameters: Trainable parameters by name; their order defines the parameter index.
        buckets: Their buckets.
        group: Ranks to average over; each must construct its reducer with the same arguments.
        options: Optional behaviour.
        make_tracker: Makes the tracker of unused parameters that the options need; see `unused_parameters`.
        sync_enabled: False inside `no_sync()`.

    Attributes:
        parameters: Trainable parameters by parameter index.
        accumulators: The autograd node that accumulates the gradient of each.
        tracker: Finds unused parameters.
        state: Where the module is between a forward pass and its averages; see `backward_pass`.
        iterations: Synchronised forward passes so far, including those that this rank only matched under Join.
        ready_order: Parameter indices in ready order, as of the last synchronised backward pass.
        reduced_buckets: Number of buckets that were sent in that pass.
        observers: Called at each step; append between iterations.
        alarm: Called once, when a synchronised forward pass begins and `iterations` has reached `alarm_at`.
        last_error: Message of the last error. None: no error.
        count_ranks: Returns the number of ranks to divide by in the coming backward pass. None: all ranks.
        hook: Calls the comm hook. None: all-reduce.
        delayed: Averages the parameters that are in no bucket. None: there are none.
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
        options: Options,
        group: dist.ProcessGroup,
        make_tracker: TrackerMaker,
        sync_enabled: Callable[[], bool],
    ) -> None:
        self.parameters = list(parameters.values())
        self.group = group
        self.buckets, self.options = buckets, options
        self.accumulators = accumulators(self.parameters)
        self.make_tracker = make_tracker
        self.tracker = make_tracker(self.options, self.parameters, self.accumulators, group)
        self.iterations = 0
        self.ready_order: list[int] = []
        self.averaged = 0  # iterations whose gradients were averaged
        self.reduced_buckets = 0
        self.observers: list[Observer] = []
        self.alarm: Callable[[], None] = lambda: None
        self.alarm_at = math.inf
        self.last_error: str | None = None
        self.count_ranks: Callable[[], int] | None = None
        self.delayed: DelayedAllReduce | None = None
        self.launch_order: CheckedLaunchOrder | None = None
        self.after_backward: list[Future] = []
        self.optimizers_in_backward = False
        self.hook: HookCaller | None = None
        self.messages = ErrorMessages(parameters, group.rank())
        self.thorough = True  # check every gradient: in the first iteration and in the one after the rebuild
        self.changes = ChangedGradients()
        self._separates = False  # whether gradients have shared memory
        self._sync_enabled = sync_enabled
        self._forward_under_no_sync = False
        self.without_gradients: Snapshot | None = None  # at the end of a backward pass that brought none
        self._searched = False  # whether a graph was searched for error messages
        self._averaged_inside = NO_TASK  # the backward pass in which a forward pass ran whose gradients were averaged
        self.pass_end: Callable[[], PassEnd | None] = lambda: None  # of the last backward pass; autograd holds it
        self._compared_with_forward = True  # whether `no_sync` is known to be the same in forward and backward
        self.inbox = Inbox()
        self.state: State = Idle()
        self._parameter_observers: list[Callable[[int], None]] = []
        self.detach = attach_hooks(self.accumulators, self, locked=len({one.device for one in self.parameters}) > 1)
        watch_steps(self)
        _reducers.add(self)

    def notify(self, event: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call this method of `Observer` on all observers."""
        for observer in tuple(self.observers):  # one may remove itself
            getattr(observer, event.__name__)(*args, **kwargs)

    def fail(self, message: str, kind: Callable[[str], RuntimeError] = RuntimeError) -> NoReturn:
        """Raise RuntimeError, or a subclass, and keep its message."""
        self.last_error = message
        raise kind(message)

    # Forward pass

    def prepare_for_forward(self, *, synchronized: bool = True) -> None:
        """Start a forward pass; `synchronized`: its gradients will be averaged."""
        self.count_ranks = None
        if synchronized:
            if _rpc_runs() and distributed_autograd_runs():
                self.fail(self.messages.message(Text.DISTRIBUTED_AUTOGRAD))
            match self.state:
                case Running(reduction=Reduction(begun=True)) if _current_task() != NO_TASK:
                    self.fail(self.messages.message(Text.FORWARD_INSIDE_BACKWARD))
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
        if transforms_active():  # they would wrap new buckets
            return
        every = range(len(self.parameters))
        self.check_not_converted(every if self.thorough else [bucket.indices[0] for bucket in self.buckets])
        if isinstance(self.state, Idle) and not self.buckets.rebuilt and not self.options.graph_may_change:
            self.thorough |= self.buckets.rebuild_if_due(self.ready_order, self.group)

    def check_not_converted(self, indices: Iterable[int]) -> None:
        """Raise RuntimeError if one of these parameters was converted, or back: it has another accumulating node."""
        for index in () if transforms_active() else indices:  # they hide the nodes
            now, key = self.parameters[index], self.buckets.keys[index]
            node = accumulators([now])[0] if now.requires_grad else self.accumulators[index]
            if (now.dtype, now.device) != key or node is not self.accumulators[index]:
                self.fail(self.messages.converted(index, self.buckets.bucket_of[index], now, *key))

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Average the gradients of the coming backward pass, which starts at `outputs`."""
        with profiled("torch.distributed.ddp.reducer::search_unused_parameters"):
            for bucket in self.buckets:
                bucket.reset()
            self.tracker.forward_done(outputs)
        if self.tracker.unused:
            self.check_not_converted(self.tracker.seldom_unused())
        if transforms_active():
            self.without_gradients = snapshot(self.parameters)  # they compute gradients without a backward pass
        wanted = not self._searched or get_debug_level() != DebugLevel.OFF  # the first finds what is never used
        behind = reachable(outputs, dict(zip(self.accumulators, count(), strict=False))) if wanted else None
        self._searched = True  # for error messages
        count_ranks, self.count_ranks, task = self.count_ranks or self.group.size, None, _current_task()
        if isinstance(self.state, Running) and task == NO_TASK:
            backward_exceptions.end_raised_pass(self)  # another thread may have begun it during forward
        beside = isinstance(self.state, Running) and self.state.reduction is not None
        self.state = Expecting(Reduction(count_ranks=count_ranks, reachable=behind, inside=task, beside=beside))
        self.watch_gradients(synchronized=True)

    def watch_gradients(self, *, synchronized: bool) -> None:
        """After a forward pass; those under `no_sync` add nothing to what is to be averaged."""
        if not isinstance(self.state, Running):  # an activation checkpoint runs forward inside a backward pass
            self.inbox.reset()
        if self.delayed is not None:
            self.delayed.forward_done(averaging=synchronized)
        self._forward_under_no_sync, self._compared_with_forward = not synchronized, False
        self._parameter_observers = [o.parameter_ready for o in self.observers if o.watches_parameters]

    # Backward pass: what autograd calls

    def backward_starts(self) -> None:
        """Called when autograd reaches the outputs of a synchronised forward pass; it is averaged even in `no_sync`.

        There the outermost backward pass is running. So `_backward_ends` runs after all re-entrant passes that
        activation checkpoints start in between.
        """
        if isinstance(self.state, Running) and self.state.task != _current_task():
            backward_exceptions.end_raised_pass(self)
        if _current_task() == self._averaged_inside:
            self.fail(self.messages.message(Text.FORWARD_INSIDE_BACKWARD))
        self._enter_backward()
        match self.state:
            case Running(task=task, reduction=None, before=Expecting(reduction) as before, local=local):
                self._resume(task, reduction, before)
                self.inbox.indices[:0] = local
                self.inbox.limit = 1

    def _enter_backward(self) -> None:
        """Autograd has reached an output that has the reducer's hook or, if none has one, a parameter."""
        state = self.state
        if not isinstance(state, Idle | Expecting):
            return
        from torch._dynamo import compiled_autograd  # loaded by the first forward pass; see `module_wrapper`

        task = _current_task()
        if compiled_autograd.in_compiled_autograd_region:  # it traces the hooks, and may swallow the error
            self._fail_for_good(self.messages.message(Text.COMPILED_AUTOGRAD))
        if _rpc_runs() and distributed_autograd_runs():  # it hides errors of hooks; the next forward pass reports it
            self._fail_for_good(self.messages.message(Text.DISTRIBUTED_AUTOGRAD))
        if isinstance(state, Expecting) and state.reduction.beside and task != state.reduction.inside:
            self.fail(self.messages.message(Text.FORWARD_INSIDE_BACKWARD))
        # After a forward pass under `no_sync`, an earlier synchronised one keeps waiting for its gradients.
        stays_local = self._forward_under_no_sync and not self._sync_enabled()
        if isinstance(state, Expecting) and not stays_local:
            self._resume(task, state.reduction, state)
        else:
            self.state = Running(task, None, state)
        end = PassEnd(task, self._backward_ends, self.backward_raises)
        self.pass_end = weakref.ref(end)
        _engine.queue_callback(end)

    def _resume(self, task: int, reduction: Reduction, before: Expecting) -> None:
        """This backward pass contributes to a reduction, which an earlier pass may have begun."""
        self.state = Running(task, reduction, before, len(reduction.arrived))
        if reduction.begun:
            warn_of_changes(self, reduction)

    def _fail_for_good(self, message: str) -> NoReturn:
        self.state = Failed(message, resumes=False)
        self.fail(message)

    def gradients_arrived(self) -> None:
        """Called by autograd when a limit of the inbox is reached."""
        self._enter_backward()
        state = self.state
        if isinstance(state, Failed):
            backward_exceptions.fail_again(self, state)
        assert isinstance(state, Running)
        try:
            self._take_from_inbox(state)
        except BaseException as error:
            self.backward_raises(state.task, error)
            raise
        if self.tracker.counts_gradients or self._parameter_observers:
            self.inbox.limit = 1
        elif state.reduction is None:
            self.inbox.limit = self.inbox.room_bytes = NEVER if isinstance(state.before, Idle) else 1
        elif self.thorough or self._separates:
            self.inbox.limit = 1
        else:
            self.inbox.limit, self.inbox.room_bytes = arrivals_until_pack(self.buckets, state.reduction.next_bucket)

    def _backward_ends(self, task: int) -> None:
        """Called by autograd at the end of a backward pass: finish if all buckets were launched.

        If not, another backward pass may bring the missing gradients. Until then the script may change those that
        have arrived, so they are packed now.
        """
        state = self.state
        if not isinstance(state, Running) or state.task != task:
            return
        try:
            if state.reduction is not None:
                self._end(state, state.reduction)
        except BaseException as error:
            self.backward_raises(task, error)
            raise
        self.inbox.reset()
        self.state = state.before
        if state.reduction is not None and state.reduction.averaged:
            self.state = Idle()
            if state.reduction.inside != task:  # an inner pass, of a re-entrant checkpoint
                self._averaged_inside = state.reduction.inside

    def backward_raises(self, task: int, error: BaseException | None = None) -> None:
        """An exception, `error` if the reducer raised it, ends the backward pass."""
        if isinstance(self.state, Running) and self.state.task == task:
            backward_exceptions.end_interrupted(self, self.state, error)

    def check_finished(self) -> None:
        """Raise RuntimeError if the last backward pass did not average its gradients; the message names the cause."""
        if not isinstance(self.state, Idle):
            backward_exceptions.check_finished(self)

    # Averaging

    def _begin(self, reduction: Reduction) -> None:
        self._compare_with_forward()
        # Multiplying is faster than dividing, and gives the same bits as torch's default path, which multiplies too.
        reduction.scale = 1.0 if self.hook is not None else 1.0 / reduction.count_ranks()
        self.notify(Observer.backward_started)
        skip = self.tracker.unused if self.options.skip_all_reduce_unused_params else frozenset()
        reduction.to_send = [n for n, bucket in enumerate(self.buckets) if not skip.issuperset(bucket.indices)]
        reduction.begun = True
        self.without_gradients = None
        self.mark_ready(reduction, sorted(self.tracker.unused))

    def _compare_with_forward(self, *, local: int | None = None) -> None:
        """Warn if one of forward and backward ran inside `no_sync`, or nothing waits for that of index `local`."""
        inside = not self._sync_enabled()
        differs = inside if local is None else self._forward_under_no_sync and not inside
        if differs and not self._compared_with_forward:
            warnings.warn(self.messages.changed_mind(averaged=local is None), stacklevel=2)
        elif local is not None and not inside:
            # The pass may be of another wrapper that has the parameter too, and averages it or is under `no_sync`.
            others = [one for one in _reducers if getattr(one.state, "reduction", None) or not one._sync_enabled()]
            if not any(self.parameters[local] is parameter for one in others for parameter in one.parameters):
                self.messages.warn_once(Text.NOT_EXPECTED, local)
        self._compared_with_forward = True

    def _take_from_inbox(self, state: Running) -> None:
        arrived, undefined, reduction = self.inbox.take(), self.inbox.undefined, state.reduction
        if reduction is not None and arrived:
            if not reduction.begun:
                self._begin(reduction)
            reduction.arrived += arrived
            if self._separates or self.thorough or self.tracker.counts_gradients:
                for index in arrived:
                    self._separates |= separate(self.parameters[index], reduction.owners)
            if self.thorough and self.tracker.launches_during_backward:  # else other wrappers may average first
                for index in arrived:
                    self.changes.arrived(index, self.parameters[index].grad)
        if reduction is not None and not self.tracker.counts_gradients and not self._parameter_observers:
            reduction.ready_order += arrived
            self.mark_ready(reduction, arrived)
            return
        for index in arrived:
            remaining, defined = 0, index not in undefined
            if self.tracker.counts_gradients:
                remaining = self.tracker.gradient_arrived(index, defined=defined, expected=reduction is not None)
            if self._parameter_observers and defined:
                for parameter_ready in self._parameter_observers:
                    parameter_ready(index)
            if reduction is None:
                state.local.append(index)
                self._compare_with_forward(local=index)
            elif remaining == 0:
                reduction.ready_order.append(index)
                self.mark_ready(reduction, [index])
            elif remaining < 0:
                # As in torch, every further forward pass reports the gradients that are missing.
                self.state = Failed(backward_exceptions.unfinished(self, reduction), resumes=False)
                self.fail(self.messages.message(Text.GRAPH_CHANGED, index, self.buckets.bucket_of[index]))

    def mark_ready(self, reduction: Reduction, indices: Sequence[int]) -> None:
        """Put gradients into their buckets; pack those that are full, and launch those whose turn it is."""
        for number, together in groupby(indices, self.buckets.bucket_of.__getitem__):
            bucket = self.buckets[number]
            try:
                should_pack = bucket.put(list(map(self.buckets.slot_of.__getitem__, together)))
            except SecondGradientError as error:
                unused = error.args[0] in self.tracker.unused
                self.fail(self.messages.ready_twice(error.args[0], number, unused=unused))
            if should_pack:
                self._pack(reduction, number)
            if bucket.ready:
                self.notify(Observer.bucket_ready, number)
                self._launch_ready_buckets(reduction)

    def _pack(self, reduction: Reduction, number: int) -> None:
        bucket = self.buckets[number]
        for slot in bucket.misfits(thorough=self.thorough):
            if error := misfit(self, reduction, number, slot):
                self.fail(error)
        if self.thorough and (changed := self.changes.first_changed(bucket)) is not None:
            self.fail(self.messages.message(Text.CHANGED, changed, number))
        self.notify(Observer.bucket_packing, number)
        is_recorded = torch.is_grad_enabled()  # as with `create_graph`; `no_grad` takes ten times as long as to ask
        with profiled("torch::distributed::reducer::mul_out"), torch.no_grad() if is_recorded else _NOTHING:
            bucket.pack(reduction.scale)

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
        is_last = number == reduction.to_send[-1]
        reduction.in_flight[number] = launched = self.send(self.buckets[number], number, is_last=is_last)
        self.notify(Observer.bucket_launched, number, launched.future)

    def _end(self, state: Running, reduction: Reduction) -> None:
        self._take_from_inbox(state)
        if not self.tracker.launches_during_backward and self.tracker.all_arrived():
            self.mark_ready(reduction, range(len(self.parameters)))
        if reduction.next_bucket == len(self.buckets):
            if not self.options.require_manual_backward_finalization:
                self.finish(reduction)
            return
        if reduction.begun:
            for number in range(reduction.next_bucket, len(self.buckets)):
                self._pack(reduction, number)
            reduction.before = snapshot(self.parameters)
        else:
            self.without_gradients = snapshot(self.parameters)

    @torch.no_grad()
    def finish(self, reduction: Reduction) -> None:
        """All buckets were launched: wait for them in launch order, and copy the averages into the gradients."""
        self.notify(Observer.backward_computed)
        untouched = self.tracker.untouched()
        if self.optimizers_in_backward:
            untouched |= {index for index, parameter in enumerate(self.parameters) if parameter.grad is None}
        for number, bucket in enumerate(self.buckets):
            if number in reduction.in_flight:
                averages = self.wait(reduction.in_flight, number)
                self.notify(Observer.bucket_done, number)
                with profiled("torch.distributed.ddp.reducer::copy_bucket_to_grad"):
                    bucket.copy_out(averages, unused=untouched)
                if (replaced := bucket.replaced(untouched)) is not None:
                    self.fail(self.messages.message(Text.REPLACED, replaced, number))
                self.notify(Observer.bucket_copied_out, number)
        self.close(reduction)

    def close(self, reduction: Reduction) -> None:
        """After the last bucket: remember what the next iteration needs, on all ranks alike."""
        self.note_ready_order(reduction.ready_order)
        self.reduced_buckets = len(reduction.in_flight)
        self.wait_for_others()
        self.tracker.finished()
        self.thorough = False
        reduction.averaged = True

    def note_ready_order(self, ready_order: list[int]) -> None:
        """Ranks rebuild together, so what they share decides: the number of averaged iterations."""
        self.averaged += 1
        if self.averaged > self.tracker.iterations_without_ready_order:
            self.ready_order = ready_order or list(range(len(self.parameters)))

    def wait_for_others(self) -> None:
        """Wait for the futures in `after_backward`."""
        while self.after_backward:
            self.after_backward.pop(0).wait()

    # Sending buckets

    def send(self, bucket: Bucket, number: int, *, is_last: bool) -> InFlight:
        """Launch the collective of a bucket; returns at once. Raises RuntimeError if the comm hook failed."""
        self.notify(Observer.bucket_sending, number)
        launch = self.launch_order.launching(number, bucket.size_bytes, self.iterations) if self.launch_order else 0
        if self.hook is None:
            return InFlight(bucket.all_reduce(self.group), bucket, launch)
        try:
            return InFlight(self.hook.call(bucket, number, is_last=is_last), bucket, launch)
        except RuntimeError as error:
            self.last_error = str(error)
            raise

    def wait(self, in_flight: dict[int, InFlight], number: int) -> Tensor | None:
        """Wait for a bucket, see `HookCaller.wait`; an error names ranks that left the launch order, if checked."""
        future, bucket, launch = in_flight[number]
        try:
            if self.hook is not None:
                return self.hook.wait(future, bucket, number)
            future.wait()
            return None
        except (TypeError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and self.launch_order and (why := self.launch_order.explain(launch)):
                self.fail(f"{why}. {error}", partial(LaunchOrderError, self.group.rank()))
            self.last_error = str(error)
            raise


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range in the profile, under the name that torch's reducer gives it; costs nothing without a profiler."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else _NOTHING  # type: ignore[attr-defined]
