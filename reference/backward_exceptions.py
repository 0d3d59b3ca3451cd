"""Backward passes that did not end as they should: by an exception, without all gradients, or not yet.

After an exception training goes on wherever every rank still issues the same collectives.
"""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import torch

from .backward_pass import Expecting, Failed, Idle, Reduction, Running, State
from .checks.error_messages import Text

if TYPE_CHECKING:
    from .reducer import Reducer

NO_TASK = -1
"""The number that torch returns for the running backward pass when no backward pass runs."""
LATE_END_S = 1.0
"""On a GPU, autograd may drop the end of a backward pass that raised so much later than the script sees the error."""


def check_finished(reducer: "Reducer") -> None:
    """See `Reducer.check_finished`."""
    if isinstance(reducer.state, Running) and torch._C._current_graph_task_id() == NO_TASK:
        end_raised_pass(reducer)
    match reducer.state:
        case Failed(resumes=True):
            reducer.state = Idle()
        case Failed(message):
            reducer.fail(message)
        case Expecting(Reduction(begun=True, next_bucket=done)) if done == len(reducer.buckets):
            reducer.fail(reducer.messages.message(Text.NOT_FINALIZED))
        case Expecting(Reduction(begun=True) as reduction):
            reducer.fail(unfinished(reducer, reduction))


def fail_again(reducer: "Reducer", state: Failed) -> NoReturn:
    """Another backward pass brings gradients after a failed one, without a forward pass."""
    message = f"{state.message}\n{reducer.messages.message(Text.RETRIED)}"
    reducer.state = Failed(message, resumes=False) if state.resumes else state
    reducer.inbox.reset()
    reducer.fail(message)


def missing(reducer: "Reducer") -> list[int]:
    """Parameter indices whose gradients are not ready."""
    buckets = reducer.buckets
    return sorted(index for bucket in buckets for slot, index in enumerate(bucket.indices) if not bucket.is_put[slot])


def unfinished(reducer: "Reducer", reduction: Reduction) -> str:
    """Error: the last backward pass left gradients out."""
    without = missing(reducer)
    reducer.check_not_converted(without)
    unlaunched = range(reduction.next_bucket, len(reducer.buckets))
    return reducer.messages.unfinished(without, reduction.reachable, unlaunched, reducer.options)


def end_raised_pass(reducer: "Reducer") -> None:
    """End a backward pass that has raised, although autograd has not dropped its end yet.

    Raises RuntimeError if the pass still runs, in another thread or around this one, and averages gradients.
    """
    state = reducer.state
    assert isinstance(state, Running)
    if state.reduction is not None and state.reduction.begun:
        give_up = time.monotonic() + LATE_END_S
        while reducer.state is state and reducer.pass_end() is not None:
            if time.monotonic() > give_up:
                reducer.fail(reducer.messages.message(Text.PASS_STILL_RUNS))
            time.sleep(0.001)  # the pass ends in autograd's thread, which has no event to wait for
    reducer.backward_raises(state.task)


def after_exception(state: Running, message: str, *, arrived: int, by_reducer: bool, alone: bool) -> State:
    """The state after an exception has ended the backward pass.

    - No gradient arrived in this pass: the state is the one before the pass.
    - No bucket was launched, and no earlier pass brought gradients: likewise. Another backward pass may bring the
      gradients again, or another forward pass may skip the batch.
    - All buckets were launched: every rank issues the same collectives, so the next forward pass may go on.
    - Only some buckets were launched: the next forward pass must raise, because this rank's next launch, of its first
      bucket, would be paired with the launch of a later bucket on the other ranks.
    - Gradients arrived, and the reducer itself raised the exception: the next forward pass must raise, because other
      ranks may have launched fewer buckets.

    A single rank may always go on. `message` is that of the error which the next forward pass raises if it must, and
    `arrived` is the number of gradients that arrived in this pass.
    """
    reduction = state.reduction
    if reduction is None or not arrived:
        return state.before
    if not reduction.launches and not state.arrived_before and not by_reducer:
        return state.before
    return Failed(message, resumes=alone or (reduction.launched_all and not by_reducer))


def end_interrupted(reducer: "Reducer", state: Running, error: BaseException | None) -> None:
    """End a backward pass that an exception has ended; `error`: the exception, if the reducer itself raised it.

    If training may go on, all collectives in flight have ended when this returns, because the next pass, or a
    script that clears its gradients in place, writes into their buffers. After an error of the reducer's own it
    may not: other ranks may have launched less, and the error must not wait for them.
    """
    reduction = state.reduction
    launched, arrived = 0, len(reducer.inbox.indices)
    if reduction is not None:
        launched, arrived = len(reduction.in_flight), arrived + len(reduction.arrived) - state.arrived_before
    reducer.inbox.reset()
    reducer.changes.clear()  # they will not be packed, and must not stay in memory
    outside = "raised outside of the reducer, for example by a hook of the model or for lack of memory"
    cause = outside if error is None else f"{type(error).__name__}: {error}"
    message = reducer.messages.message(Text.INTERRUPTED, cause=cause, launched=launched, buckets=len(reducer.buckets))
    by_reducer = isinstance(error, Exception)  # not Ctrl-C
    after = after_exception(state, message, arrived=arrived, by_reducer=by_reducer, alone=reducer.group.size() == 1)
    reducer.state = Failed(message, resumes=False)  # stays if a collective fails too, or Ctrl-C ends the waiting
    with suppress(Exception):
        if reduction is not None and isinstance(after, Expecting) and arrived:
            _start_again(reducer, reduction)
        elif reduction is not None and isinstance(after, Failed) and after.resumes:
            _wait_for_all(reducer, reduction)
            reducer.close(reduction)
        reducer.state = after


def _start_again(reducer: "Reducer", reduction: Reduction) -> None:
    """Forget all gradients that have arrived: no bucket was launched, and a further pass brings them again."""
    reducer.wait_for_others()
    for bucket in reducer.buckets:
        bucket.unpack(reduction.scale)
        bucket.reset()
    reduction.begun = False
    reduction.next_bucket = 0  # buckets without used parameters may have been skipped
    reduction.arrived, reduction.ready_order = [], []
    reducer.tracker.abandoned()


def _wait_for_all(reducer: "Reducer", reduction: Reduction) -> None:
    """Wait for all collectives; the future of a comm hook may hold an error, but must have a result."""
    for number, launched in reduction.in_flight.items():
        try:
            reducer.wait(reduction.in_flight, number)
        except Exception:  # a hook may raise anything, and its collective may have ended all the same
            if not launched.future.done():
                raise
    reducer.tracker.untouched()


def distributed_autograd_runs() -> bool:
    """Whether a context of `torch.distributed.autograd` is open in this thread or a pass runs; RPC must run."""
    autograd = torch._C._distributed_autograd
    with suppress(RuntimeError):  # no context is open, or only in another thread
        return autograd._current_context() is not None
    return int(autograd._get_debug_info()["num_current_backward_passes"]) > 0
