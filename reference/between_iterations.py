"""Changes of a reducer between two iterations: a comm hook, how unused parameters are found, other ranks, the end."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from .backward_pass import Expecting, Idle, Reduction, Running
from .comm_hooks.interface import Hook, HookCaller, check_hook
from .reducer import Reducer


def register_comm_hook(reducer: Reducer, state: Any, hook: Hook) -> None:
    """Have a hook communicate; see `DistributedDataParallel.register_comm_hook`."""
    now = reducer.state
    try:
        check_hook(hook)
        if isinstance(now, Running) or (isinstance(now, Expecting) and now.reduction.begun):
            raise RuntimeError(
                "register_comm_hook: expected a call between two iterations, got one in a backward pass, or "
                "between two of one forward pass"
            )
        if reducer.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
    except Exception as error:
        reducer.last_error = f"{type(error).__name__}: {error}"
        raise
    reducer.hook = HookCaller(hook, state, reducer.group)


def set_options(reducer: Reducer, **changed: bool) -> None:
    """Change how unused parameters are found; raises RuntimeError for a `static_graph` after the first iteration."""
    options = replace(reducer.options, **changed)  # type: ignore[arg-type]  # all are flags
    if options.static_graph and not reducer.options.static_graph and reducer.iterations > 0:
        reducer.fail("static_graph should be called before training loop starts, on the wrapped module")
    reducer.options = options
    reducer.tracker = reducer.make_tracker(options, reducer.parameters, reducer.accumulators, reducer.group)


def set_finalization(reducer: Reducer, **changed: bool) -> None:
    """Have the script decide when a backward pass waits for its collectives; see `finalize_backward`.

    Raises RuntimeError within a backward pass, and if the all-reduce of all parameters is delayed.
    """
    options = replace(reducer.options, **changed)  # type: ignore[arg-type]  # a flag
    if options.require_manual_backward_finalization and not reducer.buckets:
        reducer.fail("Manual backward finalization is not supported when the all-reduce of all parameters is delayed")
    match reducer.state:
        case Running() | Expecting(Reduction(begun=True)):
            reducer.fail("require_manual_backward_finalization: expected to be set between two iterations")
    reducer.options = options


def finalize_backward(reducer: Reducer) -> None:
    """Wait for all collectives and copy the averages into the gradients, after the backward pass or in a hook of it.

    Raises RuntimeError if nothing waits for this call, or gradients are missing.
    """
    match reducer.state:
        case Expecting(reduction) | Running(reduction=Reduction() as reduction) if (
            reducer.options.require_manual_backward_finalization
            and reduction.begun
            and not reduction.averaged
            and reduction.next_bucket == len(reducer.buckets)
        ):
            reducer.finish(reduction)
            if isinstance(reducer.state, Expecting):
                reducer.state = Idle()
        case _:
            reducer.fail(
                "finalize_backward: expected require_manual_backward_finalization to be set, and one call after the "
                "last gradient of each synchronised backward pass has arrived"
            )


def set_group(reducer: Reducer, group: dist.ProcessGroup) -> None:
    """Average over other ranks from now on, as if the reducer had just been constructed.

    The buckets are those of construction again, because ranks that come from different groups may have rebuilt
    theirs at different times. A backward pass that is under way is forgotten. Its collectives may never end, so
    nothing waits for them; they keep the old buckets' memory.
    """
    reducer.group = group
    if reducer.hook is not None:
        reducer.hook.group = group
    if reducer.delayed is not None:
        reducer.delayed.set_group(group)
    reducer.messages.rank = group.rank()
    reducer.state = Idle()
    reducer.iterations = 0
    reducer.ready_order = []
    reducer.after_backward.clear()
    reducer.inbox.reset()
    reducer.buckets.reset()
    reducer.tracker = reducer.make_tracker(reducer.options, reducer.parameters, reducer.accumulators, group)
    reducer.thorough = True
