"""The state of a data-parallel module's backward pass, and every event that changes it.

========= ==========================================================================================
state     meaning
========= ==========================================================================================
idle      no synchronised forward pass waits for its backward pass: gradients stay local
expecting a synchronised forward pass has run: the gradients to come are averaged
running   autograd runs a backward pass that has reached the module
failed    an exception ended a backward pass after collectives had been launched
========= ==========================================================================================

A synchronised forward pass leads to *expecting*, whatever happened before, except that a failed module may raise. A
forward pass under `no_sync` changes nothing. Several backward passes may bring the gradients of one forward pass, so
a pass that ends without all of them leads back to *expecting*. The functions below are all other transitions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .buckets import Bucket
from .observer import Future

NO_TASK = -1
"""What torch returns as the number of the running backward pass where none runs."""


class InFlight(NamedTuple):
    """A collective that was launched; `launch` is its number in the checked launch order, 0 without `debug`."""

    future: Future
    bucket: Bucket
    launch: int


@dataclass(slots=True, kw_only=True)
class Reduction:
    """The averaging of one synchronised forward pass's gradients, as far as it has come.

    Attributes:
        count_ranks: Returns the number of ranks to divide by; called when the first gradient arrives.
        reachable: Parameter indices behind forward's outputs, for error messages. None: not searched.
        ready_order: Parameter indices in the order in which their gradients became ready.
        begun: Whether a gradient has arrived.
        arrived: Number of gradients that have arrived.
        scale: Factor on each gradient that is packed.
        to_send: Indices of the buckets that are sent, in launch order.
        next_bucket: Index of the first bucket that has not been launched.
        launches: Number of launches begun. One that raised may have issued a collective, and is not in `in_flight`.
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
        """Whether every bucket that is sent was launched: then all ranks have issued the same collectives."""
        return self.begun and self.launches == len(self.in_flight) == len(self.to_send)


class PassEnd:
    """Autograd calls this object when a backward pass ends, and drops it if an exception ends the pass.

    Nothing else may hold the object, because its destructor is the only sign of the exception.

    Args:
        task: Autograd's number of the backward pass.
        ended: Called with the number at the end of the pass.
        raised: Called with the number as soon as autograd has given up the pass. (On a GPU autograd's own thread
            may drop the object a little later than the exception reaches the script.)
    """

    def __init__(self, task: int, ended: Callable[[int], None], raised: Callable[[int], None]) -> None:
        self._task, self._ended, self._raised = task, ended, raised
        self._was_called = False

    def __call__(self) -> None:
        """The backward pass has ended without an exception."""
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
        reduction: What the pass contributes to. None: its gradients stay local.
        before: The state before the pass, which returns after it if its gradients stay local.
        arrived_before: Number of gradients that earlier passes brought for `reduction`.
    """

    task: int
    reduction: Reduction | None
    before: "Idle | Expecting"
    arrived_before: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception ended a backward pass after collectives had been launched.

    Attributes:
        message: The error of the next forward pass.
        resumes: Whether the next forward pass may go on without that error, because every rank has issued the same
            collectives and all of them have ended.
    """

    message: str
    resumes: bool


State = Idle | Expecting | Running | Failed


def backward_starts(state: State, task: int, *, stays_local: bool) -> State:
    """Autograd has reached forward's outputs or, if they are hidden from the module, a parameter.

    Args:
        state: The present state.
        task: Autograd's number of the backward pass.
        stays_local: Whether this pass and the last forward pass both ran under `no_sync`, so an earlier, synchronised
            forward pass goes on waiting.
    """
    match state:
        case Expecting(reduction) if not stays_local:
            return Running(task, reduction, state, reduction.arrived)
        case Idle() | Expecting():
            return Running(task, None, state)
    return state


def synchronized_outputs_reached(state: State) -> State:
    """Autograd has reached the outputs of a synchronised forward pass: whatever the script says, that one decides."""
    match state:
        case Running(reduction=None, before=Expecting(reduction)):
            return Running(state.task, reduction, state.before, reduction.arrived)
    return state


def backward_ends(state: State, buckets: int) -> State:
    """The backward pass has ended; the averages of all `buckets` are in the gradients if all were launched."""
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

    If no gradient had arrived, the pass leaves nothing behind. If no bucket was launched, a further backward pass may
    bring the gradients again, and a next forward pass only skips the batch. If all buckets were launched, every rank
    issues the same collectives. If some were, the first bucket of the next iteration would be paired with a later
    bucket of the ranks that go on.

    Args:
        state: The present state.
        message: The error of the next forward pass.
        arrived: Number of gradients that arrived in this pass.
        by_reducer: Whether the reducer raised the exception: other ranks may not come as far as this one.
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
    """A gradient has arrived without a forward pass after the failure; `message`: the error that reports it."""
    return Failed(message, resumes=False) if state.resumes else state


def forward_begins(state: State) -> State:
    """A forward pass begins; a module that still is in the state *failed* afterwards must raise its message."""
    match state:
        case Failed(resumes=True):
            return Idle()
    return state
