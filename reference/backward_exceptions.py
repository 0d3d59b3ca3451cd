"""Exceptions in the backward pass: training goes on wherever every rank still issues the same collectives."""

from contextlib import suppress
from typing import TYPE_CHECKING

from .backward_pass import Expecting, Failed, Reduction, Running, State

if TYPE_CHECKING:
    from .reducer import Reducer


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
    reducer.changes.forget()
    message = reducer.messages.interrupted(launched, len(reducer.buckets), error)
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
        except Exception:
            if not launched.future.done():
                raise
    reducer.tracker.untouched()
