"""Options of a reducer by the names of torch's arguments, and what a wrapper keeps beside torch's attributes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import Work
    from torch.nn.parallel.distributed import _BufferCommHook

    from .features.delayed_all_reduce import DelayedAllReduce
    from .features.parameter_stand_ins import ForwardParameters
    from .parameters import Slot
    from .recording.logging_data import LoggingData


@dataclass(frozen=True, kw_only=True)
class Features:
    """Optional behaviour of a reducer; see the arguments of `DistributedDataParallel`."""

    find_unused_parameters: bool = False
    skip_all_reduce_unused_params: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = False

    @property
    def graph_may_change(self) -> bool:
        """Whether each iteration finds its own unused parameters; then one ready order does not predict the next."""
        return self.find_unused_parameters and not self.static_graph


PLAIN = Features()
"""No optional behaviour."""


@dataclass(kw_only=True)
class WrapperState:
    """All that a wrapper keeps beside the attributes of torch's class, as one attribute: `_own`.

    Scripts subclass the wrapper, and pass attributes that it lacks through to the module. So each further name on the
    wrapper might hide one of theirs. The last fields belong to one process: they are made with the reducer.

    Attributes:
        given_devices: The arguments `device_ids` and `output_device`.
        delay: The arguments `delay_all_reduce_named_params` and `param_to_hook_all_reduce`.
        delayed_parameters: Parameters that leave the buckets, by name.
        comm_hook: Hook and state; without the state if that is the process group, as a group cannot be pickled.
        forward_parameters: Puts other tensors in place of parameters during forward passes. None: forward uses them.
        launch_series: Names the launches in the store of the process group, with `debug`.
        slots: The places of the trainable parameters.
        frozen: Those of the others, until one of them has become trainable.
        input_steps: Functions that change forward's inputs in turn: `step(inputs, kwargs)`.
        presence: Join's count of the ranks that have inputs, in the last forward pass.
        counted: Keeps the count of ranks that average alive until it has been sent.
        torch_logger: A reducer of torch's, and a logger of it.
    """

    features: Features = PLAIN
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: Sequence[float] | None = None
    plan: Sequence[Sequence[int | str]] | None = None
    debug: bool = False
    given_devices: tuple[Any, Any] = (None, None)
    delay: tuple[Any, Any] = (None, None)
    delayed_parameters: "dict[str, nn.Parameter]" = field(default_factory=dict)
    comm_hook: tuple[Any, ...] = ()
    buffer_hook: "_BufferCommHook | None" = None
    forward_parameters: "ForwardParameters | None" = None
    launch_series: str = ""
    has_buffers: bool = False

    slots: "list[Slot]" = field(default_factory=list)
    frozen: "list[Slot]" = field(default_factory=list)
    input_steps: list[Callable[[Any, Any], tuple[Any, Any]]] = field(default_factory=list)
    delayed: "DelayedAllReduce | None" = None
    log: "LoggingData" = None  # type: ignore[assignment]  # made with the reducer
    presence: "Work | None" = None
    counted: "Tensor | None" = None
    torch_logger: tuple[Any, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        fresh = WrapperState()
        return vars(self) | {name: getattr(fresh, name) for name in PROCESS_LOCAL}

    def bucketed(self, trainable: "dict[str, nn.Parameter]") -> "dict[str, nn.Parameter]":
        """Those of the trainable parameters that are in the buckets: all but the delayed ones."""
        return {name: parameter for name, parameter in trainable.items() if name not in self.delayed_parameters}


PROCESS_LOCAL = ("slots", "frozen", "input_steps", "delayed", "log", "presence", "counted", "torch_logger")
"""Fields that are neither pickled nor copied."""
