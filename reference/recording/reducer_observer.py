"""Observer interface: callbacks at each step of a reducer, for recorders, logs and emulated devices."""

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo as not_compiled  # see `module_wrapper`

Future = torch.futures.Future[Any]


class Observer:
    """Receives a call at each step of a reducer. Every method is a no-op; override those you need."""

    watches_parameters = False
    """Whether to call `parameter_ready`, the only callback that costs time for every gradient."""

    def forward_started(self) -> None:
        """A synchronised forward pass begins."""

    def backward_started(self) -> None:
        """The first gradient of a synchronised backward pass has arrived."""

    def parameter_ready(self, index: int) -> None:
        """A gradient of a parameter has been accumulated, also under `no_sync`."""

    def bucket_packing(self, bucket: int) -> None:
        """The gradients of the bucket are about to be copied into its buffer."""

    def bucket_ready(self, bucket: int) -> None:
        """All gradients of the bucket are ready."""

    def bucket_launching(self, bucket: int) -> None:
        """The collective of the bucket is about to be issued."""

    def bucket_sending(self, bucket: int) -> None:
        """The same, also on a rank that has run out of inputs and sends zeros."""

    def bucket_launched(self, bucket: int, future: Future) -> None:
        """The collective of the bucket has been issued, and may already be done."""

    def backward_computed(self) -> None:
        """All gradients have been computed and all buckets launched."""

    def bucket_done(self, bucket: int) -> None:
        """The reducer has returned from waiting for the bucket's collective."""

    def bucket_copied_out(self, bucket: int) -> None:
        """The bucket's averages are in the gradients."""


class RecordingHook:
    """A hook of a recorder on a module's forward pass; copies and pickles of a data-parallel module leave it out."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    @not_compiled
    def __call__(self, *args: Any) -> None:
        """Called by the module, also where that is compiled."""
        self._hook(*args)
