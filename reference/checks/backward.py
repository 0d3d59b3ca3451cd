"""Checks during forward and backward passes, and the text of every error and warning about a reduction."""

import warnings
from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ..buckets import Bucket, Features

NAMED_AT_MOST = 5  # unless TORCH_DISTRIBUTED_DEBUG asks for more


class ErrorMessages:
    """Turns parameter indices into messages.

    Args:
        parameters: Trainable parameters by name, in index order.
        rank: This process's rank in its group.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], rank: int) -> None:
        self._names = list(parameters)
        self._shapes = [tuple(parameter.shape) for parameter in parameters.values()]
        self._rank = rank

    def describe(self, index: int) -> str:
        """A parameter's name, index and shape."""
        return f"{self._names[index]} (parameter {index}, shape {self._shapes[index]})"

    def unfinished(
        self,
        missing: Sequence[int],
        reached: Collection[int] | None,
        buckets: Sequence[int],
        features: Features,
    ) -> str:
        """The last backward pass left gradients out.

        Args:
            missing: Parameters without a gradient, ascending.
            reached: Parameters behind forward's outputs. None: not known.
            buckets: BucketAssignment that were therefore never launched.
            features: What the reducer was asked to do.
        """
        if features.static_graph:
            cause = (
                "This error indicates that your training graph has changed in this iteration, e.g., one parameter "
                "is used in first iteration, but then got unused in the second iteration. this is not compatible "
                "with static_graph set to True."
            )
        elif features.find_unused_parameters:
            cause = (
                "find_unused_parameters=True is on, so these parameters are part of what forward returned, in an "
                "output that takes no part in the loss and was not found in its structure. Return outputs in "
                "lists, tuples, dicts or dataclasses."
            )
        else:
            cause = (
                "Parameters were not used in producing the loss. Detect them by passing the keyword argument "
                "`find_unused_parameters=True` to the constructor, and by making sure that all `forward` function "
                "outputs participate in calculating loss."
            )
        indices = " ".join(map(str, missing))
        debug_off = get_debug_level() == DebugLevel.OFF
        hint = (
            "\nTo have all of them named, and told apart in every iteration, set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
        )
        names = ", ".join(self._names[index] for index in missing)
        return (
            f"rank {self._rank}: Expected to have finished reduction in the prior iteration before starting a new "
            f"one. {cause}\n"
            f"Parameter indices which did not receive grad for rank {self._rank}: {indices}"
            f"{'' if debug_off else f'{chr(10)}Parameters which did not receive grad for rank {self._rank}: {names}'}"
            f"{self._cases(missing, reached, limited=debug_off)}\n"
            f"Buckets that were not launched: {', '.join(map(str, buckets))}; no gradient in them was averaged."
            f"{hint if debug_off else ''}"
        )

    def _cases(self, missing: Sequence[int], reached: Collection[int] | None, *, limited: bool) -> str:
        if reached is None:
            return f"\nWithout a gradient: {self._list(missing, limited=limited)}"
        not_in_loss = [index for index in missing if index in reached]
        not_in_forward = [index for index in missing if index not in reached]
        lines = ""
        if not_in_forward:
            lines += f"\nNot used in forward: {self._list(not_in_forward, limited=limited)}"
        if not_in_loss:
            lines += (
                f"\nUsed in forward, but their output is not used in the loss: "
                f"{self._list(not_in_loss, limited=limited)}"
            )
        return lines

    def _list(self, indices: Sequence[int], *, limited: bool) -> str:
        shown = indices[:NAMED_AT_MOST] if limited else indices
        more = len(indices) - len(shown)
        return ", ".join(map(self.describe, shown)) + (f" and {more} more" if more else "")

    def ready_twice(self, index: int, bucket: int, *, unused: bool) -> str:
        """A parameter got a gradient that was not expected any more."""
        if unused:
            cause = (
                "forward's outputs do not depend on it, so it was counted as unused: it is used outside the "
                "`forward` function. Move that use into forward, or train it outside of this module"
            )
        else:
            cause = (
                "either one backward pass too many per forward pass (accumulate under no_sync()), or several "
                "re-entrant backward passes that share it, as with use_reentrant=True checkpoints (try "
                "static_graph=True), or a use outside the `forward` function"
            )
        return (
            f"rank {self._rank}: Expected to mark a variable ready only once. {self.describe(index)} in bucket "
            f"{bucket} got a second gradient since the last forward pass; the cause is {cause}."
        )

    def graph_changed(self, index: int, bucket: int) -> str:
        """Under `static_graph`, a parameter got more gradients than in the first iteration."""
        return (
            f"rank {self._rank}: Your training graph has changed in this iteration: {self.describe(index)} in bucket "
            f"{bucket} got more gradients than in the first iteration, e.g., one parameter is unused in first "
            "iteration, but then got used in the second iteration. this is not compatible with static_graph set to "
            "True."
        )

    def mismatch(self, index: int, bucket: int, gradient: Tensor, buffer: Tensor) -> str:
        """A gradient that does not fit into its bucket."""
        return (
            f"rank {self._rank}: expected the gradient of {self.describe(index)} in bucket {bucket} to be "
            f"{_kind(buffer)}, got {_kind(gradient)}. Convert the module before it is wrapped, not after."
        )

    def converted(self, index: int, bucket: int, parameter: Tensor, buffer: Tensor) -> str:
        """A parameter that is not what it was: autograd does not tell of its gradients any more."""
        return (
            f"rank {self._rank}: {self.describe(index)} in bucket {bucket} was wrapped as {_kind(buffer)}, now it is "
            f"{_kind(parameter)}. Convert the module before it is wrapped, not after."
        )

    def strides(self, index: int, gradient: Tensor, view: Tensor) -> str:
        """A gradient whose memory layout is not its parameter's: right, but slow."""
        return (
            f"rank {self._rank}: the gradient of {self.describe(index)} has strides {gradient.stride()}, its "
            f"parameter {view.stride()}. Grad strides do not match bucket view strides: copying it is slow. "
            "Wrap the module after converting it to its memory format."
        )

    def graph_not_averaged(self, index: int) -> str:
        """The gradients are themselves differentiable, but their averages are not."""
        return (
            f"rank {self._rank}: backward was called with create_graph=True. The gradient of {self.describe(index)} "
            "is averaged in place, outside of the graph: derivatives of it are those of this rank's gradient."
        )

    def changed_mind(self, *, averaged: bool) -> str:
        """Forward and backward were not both inside, or both outside, `no_sync`."""
        inside, outside = ("backward", "forward") if averaged else ("forward", "backward")
        return (
            f"rank {self._rank}: {outside} ran outside of no_sync(), but its {inside} inside. forward decides, so "
            f"these gradients are {'averaged' if averaged else 'not averaged'}. Run both inside, or both outside."
        )


