"""Autotuning with the simulator: a recording of the first iterations, `tune`, and the module's own settings.

`reference.autotuning` records and rebuilds; this module supplies its tuner.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from reference.autotuning import Autotune, TunedBuckets
from reference.comm_hooks.allreduce import allreduce
from reference.comm_hooks.interface import Hook, describe
from reference.data_parallel import DistributedDataParallel
from reference.mixed_precision import sum_in_low_precision
from reference.trace import Trace
from simulator import Fabric, Policy, predict, tune

from .calibration.comm_hook_costs import HALVES, REAL_HOOKS

HOOK_NAMES: Mapping[Callable[..., Any], str] = {
    **{hook: name for name, (hook, _) in REAL_HOOKS.items()},
    allreduce: "none",
    default_hooks.allreduce_hook: "none",
    default_hooks.fp16_compress_hook: "fp16",
    default_hooks.bf16_compress_hook: "bf16",
    powerSGD_hook.powerSGD_hook: "power_sgd",
    powerSGD_hook.batched_powerSGD_hook: "batched_power_sgd",
}
"""Names of comm hooks, ours and torch's; see `simulator.schedule.comm_hook_messages.named_hook`."""


def autotune(fabric: Fabric, *, iterations: int = 10, **settings: Any) -> Autotune:
    """Return the argument `autotune` of `DistributedDataParallel`: buckets that `simulator.tune` finds.

    The buckets in force stay unless others are predicted to be faster. A gain within the errors of the costs counts
    too, because another rebuild costs little and the gain is what is to be expected.

    Args:
        fabric: Costs of collectives and of the processor, for the number of ranks that train.
        iterations: Synchronised iterations to record.
        settings: Fields of `Policy`, which replace those read from the module. Needed are the `hook` if the module
            has a comm hook that is not among `HOOK_NAMES`, and `sparse_density` if gradients are sparse.

    Raises:
        ValueError: There are no iterations to record, or a setting is invalid.
        TypeError: A setting is not a field of `Policy`.
    """
    Policy.given(None, settings)
    return Autotune(_SimulatedTuner(fabric, settings), iterations)


@dataclass(frozen=True)
class _SimulatedTuner:
    fabric: Fabric
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, trace: Trace, ddp: DistributedDataParallel) -> TunedBuckets | None:
        world_size = trace.workload.world_size
        policy = policy_of(ddp, trace, **self.settings)
        plan = tune(trace, self.fabric, world_size=world_size, policy=policy)
        in_force = policy.model_copy(update={"plan": ddp.reducer.buckets.assignment})
        default_ns = predict(trace, self.fabric, world_size=world_size, policy=in_force).iteration_ns
        if plan.iteration_ns >= default_ns:
            return None
        return TunedBuckets(plan.buckets, plan.iteration_ns, default_ns)


def policy_of(ddp: DistributedDataParallel, trace: Trace, **settings: Any) -> Policy:
    """Return all but the buckets: the settings of a module, and of the script while `trace` was recorded.

    `settings` are fields of `Policy` that replace those of the module.

    Raises:
        ValueError: The module has a comm hook without a name, and `settings` has no hook.
    """
    recorded = trace.ranks[0].iterations
    synchronized = sum(iteration.synchronized for iteration in recorded)
    found = {
        "broadcast_buffers": ddp.forward_sync_buffers,
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "skip_all_reduce_unused_params": ddp.skip_all_reduce_unused_params,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "sync_every": round(len(recorded) / synchronized) if synchronized else 1,
    }
    if "hook" not in settings and (caller := ddp.reducer._hook) is not None:
        found["hook"] = hook_name(caller.hook, caller.state)
    return Policy(**(found | settings))


def hook_name(hook: Hook, state: Any) -> str:
    """Return the name of a comm hook with this state, as `named_hook` takes it.

    Raises:
        ValueError: The simulator has no such hook.
    """
    if hook is sum_in_low_precision:
        names = {dtype: name for name, dtype in HALVES.items()}
        if (name := names.get(state.dtype)) is None:
            raise ValueError(f"hook: expected mixed precision with all-reduces in half precision, got {state.dtype}")
        return name
    name = HOOK_NAMES.get(hook, "")
    if not name:
        raise ValueError(
            f"hook: expected a comm hook that the simulator has, got {describe(hook)}; pass the name of one that "
            "sends as much, as in ddplab.autotune(fabric, hook='fp16')"
        )
    return f"{name}:{state.matrix_approximation_rank}" if name.endswith("power_sgd") else name
