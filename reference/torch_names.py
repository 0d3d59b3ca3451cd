"""Names by which tools and scripts reach into torch's class, and what they are called here.

Most begin with an underscore in torch, or are kept there for compatibility; ddplab itself uses none of them.
`Any` stands for the classes that these are mixed into, which are defined further up.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, Logger, Reducer
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from .bucketing import MIB, bucket_caps
from .buffers import PIECE_BYTES, BufferHook, broadcast_coalesced
from .hooks.allreduce import allreduce
from .hooks.compress import fp16_compress
from .parameters import sparse_parameters, trainable_parameters


class ReducerNames:
    """What is asked of `ddp.reducer`."""

    def _get_local_used_map(self: Any) -> Tensor:
        return self.usage.used.tensor  # type: ignore[no-any-return]

    def _ddp_graph_static(self: Any) -> bool:
        return self.usage.is_static  # type: ignore[no-any-return]

    def _run_allreduce_hook(self: Any, bucket: Any) -> "torch.futures.Future[Any]":
        work: Any = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        return work.get_future()  # type: ignore[no-any-return]

    def _set_optimizer_in_backward(self: Any) -> None:
        self.optimizers_in_backward = True


def _feature(name: str) -> Any:
    """A read-only attribute: what the constructor, or `_set_static_graph`, was told."""
    return property(lambda ddp: getattr(ddp.features, name))


class DataParallelNames:
    """What is asked of the module itself."""

    buffer_hook: BufferHook | None

    @property
    def broadcast_buffers(self: Any) -> bool:
        """Deprecated name of `forward_sync_buffers`."""
        return self.forward_sync_buffers  # type: ignore[no-any-return]

    find_unused_parameters = _feature("find_unused_parameters")
    gradient_as_bucket_view = _feature("gradient_as_bucket_view")
    batched_grad_copy = _feature("batched_grad_copy")
    skip_all_reduce_unused_params = _feature("skip_all_reduce_unused_params")
    static_graph = _feature("static_graph")

    @property
    def bucket_bytes_cap(self: Any) -> int:
        """Size in bytes at which a bucket closes; the largest of a list."""
        return max(bucket_caps(self.bucket_cap_mb, self.bucket_cap_mb_list))

    @property
    def bucket_bytes_cap_list(self: Any) -> list[int]:
        """The caps that were listed one by one, in bytes."""
        return [int(cap * MIB) for cap in self.bucket_cap_mb_list or []]

    @property
    def _has_rebuilt_buckets(self: Any) -> bool:
        return self.reducer.layout.rebuilt  # type: ignore[no-any-return]

    @property
    def broadcast_bucket_size(self) -> int:
        """Bytes of a piece in which parameters and buffers are broadcast."""
        return PIECE_BYTES

    def _remove_autograd_hooks(self: Any) -> None:
        self.reducer.detach()

    def _check_reducer_finalized(self: Any) -> None:
        self.reducer.check_finished()

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Tell torch.compile that it compiles inside of a DDP: it then splits its graph where buckets end."""
        before = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self  # type: ignore[assignment]  # asked for its bucket size only
        try:
            yield
        finally:
            TorchDDP._active_ddp_module = before

    # Logging

    @property
    def logger(self: Any) -> Any:
        """A logger of torch's own, for its functions that report an error to one."""
        if "torch_logger" not in self.__dict__:
            dummy = nn.Parameter(torch.empty(1))  # torch's logger needs torch's reducer, and that a parameter
            self.__dict__["torch_reducer"] = Reducer([dummy], [[0]], [1], self.process_group)
            self.__dict__["torch_logger"] = Logger(self.__dict__["torch_reducer"])
        return self.__dict__["torch_logger"]

    def _get_ddp_logging_data(self: Any) -> dict[str, str | int]:
        data: dict[str, str | int] = self.log.data(self)
        if "torch_logger" in self.__dict__:
            torchs = self.__dict__["torch_logger"]._get_ddp_logging_data()
            if torchs.ints_map.get("has_error"):
                data |= {"has_error": 1, "error": torchs.strs_map["error"]}
        return data

    def _set_ddp_runtime_logging_sample_rate(self: Any, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self.log.sample_rate = sample_rate

    # Features that torch switches on after construction

    def _set_static_graph(self: Any) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self.reducer.set_static_graph()
        self.features = self.reducer.features

    def _set_ddp_sink_clone(self: Any, val: bool) -> None:  # noqa: FBT001 - torch's signature
        self.sink_clones = val

    def _register_builtin_comm_hook(self: Any, comm_hook_type: BuiltinCommHookType) -> None:
        hooks: dict[BuiltinCommHookType, Callable[..., Any]] = {
            BuiltinCommHookType.ALLREDUCE: allreduce,
            BuiltinCommHookType.FP16_COMPRESS: fp16_compress,
        }
        self.reducer.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self.log.comm_hook = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self: Any,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            raise TypeError(f"buffer hook: expected hook(state, buffers_by_name), got {hook!r}")
        after_forward = comm_hook_location == _BufferCommHookLocation.POST_FORWARD
        self.buffer_hook = BufferHook(hook, state, after_forward=after_forward)

    def _default_broadcast_coalesced(
        self: Any, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        broadcast_coalesced(
            list(self.module.buffers()) if bufs is None else bufs,
            self.process_group,
            source=authoritative_rank,
            piece_bytes=bucket_size or PIECE_BYTES,
        )

    def _register_fused_optim(
        self: Any, optim: type, *args: Any, optim_params: list[Tensor] | None = None, **kwargs: Any
    ) -> None:
        from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap  # imports all optimisers

        optimizer_overlap._as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)

    def _setup_in_backward_optimizers(self: Any) -> None:
        """Have optimisers that run in the backward pass run after the averaging, not after the accumulation."""
        parameters = [p for p in trainable_parameters(self.module).values() if hasattr(p, "_in_backward_optimizers")]
        if not parameters:
            return
        # Imported here, where the user's script has done so already: it takes a second, and warns.
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map,
        )

        for parameter in parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()
        hook = optimizer_overlap_hooks._apply_optim_in_backward_hook(
            gradient_is_bucket_view=self.gradient_as_bucket_view
        )
        self.register_comm_hook(weakref.ref(self), hook)
        self.reducer._set_optimizer_in_backward()

    # Parameters

    @property
    def parameters_to_ignore(self: Any) -> set[str]:
        """Names that the module asks to be left alone."""
        return set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: list[str] | set[str]
    ) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:  # noqa: FBT001, FBT002
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _build_params_for_reducer(self: Any) -> tuple[list[nn.Parameter], list[bool]]:
        trainable = trainable_parameters(self.module)
        sparse = sparse_parameters(self.module)
        return list(trainable.values()), [name in sparse for name in trainable]

    def _build_debug_param_to_name_mapping(self: Any, parameters: list[nn.Parameter]) -> dict[int, str]:
        names = {parameter: name for name, parameter in trainable_parameters(self.module).items()}
        for parameter, name in names.items():
            if not any(parameter is given for given in parameters):
                raise ValueError(f"Param with name {name} found in module parameters, but not DDP parameters.")
        if len(parameters) != len(names):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
                f"{len(parameters)} vs {len(names)}"
            )
        return {index: names[parameter] for index, parameter in enumerate(parameters)}
