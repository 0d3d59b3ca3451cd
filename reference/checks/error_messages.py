"""The text of every error and warning about a reduction.

Each message contains the rank, the parameter, the bucket and what to do. Phrases that torch's tools and tests search
for are kept.
"""

import warnings
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ..buckets import Bucket
from ..constructor_arguments import Options
from ..parameters import dense_strides

NAMED_AT_MOST = 5  # unless TORCH_DISTRIBUTED_DEBUG asks for more


class ErrorMessages:
    """The texts; `parameters` are in the order of the parameter index, and the attribute `rank` may be set again.

    Warnings about gradients that do not fit their buckets are given once.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], rank: int) -> None:
        self._names = list(parameters)
        self._shapes = [tuple(parameter.shape) for parameter in parameters.values()]
        self.rank = rank
        self._warned: set[str] = set()

    def describe(self, index: int) -> str:
        """A parameter's name, index and shape."""
        return f"{self._names[index]} (parameter {index}, shape {self._shapes[index]})"

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
        names, hint = "", ""
        debug_off = get_debug_level() == DebugLevel.OFF
        if debug_off:
            hint = (
                "\nTo list all of them by cause, in every iteration, set the environment variable "
                "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
            )
        else:
            names = ", ".join(self._names[index] for index in missing)
            names = f"\nParameters which did not receive grad for rank {self.rank}: {names}"
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
        if unused:
            cause = (
                "that no output found in forward's return value depends on it, so it was counted as unused. "
                "Either it is used in a checkpoint with use_reentrant=True, which hides it from the search: use "
                "use_reentrant=False, or static_graph=True. Or it is used outside the `forward` function: move that "
                "use into forward, or train it outside of this module. Or forward returned its output in an object "
                "of another type: use lists, tuples, dicts or dataclasses"
            )
        else:
            cause = (
                "either one backward pass too many per forward pass (accumulate under no_sync()), or several "
                "re-entrant backward passes that share it, as with use_reentrant=True checkpoints (try "
                "static_graph=True), or a use outside the `forward` function"
            )
        return (
            f"rank {self.rank}: Expected to mark a variable ready only once. {self.describe(index)} in bucket "
            f"{bucket} got a second gradient since the last forward pass; the cause is {cause}."
        )

    def compiled_autograd(self) -> str:
        """Error: the backward pass is compiled."""
        return (
            f"rank {self.rank}: compiled autograd cannot run a data-parallel backward pass: it would leave gradients "
            "without averages. Set torch._dynamo.config.compiled_autograd = False"
        )

    def distributed_autograd(self) -> str:
        """Error: the gradients go to a context of `torch.distributed.autograd`."""
        return (
            f"rank {self.rank}: expected gradients in .grad, got a context of torch.distributed.autograd, which "
            "keeps them to itself, where they are not averaged. Call loss.backward() outside, or use torch's class"
        )

    def forward_inside_backward(self) -> str:
        """Error: a synchronised forward pass runs while gradients of an earlier one are averaged."""
        return (
            f"rank {self.rank}: the wrapped module's forward pass runs inside a backward pass that has brought "
            "gradients of an earlier forward pass, as with checkpoint(ddp, x, use_reentrant=True) beside another "
            "forward pass. Checkpoint parts of the module instead of the wrapper, or use use_reentrant=False"
        )

    def changed(self, index: int, bucket: int) -> str:
        """Error: the script changed a gradient between its arrival and its averaging."""
        return (
            f"rank {self.rank}: the gradient of {self.describe(index)} in bucket {bucket} was changed or replaced "
            "during the backward pass, after it had arrived and before it was averaged. Change gradients after "
            "backward(), or in a hook of the parameter itself"
        )

    def removed(self, index: int, bucket: int) -> str:
        """Error: a gradient arrived, and the script has set it to None before it was averaged."""
        return (
            f"rank {self.rank}: the gradient of {self.describe(index)} in bucket {bucket} arrived and was then set "
            "to None before it was averaged, as by a post-accumulate hook that steps an optimiser or moves the "
            "gradient elsewhere. Step after backward(), or have "
            "torch.distributed.optim._apply_optimizer_in_backward make the optimisers before the module is wrapped: "
            "they then step with averages"
        )

    def stepped_too_early(self, index: int, when: str) -> str:
        """Warning, given once: an optimiser used gradients that were not averaged; `when` it did."""
        return (
            f"rank {self.rank}: an optimiser stepped {when} and used the gradient of {self.describe(index)}, which "
            "the wrapper has not averaged, so the ranks diverge, unless the script has all-reduced it. Step after "
            "the last backward pass of each forward pass, which must bring the gradients by backward(); or have "
            "torch.distributed.optim._apply_optimizer_in_backward make the optimisers before the module is wrapped"
        )

    def changed_between(self, index: int) -> str:
        """Warning, given once: the script changed a gradient between two backward passes of one forward pass."""
        return (
            f"rank {self.rank}: the gradient of {self.describe(index)} was changed between two backward passes of "
            "one forward pass. It is averaged at the end of the last one, so clipping or scaling it before is lost, "
            "or gives a wrong average. Clip after the last backward pass, or run one forward pass for each"
        )

    def not_finalized(self) -> str:
        """Error: the script has not ended the last backward pass, as it said it would."""
        return (
            f"rank {self.rank}: require_manual_backward_finalization is set, and the averages of the last backward "
            "pass were not asked for. Call finalize_backward() once after each synchronised backward pass"
        )

    def pass_still_runs(self) -> str:
        """Error: a forward pass starts while another thread runs a backward pass that averages."""
        return (
            f"rank {self.rank}: a backward pass of the wrapped module still runs, in another thread or around this "
            "one, and its gradients are not averaged yet. Wait for its end before the next forward pass"
        )

    def replaced(self, index: int, bucket: int) -> str:
        """Error: a gradient is not the bucket's view any more."""
        return (
            f"rank {self.rank}: the gradient of {self.describe(index)} is not the expected DDP bucket view with "
            f"gradient_as_bucket_view=True, in bucket {bucket}. Another data-parallel module has this parameter too, "
            "or the script replaced the gradient during the backward pass. Wrap a parameter once, and change "
            "gradients after backward()"
        )

    def interrupted(self, launched: int, buckets: int, error: BaseException | None) -> str:
        """Error: an exception ended the last backward pass after `launched` of its buckets had been launched.

        `error` is the exception; None: it was raised outside of the reducer.
        """
        cause = (
            f"{type(error).__name__}: {error}"
            if error is not None
            else "raised outside of the reducer, for example by a hook of the model or for lack of memory"
        )
        return (
            f"rank {self.rank}: an exception ended the last backward pass ({cause}) after {launched} of {buckets} "
            "buckets had been launched. Other ranks may be waiting for the rest, so no further iteration would match "
            "theirs. Remove the cause, then wrap the module again on every rank, or restart all ranks."
        )

    def graph_changed(self, index: int, bucket: int) -> str:
        """Error: under `static_graph`, a parameter got more gradients than in the first iteration."""
        return (
            f"rank {self.rank}: Your training graph has changed in this iteration: {self.describe(index)} in bucket "
            f"{bucket} got more gradients than in the first iteration, e.g., one parameter is unused in first "
            "iteration, but then got used in the second iteration. this is not compatible with static_graph set to "
            "True."
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
            self.warn_once(
                "create_graph",
                f"rank {self.rank}: backward was called with create_graph=True. The gradient of "
                f"{self.describe(index)} is averaged in place, outside of the graph: derivatives of it are those of "
                "this rank's gradient.",
            )
        if not view.is_sparse and dense_strides(gradient) != dense_strides(view):
            self.warn_once(
                "strides",
                f"rank {self.rank}: the gradient of {self.describe(index)} has strides {gradient.stride()}, its "
                f"parameter {view.stride()}. Grad strides do not match bucket view strides: copying it is slow. "
                "Wrap the module after converting it to its memory format.",
            )
        return None

    def warn_once(self, kind: str, message: str) -> None:
        """Warn, unless a warning of this kind was given."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=2)

    def converted(self, index: int, bucket: int, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> str:
        """Error: a parameter was converted after wrapping, so autograd does not call its hook any more."""
        what = f"was wrapped as a {dtype} tensor on {device}, now it is {_kind(parameter)}"
        if (parameter.dtype, parameter.device) == (dtype, device):
            what = "was converted and converted back, or swapped with another tensor, since the module was wrapped"
        return (
            f"rank {self.rank}: {self.describe(index)} in bucket {bucket} {what}. Convert the module before it is "
            "wrapped, not after."
        )

    def retried(self, failure: str) -> str:
        """Error: another backward pass runs after a failed one, without a forward pass; `failure`: its error."""
        return (
            f"{failure}\nrank {self.rank}: now another backward pass runs without a forward pass before it, so its "
            "gradients cannot be averaged."
        )

    def changed_mind(self, *, averaged: bool) -> str:
        """Warning: of forward and backward, one ran inside `no_sync` and the other outside."""
        inside, outside = ("backward", "forward") if averaged else ("forward", "backward")
        return (
            f"rank {self.rank}: {outside} ran outside of no_sync(), but its {inside} inside. forward decides, so "
            f"these gradients are {'averaged' if averaged else 'not averaged'}. Run both inside, or both outside."
        )

    def not_expected(self) -> str:
        """Warning, given once: gradients that no forward pass of the wrapper waits for."""
        return (
            f"rank {self.rank}: outside of no_sync(), gradients arrived that no forward pass of the wrapper waits "
            "for. They stay local, so the ranks may diverge. Causes: a second backward pass after one forward pass, "
            "or several forward passes and then a backward pass for each (run all but the last backward pass under "
            "no_sync(), with its forward pass; if the last one belongs to an earlier forward pass, run every forward "
            "pass under no_sync(), and ddp.reducer.prepare_for_backward(outputs) before the last backward pass); a "
            "backward pass inside forward; a call of ddp.module(...) instead of ddp(...)."
        )


def _kind(tensor: Tensor) -> str:
    layout = "sparse " if tensor.is_sparse else ""
    return f"a {layout}{tensor.dtype} tensor on {tensor.device}"
