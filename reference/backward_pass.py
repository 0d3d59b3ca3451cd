"""The state of a data-parallel module's backward pass, and every event that changes it.

========= ==========================================================================================
state     meaning
========= ==========================================================================================
idle      no synchronised forward pass waits for its backward pass: gradients stay local
expecting a synchronised forward pass has run, and its gradients have not been averaged yet
running   autograd runs a backward pass that has reached the module
failed    an exception ended a backward pass whose gradients can no longer be averaged
========= ==========================================================================================

A synchronised forward pass leads to *expecting*, and one under `no_sync` changes nothing. Instead, either raises an
error if the state is *failed* (unless `forward_begins` clears the failure), or if only some of the gradients of the
last synchronised forward pass have arrived. Several backward passes may bring the gradients of one forward pass, so a
backward pass that ends before all have arrived leads back to *expecting*. The functions below are all other
transitions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .buckets import Bucket
from .observer import Future

NO_TASK = -1
"""The number that torch returns for the running backward pass when no backward pass runs."""


class InFlight(NamedTuple):
    """A launched collective; `launch` is its number in the checked launch order, 0 without `debug`."""

    future: Future
    bucket: Bucket
    launch: int


@dataclass(slots=True, kw_only=True)
class Reduction:
    """Progress in averaging the gradients of one synchronised forward pass.

    Attributes:
        count_ranks: Returns the number of ranks to divide by; called when the first gradient arrives.
        reachable: Indices of the parameters that forward's outputs depend on, for error messages. None: not searched.
        ready_order: Parameter indices in the order in which their gradients became ready.
        begun: Whether a gradient has arrived.
        arrived: Number of gradients that have arrived.
        scale: Factor by which gradients are multiplied when they are packed.
        to_send: Indices of the buckets to send, in launch order; the others are skipped.
        next_bucket: Index of the first bucket that has been neither launched nor skipped.
        launches: Number of launches attempted. One that raised may have issued a collective, but is not in
            `in_flight`.
        in_flight: Launched collectives by bucket index.
    """

    count_ranks: Callable[[], int]
    reachable: frozenset[int] | None
    ready_order: list[int] = field(default_factory=list)
    begun: bool = False
    arrived: int = 0
    scale: float = 1.0
    to_send: Sequence[int] = ()
    next_bucket: int = 0
    launches: int = 0
    in_flight: dict[int, InFlight] = field(default_factory=dict)

    @property
    def launched_all(self) -> bool:
        """Whether every bucket in `to_send` was launched; then all ranks issue the same collectives."""
        return self.begun and self.launches == len(self.in_flight) == len(self.to_send)


class PassEnd:
    """Autograd calls this object when a backward pass ends, and drops it if an exception ends the pass.

    Nothing else may hold the object, because its destructor is the only sign of the exception.

    Args:
        task: Autograd's number of the backward pass.
        ended: Called with the number at the end of the pass.
        raised: Called with the number when autograd drops the object after an exception. (On a GPU, autograd's own
            thread may drop it a little after the exception has reached the script.)
    """

    def __init__(self, task: int, ended: Callable[[int], None], raised: Callable[[int], None]) -> None:
        self._task, self._ended, self._raised = task, ended, raised
        self._was_called = False

    def __call__(self) -> None:
        """Called by autograd when the backward pass ends without an exception."""
        self._was_called = True
        self._ended(self._task)

    def __del__(self) -> None:
        if not self._was_called:
            self._raised(self._task)


@dataclass(frozen=True, slots=True)
class Idle:
    """No synchronised forward pass waits for its backward pass: gradients stay local."""


@dataclass(frozen=True, slots=True)
class Expecting:
    """A synchronised forward pass has run, and its gradients have not been averaged yet."""

    reduction: Reduction


@dataclass(frozen=True, slots=True)
class Running:
    """Autograd runs a backward pass that has reached the module.

    Attributes:
        task: Autograd's number of the backward pass.
        reduction: The reduction to which the pass contributes. None: its gradients stay local.
        before: The state before the pass, restored after it unless the averaging is complete or has failed.
        arrived_before: Number of gradients that earlier passes brought for `reduction`.
    """

    task: int
    reduction: Reduction | None
    before: "Idle | Expecting"
    arrived_before: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception ended a backward pass whose gradients can no longer be averaged.

    Attributes:
        message: Message of the error that the next forward pass raises.
        resumes: Whether the next forward pass may go on instead, because every rank issues the same collectives and
            this rank's have ended.
    """

    message: str
    resumes: bool


State = Idle | Expecting | Running | Failed


def backward_starts(state: State, task: int, *, stays_local: bool) -> State:
    """Autograd has reached an output that has the reducer's hook or, if none has one, a parameter.

    Args:
        state: The present state.
        task: Autograd's number of the backward pass.
        stays_local: Whether this backward pass and the last forward pass both ran under `no_sync`. If they did, an
            earlier synchronised forward pass keeps waiting for its gradients.
    """
    match state:
        case Expecting(reduction) if not stays_local:
            return Running(task, reduction, state, reduction.arrived)
        case Idle() | Expecting():
            return Running(task, None, state)
    return state


def synchronized_outputs_reached(state: State) -> State:
    """Autograd has reached the outputs of a synchronised forward pass; the pass averages, even under `no_sync`."""
    match state:
        case Running(reduction=None, before=Expecting(reduction)):
            return Running(state.task, reduction, state.before, reduction.arrived)
    return state


def backward_ends(state: State, buckets: int) -> State:
    """The backward pass has ended; if all `buckets` were launched, the gradients hold the averages.

    Args:
        state: The present state.
        buckets: Number of buckets.
    """
    match state:
        case Running(reduction=None):
            return state.before
        case Running(reduction=Reduction(next_bucket=next_bucket)) if next_bucket < buckets:
            return state.before
        case Running():
            return Idle()
    return state


def backward_raises(state: State, message: str, *, arrived: int, by_reducer: bool, alone: bool) -> State:
    """An exception has ended the backward pass.

    - No gradient arrived in this pass: the state is the one before the pass.
    - No bucket was launched, and no earlier pass brought gradients: likewise. Another backward pass may bring the
      gradients again, or another forward pass may skip the batch.
    - All buckets were launched: every rank issues the same collectives, so the next forward pass may go on.
    - Only some buckets were launched: the next forward pass must raise, because this rank's next launch, of its first
      bucket, would be paired with the launch of a later bucket on the other ranks.
    - Gradients arrived, and the reducer itself raised the exception: the next forward pass must raise, because other
      ranks may have launched fewer buckets.

    A single rank may always go on.

    Args:
        state: The present state.
        message: Message of the error that the next forward pass raises if it must.
        arrived: Number of gradients that arrived in this pass.
        by_reducer: Whether the reducer itself raised the exception.
        alone: Whether there is only one rank.
    """
    match state:
        case Running(reduction=None):
            return state.before
        case Running() if not arrived:
            return state.before
        case Running(reduction=Reduction(launches=0), arrived_before=0) if not by_reducer:
            return state.before
        case Running(reduction=Reduction(launched_all=launched_all)):
            return Failed(message, resumes=alone or (launched_all and not by_reducer))
    return state


def gradient_after_failure(state: Failed, message: str) -> State:
    """A gradient has arrived after the failure, before a new forward pass; `message`: that of the error about it."""
    return Failed(message, resumes=False) if state.resumes else state


def forward_begins(state: State) -> State:
    """A forward pass begins; if the state returned is still `Failed`, the caller must raise its message."""
    match state:
        case Failed(resumes=True):
            return Idle()
    return state
