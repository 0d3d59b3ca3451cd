"""The states of a data-parallel module's backward pass.

A synchronised forward pass leads from *idle* to *expecting*, the start of its backward pass to *running*, and the
end of that pass, with all buckets averaged, back to *idle*. A forward pass under `no_sync` changes nothing. Several
backward passes may bring the gradients of one forward pass, so a pass that ends before all have arrived leads back
to *expecting*; so does one whose averages the script asks for later, see `between_iterations.finalize_backward`.
The next forward pass raises an error if only some gradients of the last one have arrived, or if the state is
*failed* and the failure does not permit to go on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from .buckets import Bucket
from .recording.reducer_observer import Future

Snapshot = Sequence[tuple[int, int]]
"""By parameter index the identity and version of its gradient; zeros: it has none."""


class InFlight(NamedTuple):
    """A launched collective; `launch` is its number in the checked launch order, 0 without `debug`."""

    future: Future
    bucket: Bucket
    launch: int


@dataclass(slots=True, kw_only=True)
class Reduction:
    """Progress in averaging the gradients of one synchronised forward pass."""

    count_ranks: Callable[[], int]  #: returns the number of ranks to divide by; called at the first gradient
    reachable: frozenset[int] | None
    """Indices of the parameters that forward's outputs depend on, for error messages. None: not searched."""
    ready_order: list[int] = field(default_factory=list)
    """Parameter indices in the order in which their gradients became ready."""
    begun: bool = False  #: whether a gradient has arrived
    arrived: list[int] = field(default_factory=list)
    """Parameter indices in the order in which gradients arrived, undefined ones too."""
    inside: int = -1  #: autograd's number of the backward pass in which forward ran, to recompute; -1: in none
    beside: bool = False  #: whether that pass had reached the outputs of another forward pass by then
    before: Snapshot = ()  #: the gradients at the end of the last backward pass that left some out
    owners: dict[int, nn.Parameter] = field(default_factory=dict)
    """Parameters by the address of their gradients' memory, for gradients that were checked for sharing."""
    scale: float = 1.0  #: factor that packing applies to gradients
    to_send: Sequence[int] = ()  #: indices of the buckets to send, in launch order; the others are skipped
    next_bucket: int = 0  #: index of the first bucket that has been neither launched nor skipped
    launches: int = 0  #: launches attempted; one that raised may have issued a collective, but is not in `in_flight`
    in_flight: dict[int, InFlight] = field(default_factory=dict)  #: launched collectives by bucket index
    averaged: bool = False  #: whether all have ended, and the averages are in the gradients

    @property
    def launched_all(self) -> bool:
        """Whether every bucket in `to_send` was launched; then all ranks issue the same collectives."""
        return self.begun and self.launches == len(self.in_flight) == len(self.to_send)


@dataclass(frozen=True, slots=True)
class Idle:
    """No synchronised forward pass waits for its backward pass: gradients stay local."""


@dataclass(frozen=True, slots=True)
class Expecting:
    """A synchronised forward pass has run, and its gradients have not been averaged yet."""

    reduction: Reduction


@dataclass(frozen=True, slots=True)
class Running:
    """Autograd runs a backward pass that has reached the module."""

    task: int  #: autograd's number of the backward pass
    reduction: Reduction | None  #: the reduction to which the pass contributes; None: its gradients stay local
    before: "Idle | Expecting"  #: the state to restore after the pass, unless averaging is complete or has failed
    arrived_before: int = 0  #: number of gradients that earlier passes brought for `reduction`
    local: list[int] = field(default_factory=list)
    """Parameter indices whose gradients arrived without a reduction. They count if the pass then reaches the outputs
    of the forward pass that waits."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception ended a backward pass whose gradients can no longer be averaged."""

    message: str  #: message of the error that the next forward pass raises
    resumes: bool
    """Whether the next forward pass may go on instead, because every rank issues the same collectives and this rank's
    have ended."""


State = Idle | Expecting | Running | Failed
