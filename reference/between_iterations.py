"""Changes of a reducer between two iterations: a comm hook, how unused parameters are found, other ranks."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from .backward_pass import Expecting, Idle, Running
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
    """Change how unused parameters are found.

    Raises:
        RuntimeError: `static_graph` is set after the first iteration.
    """
    options = replace(reducer.options, **changed)  # type: ignore[arg-type]  # all are flags
    if options.static_graph and not reducer.options.static_graph and reducer.iterations > 0:
        reducer.fail("static_graph should be called before training loop starts, on the wrapped module")
    reducer.options = options
    reducer.tracker = reducer.make_tracker(options, reducer.parameters, reducer.accumulators, reducer.group)


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
