"""The text of every error and warning about a reduction.

Each message contains rank, parameter, bucket and what to do. Phrases that torch's tools and tests search are kept.
"""

import warnings
from collections.abc import Collection, Sequence
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ..buckets import Bucket
from ..constructor_arguments import Options
from ..parameters import dense_strides

NAMED_AT_MOST = 5  # unless TORCH_DISTRIBUTED_DEBUG asks for more


class Text(StrEnum):
    """Messages after the rank; `{parameter}` stands for a parameter's name, index and shape."""

    COMPILED_AUTOGRAD = (
        "compiled autograd cannot run a data-parallel backward pass: it would leave gradients without averages. Set "
        "torch._dynamo.config.compiled_autograd = False"
    )
    DISTRIBUTED_AUTOGRAD = (
        "expected gradients in .grad, got a context of torch.distributed.autograd, which keeps them to itself, where "
        "they are not averaged. Call loss.backward() outside, or use torch's class"
    )
    FORWARD_INSIDE_BACKWARD = (
        "the wrapped module's forward pass runs inside a backward pass that has brought gradients of an earlier "
        "forward pass, as with checkpoint(ddp, x, use_reentrant=True) beside another forward pass. Checkpoint parts "
        "of the module instead of the wrapper, or use use_reentrant=False"
    )
    PASS_STILL_RUNS = (
        "a backward pass of the wrapped module still runs, in another thread or around this one, and its gradients "
        "are not averaged yet. Wait for its end before the next forward pass"
    )
    RETRIED = "now another backward pass runs without a forward pass before it, so its gradients cannot be averaged."
    NOT_FINALIZED = (
        "require_manual_backward_finalization is set, and the averages of the last backward pass were not asked for. "
        "Call finalize_backward() once after each synchronised backward pass"
    )
    CHANGED = (
        "the gradient of {parameter} in bucket {bucket} was changed or replaced during the backward pass, after it "
        "had arrived and before it was averaged. Change gradients after backward(), or in a hook of the parameter "
        "itself"
    )
    REMOVED = (
        "the gradient of {parameter} in bucket {bucket} arrived and was then set to None before it was averaged, as "
        "by a post-accumulate hook that steps an optimiser or moves the gradient elsewhere. Step after backward(), "
        "or have torch.distributed.optim._apply_optimizer_in_backward make the optimisers before the module is "
        "wrapped: they then step with averages"
    )
    REPLACED = (
        "the gradient of {parameter} is not the expected DDP bucket view with gradient_as_bucket_view=True, in "
        "bucket {bucket}. Another data-parallel module has this parameter too, or the script replaced the gradient "
        "during the backward pass. Wrap a parameter once, and change gradients after backward()"
    )
    GRAPH_CHANGED = (
        "Your training graph has changed in this iteration: {parameter} in bucket {bucket} got more gradients than "
        "in the first iteration, e.g., one parameter is unused in first iteration, but then got used in the second "
        "iteration. this is not compatible with static_graph set to True."
    )
    INTERRUPTED = (
        "an exception ended the last backward pass ({cause}) after {launched} of {buckets} buckets had been "
        "launched. Other ranks may be waiting for the rest, so no further iteration would match theirs. Remove the "
        "cause, then wrap the module again on every rank, or restart all ranks."
    )
    CONVERTED = "{parameter} in bucket {bucket} {how}. Convert the module before it is wrapped, not after."
    # Warnings, each given once
    STEPPED_TOO_EARLY = (
        "an optimiser stepped {when} and used the gradient of {parameter}, which the wrapper has not averaged, so "
        "the ranks diverge, unless the script has all-reduced it. Step after the last backward pass of each forward "
        "pass, which must bring the gradients by backward(); or have "
        "torch.distributed.optim._apply_optimizer_in_backward make the optimisers before the module is wrapped"
    )
    CHANGED_BETWEEN = (
        "the gradient of {parameter} was changed between two backward passes of one forward pass. It is averaged at "
        "the end of the last one, so clipping or scaling it before is lost, or gives a wrong average. Clip after the "
        "last backward pass, or run one forward pass for each"
    )
    CREATE_GRAPH = (
        "backward was called with create_graph=True. The gradient of {parameter} is averaged in place, outside of "
        "the graph: derivatives of it are those of this rank's gradient."
    )
    STRIDES = (
        "the gradient of {parameter} has strides {strides}, its parameter {expected}. Grad strides do not match "
        "bucket view strides: copying it is slow. Wrap the module after converting it to its memory format."
    )
    NOT_EXPECTED = (
        "outside of no_sync(), gradients arrived that no forward pass of the wrapper waits for, first that of "
        "{parameter}. They stay local unless a later pass averages them, so the ranks may diverge. Causes: a second "
        "backward pass after one forward pass, or several forward passes, then a backward pass for each (run all but "
        "the last under no_sync(), with its forward pass; if the last belongs to an earlier forward pass, run every "
        "forward pass under no_sync(), and ddp.reducer.prepare_for_backward(outputs) before the last backward pass); "
        "a backward pass inside forward; a forward pass under no_grad(); ddp.module(...) in place of ddp(...)."
    )