def _kind(tensor: Tensor) -> str:
    layout = "sparse " if tensor.is_sparse else ""
    return f"a {layout}{tensor.dtype} tensor on {tensor.device}"


class GradientCheck:
    """Whether gradients fit into their buckets."""

    def __init__(self, messages: ErrorMessages) -> None:
        self._messages = messages
        self._warned_of_graph = False
        self.thorough = True
        """Whether to look at every gradient, and at its strides; set it again when the buckets are new."""

    def converted(self, buckets: Sequence[Bucket]) -> str | None:
        """Whether the module has been converted since it was wrapped; None: no."""
        for number, bucket in enumerate(buckets):
            parameter, buffer = bucket.parameters[0], bucket.buffer
            if parameter.dtype != buffer.dtype or parameter.device != buffer.device:
                return self._messages.converted(bucket.indices[0], number, parameter, buffer)
        return None

    def complaint(self, bucket: Bucket, number: int, slots: Sequence[int]) -> str | None:
        """What is wrong with the gradients of these slots; None: nothing. Warns of what is only slow."""
        for slot in slots:
            gradient = bucket.parameters[slot].grad
            if gradient is None:
                continue
            index, view = bucket.indices[slot], bucket.views[slot]
            if gradient.dtype != view.dtype or gradient.device != view.device or gradient.layout != view.layout:
                return self._messages.mismatch(index, number, gradient, view)
            if self.thorough and not view.is_sparse and _dense_strides(gradient) != _dense_strides(view):
                warnings.warn(self._messages.strides(index, gradient, view), stacklevel=2)
                self.thorough = False  # once is enough
            if gradient.requires_grad and not self._warned_of_graph:
                warnings.warn(self._messages.graph_not_averaged(index), stacklevel=2)
                self._warned_of_graph = True
        return None


def _dense_strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the others mean nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


class NoSyncCheck:
    """Whether forward and backward were both inside, or both outside, `no_sync`.

    Args:
        messages: Makes the message.
        wants_averages: What the user's script wants at the moment.
    """

    def __init__(self, messages: ErrorMessages, wants_averages: Callable[[], bool]) -> None:
        self._messages = messages
        self._wants_averages = wants_averages
        self._in_forward: bool | None = None

    def forward_done(self, *, averaging: bool) -> None:
        """A forward pass decided whether its gradients are averaged."""
        self._in_forward = averaging

    def gradient_arrived(self) -> None:
        """Compare with the first gradient that follows, and warn."""
        if self._in_forward is not None and self._in_forward != self._wants_averages():
            warnings.warn(self._messages.changed_mind(averaged=self._in_forward), stacklevel=2)
        self._in_forward = None
