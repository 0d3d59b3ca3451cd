"""Data parallelism as a module wrapper, with the options that change how gradients are averaged.

The sections follow an iteration: construction, forward pass, backward pass. The optimiser step needs no code here.
`minimal` has simpler classes of the same kind; `data_parallel` adds the arguments and the names of torch's class.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo as not_compiled  # unlike torch.compiler.disable, loads no compiler yet
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from .autograd_hooks import call_at_backward, tensors_in
from .backward_exceptions import ExceptionSafeReducer
from .broadcast import send_buffers_if_due, send_state
from .bucket_copies import allocator
from .buckets import Buckets
from .checks import construction
from .checks.launch_order import CheckedLaunchOrder, new_series
from .comm_hooks.interface import Hook, check_hook
from .features.backward_sink import through_sink
from .features.join import JoinableModule, ranks_present
from .features.parameter_stand_ins import replaced_parameters, thawed
from .features.unused_parameters import make_tracker
from .features.view_and_sparse_buckets import make_bucket
from .parameters import ModuleTensors
from .reducer_options import WrapperState


class DataParallel(JoinableModule, nn.Module):
    """Wraps a module so that its gradients are averaged over all ranks while the backward pass runs.

    Every rank constructs it at the same time with the same arguments. Ranks start from rank 0's parameters and
    buffers; forward returns what the module returns; after each backward pass every rank holds the same averaged
    gradients. The state dict is the module's, behind the prefix `module.`. Parameters and buffers named in the
    module's `_ddp_params_and_buffers_to_ignore` are not synchronised.

    The arguments are those of `data_parallel.DistributedDataParallel`, but `own` holds all that torch's class has no
    attribute for. `init_sync_buffers` is whether `init_sync` includes the buffers. Without a module, only the base
    classes are initialised, as a subclass does that wraps the parts of its module one by one.

    Attributes:
        require_backward_grad_sync: False inside `no_sync()`.
        require_forward_param_sync: Whether the next forward pass sends buffers: the last one was synchronised.

    Raises:
        RuntimeError: No process group, nothing to train, or parameters that differ between ranks.
        ValueError: A plan that is not a partition of the parameters.
    """

    reducer: ExceptionSafeReducer
    _reducer_class: type[ExceptionSafeReducer] = ExceptionSafeReducer
    _inside_ddp_forward: Any = TorchDDP._inside_ddp_forward

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        own: WrapperState | None = None,
        process_group: dist.ProcessGroup | None = None,
        forward_sync_buffers: bool = True,
        init_sync: bool = True,
        init_sync_buffers: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        JoinableModule.__init__(self)
        if module is None:
            return
        self._own = own or WrapperState()
        self.process_group = construction.resolve_group(process_group)
        self.module = module
        self.forward_sync_buffers = forward_sync_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._ddp_sink_clone = True
        self._make_reducer(exchange=init_sync, with_buffers=init_sync_buffers)
        if init_sync:
            send_state(self.module, self.process_group, with_buffers=init_sync_buffers)

    # Construction

    def _make_reducer(self, *, exchange: bool, with_buffers: bool) -> None:
        """Assign the buckets and make the reducer; with `exchange`, ranks check that they have the same module."""
        make = partial(self._set_up, with_buffers=with_buffers)
        tensors, setup = construction.verify_setup(make, self.process_group, self.module, exchange=exchange)
        own, this = self._own, weakref.ref(self)
        bucketed = own.bucketed(tensors.trainable)
        allocate = allocator(lambda: this().process_group)  # type: ignore[union-attr]  # alive as long as the buckets
        buckets = Buckets(
            list(bucketed.values()),
            setup.buckets,
            rebuild_caps_bytes=setup.rebuild_caps_bytes,
            sparse=setup.sparse,
            features=own.features,
            make_bucket=partial(make_bucket, sparse=setup.sparse, allocate=allocate),
        )
        self.reducer = self._reducer_class(
            bucketed,
            buckets,
            group=self.process_group,
            make_tracker=make_tracker,
            sync_enabled=lambda: (alive := this()) is not None and alive.require_backward_grad_sync,
        )
        if own.debug:
            own.launch_series = own.launch_series or new_series(self.process_group)
            self.reducer.launch_order = CheckedLaunchOrder(self.process_group, own.launch_series)
        own.slots, own.frozen = tensors.slots, tensors.frozen
        own.has_buffers = bool(tensors.buffers)
        own.input_steps = []
        self.device = own.slots[0].parameter.device

    def _set_up(self, *, with_buffers: bool) -> tuple[ModuleTensors, construction.Setup]:
        """The module's tensors, and everything that must be the same on all ranks."""
        return construction.set_up(self.module, self._own, with_buffers=with_buffers)

    # Forward pass

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs and return its output."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            try:
                output = self._run_ddp_forward(*inputs, **kwargs)
            except BaseException:  # Ctrl-C too, after which the hooks of modules do not run
                if self._own.forward_parameters is not None:
                    self._own.forward_parameters.restore()
                raise
            return self._post_forward(output)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():  # torch.compile splits its graph at buckets
            return self.module(*inputs, **kwargs)

    @not_compiled
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = self._own
        with_gradients, joining = torch.is_grad_enabled(), self._join_config.enable
        if with_gradients:
            self._check_parameters()
            self.reducer.prepare_for_forward(synchronized=self.require_backward_grad_sync)
        own.presence = Join.notify_join_context(self)
        # Under Join, a rank without inputs cannot know whether the other ranks have gradients enabled.
        if with_gradients or joining:
            self.reducer.rebuild_if_due()
        if own.has_buffers:
            send_buffers_if_due(self, after_forward=False)
        if joining:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        for step in tuple(own.input_steps):  # the first one removes itself
            inputs, kwargs = step(inputs, kwargs)
        return inputs, kwargs

    def _check_parameters(self) -> None:
        """Raise RuntimeError if a parameter has been replaced by another since the module was wrapped.

        If all are replaced, looking at any of them finds out. If only some are, the others' gradients arrive, so an
        unfinished backward pass is reported, unless parameters may be unused: then all are looked at. Warn once if a
        frozen one has become trainable.
        """
        own = self._own
        slots = own.slots
        turn = self.reducer.iterations % len(slots)
        looked_at = slots if self.reducer.tracker.counts_gradients else slots[turn : turn + 1]
        if not all(slot.now is slot.parameter for slot in looked_at) and (
            message := replaced_parameters(self.module, slots, own.frozen)
        ):
            self.reducer.fail(f"rank {self.process_group.rank()}: {message}")
        if any(slot.parameter.requires_grad for slot in own.frozen):
            warnings.warn(f"rank {self.process_group.rank()}: {thawed(self.module, own.frozen)}", stacklevel=4)
            own.frozen = []

    @not_compiled
    def _post_forward(self, output: Any) -> Any:
        own = self._own
        if own.has_buffers:
            send_buffers_if_due(self, after_forward=True)
        averaging = torch.is_grad_enabled() and self.require_backward_grad_sync
        # As in torch: buffers are sent again only after a forward pass whose gradients are averaged.
        self.require_forward_param_sync = averaging
        if own.delayed is not None and torch.is_grad_enabled():
            own.delayed.forward_done(averaging=averaging)
        if averaging:
            outputs = list(tensors_in(output))
            count_ranks = None  # averages are over all ranks
            if own.presence is not None and not self._divide_by_initial_world_size:
                count_ranks = partial(ranks_present, own.presence)
            self.reducer.prepare_for_backward(outputs, count_ranks)
            if self.reducer.tracker.needs_sink:
                return through_sink(output, self.reducer.backward_starts, clone=self._ddp_sink_clone)
            call_at_backward(outputs, self.reducer.backward_starts)
        elif torch.is_grad_enabled():
            self.reducer.prepare_without_averaging()
        return output

    # Backward pass

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: passes inside the context average nothing.

        The first synchronised backward pass afterwards averages the accumulated gradients.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Replace the all-reduce by `hook(state, bucket)`; call once, between two iterations.

        The hook gets `state` and a `GradBucket`, and returns a future of the flat tensor that becomes the gradients.
        Deep copies and pickles of the module keep the hook, with a copy of its state.

        Raises:
            TypeError: The hook is not callable.
            ValueError: The hook has no parameter `bucket`, or its annotations are not those of a comm hook.
            RuntimeError: A comm hook is registered already, or a backward pass has begun and not ended.
        """
        self._use_comm_hook(state, hook)
        self._own.comm_hook = hook, state

    def _use_comm_hook(self, state: object, hook: Hook) -> None:
        """Register a comm hook that copies and pickles of the module do not keep."""
        check_hook(hook)
        self.reducer.register_comm_hook(state, hook)