class ErrorMessages:
    """Completes the texts; `parameters` are in the order of the parameter index, and `rank` may be set again."""

    def __init__(self, parameters: dict[str, nn.Parameter], rank: int) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._shapes = [tuple(parameter.shape) for parameter in self._parameters]
        self.rank = rank
        self._warned: set[Text] = set()

    def describe(self, index: int) -> str:
        """A parameter's name, index and shape, and whether it was frozen after wrapping: it got no gradient since."""
        frozen = "" if self._parameters[index].requires_grad else ", frozen since the module was wrapped"
        return f"{self._names[index]} (parameter {index}, shape {self._shapes[index]}{frozen})"

    def message(self, text: Text, index: int | None = None, bucket: int | None = None, **values: object) -> str:
        """A text with this rank, a parameter, its bucket and further values."""
        parameter = None if index is None else self.describe(index)
        return f"rank {self.rank}: {text.format(parameter=parameter, bucket=bucket, **values)}"

    def warn_once(self, text: Text, index: int | None = None, **values: object) -> None:
        """Warn, unless a warning with this text was given."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(self.message(text, index, None, **values), stacklevel=2)

    def unfinished(
        self, missing: Sequence[int], reachable: Collection[int] | None, buckets: Sequence[int], options: Options
    ) -> str:
        """Error: the last backward pass left out the gradients `missing`, so `buckets` were never launched.

        `reachable` has the parameters behind forward's outputs; None: not known.
        """
        if options.static_graph:
            cause = (
                "This error indicates that your training graph has changed in this iteration, e.g., one parameter "
                "is used in first iteration, but then got unused in the second iteration. this is not compatible "
                "with static_graph set to True."
            )
        elif options.find_unused_parameters:
            cause = (
                "find_unused_parameters=True is on, so outputs that were found in forward's return value depend on "
                "these parameters, but the loss uses none of these outputs. Compute the loss from forward's outputs, "
                "and return them in lists, tuples, dicts or dataclasses."
            )
        else:
            cause = (
                "Parameters were not used in producing the loss. Detect them by passing the keyword argument "
                "`find_unused_parameters=True` to the constructor, and by making sure that all `forward` function "
                "outputs participate in calculating loss."
            )
        every = ", ".join(self._names[index] for index in missing)
        names, hint = f"\nParameters which did not receive grad for rank {self.rank}: {every}", ""
        if debug_off := get_debug_level() == DebugLevel.OFF:
            names = ""
            hint = (
                "\nTo list all of them by cause, in every iteration, set the environment variable "
                "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
            )
        return (
            f"rank {self.rank}: Expected to have finished reduction in the prior iteration before starting a new "
            f"one. {cause}\n"
            f"Parameter indices which did not receive grad for rank {self.rank}: {' '.join(map(str, missing))}{names}"
            f"{self._cases(missing, reachable, limited=debug_off)}\n"
            f"Buckets that were not launched: {', '.join(map(str, buckets))}; no gradient in them was averaged.{hint}"
        )

    def _cases(self, missing: Sequence[int], reachable: Collection[int] | None, *, limited: bool) -> str:
        if reachable is None:
            return f"\nWithout a gradient: {self._list(missing, limited=limited)}"
        cases = {
            "Not used in forward": [index for index in missing if index not in reachable],
            "Used in forward, but their output is not used in the loss": [i for i in missing if i in reachable],
        }
        return "".join(f"\n{case}: {self._list(found, limited=limited)}" for case, found in cases.items() if found)

    def _list(self, indices: Sequence[int], *, limited: bool) -> str:
        shown = indices[:NAMED_AT_MOST] if limited else indices
        more = len(indices) - len(shown)
        return ", ".join(map(self.describe, shown)) + (f" and {more} more" if more else "")

    def ready_twice(self, index: int, bucket: int, *, unused: bool) -> str:
        """Error: a parameter got a second gradient."""
        cause = (
            "either one backward pass too many per forward pass (accumulate under no_sync()), or several re-entrant "
            "backward passes that share it, as with use_reentrant=True checkpoints (try static_graph=True), or a use "
            "outside the `forward` function"
        )
        if unused:
            cause = (
                "that no output found in forward's return value depends on it, so it was counted as unused. "
                "Either it is used in a checkpoint with use_reentrant=True, which hides it from the search: use "
                "use_reentrant=False, or static_graph=True. Or it is used outside the `forward` function: move that "
                "use into forward, or train it outside of this module. Or forward returned its output in an object "
                "of another type: use lists, tuples, dicts or dataclasses"
            )
        return (
            f"rank {self.rank}: Expected to mark a variable ready only once. {self.describe(index)} in bucket "
            f"{bucket} got a second gradient since the last forward pass; the cause is {cause}."
        )

    def misfit(self, bucket: Bucket, number: int, slot: int) -> str | None:
        """Warn of a slow copy or of create_graph; an error message if the gradient cannot be copied."""
        index, gradient, view = bucket.indices[slot], bucket.parameters[slot].grad, bucket.views[slot]
        assert gradient is not None
        if gradient.dtype != view.dtype or gradient.device != view.device or gradient.layout != view.layout:
            return (
                f"rank {self.rank}: expected the gradient of {self.describe(index)} in bucket {number} to be "
                f"{_kind(view)}, got {_kind(gradient)}. Convert the module before it is wrapped, not after."
            )
        if gradient.requires_grad:
            self.warn_once(Text.CREATE_GRAPH, index)
        if not view.is_sparse and dense_strides(gradient) != dense_strides(view):
            self.warn_once(Text.STRIDES, index, strides=gradient.stride(), expected=view.stride())
        return None

    def converted(self, index: int, bucket: int, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> str:
        """Error: a parameter was converted after wrapping, so autograd does not call its hook any more."""
        what = f"was wrapped as a {dtype} tensor on {device}, now it is {_kind(parameter)}"
        if (parameter.dtype, parameter.device) == (dtype, device):
            what = "was converted and converted back, or swapped with another tensor, since the module was wrapped"
        return self.message(Text.CONVERTED, index, bucket, how=what)

    def changed_mind(self, *, averaged: bool) -> str:
        """Warning: of forward and backward, one ran inside `no_sync` and the other outside."""
        inside, outside = ("backward", "forward") if averaged else ("forward", "backward")
        return (
            f"rank {self.rank}: {outside} ran outside of no_sync(), but its {inside} inside. forward decides, so "
            f"these gradients are {'averaged' if averaged else 'not averaged'}. Run both inside, or both outside."
        )


def _kind(tensor: Tensor) -> str:
    return f"a {'sparse ' if tensor.is_sparse else ''}{tensor.dtype} tensor on {tensor.device}"
