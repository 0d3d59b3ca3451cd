"""Rank bodies of test_clients.py: what trainers and libraries do to a wrapper, under our class and torch's."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.utils import parametrizations

from ddplab.reference.data_parallel import DistributedDataParallel

from ..scenarios import CLASSES, Wrap, batch, gradients, linears, on_both_classes, trained
from .drop_in_bodies import Tower

# Process groups made by hand


class Delegates(dist.ProcessGroup):
    """A group written in Python that must be given options, whose backend has no options."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return "delegates"

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:
        return self.inner.allreduce(tensors, options)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:
        return self.inner.broadcast(tensors, options)

    def allgather(self, outputs: list, inputs: list[Tensor], options: Any) -> dist.Work:
        return self.inner.allgather(outputs, inputs, options)

    def _get_backend(self, _device: torch.device) -> "Delegates":
        return self


made = 0


def by_hand(rank: int, world_size: int) -> dist.ProcessGroup:
    """A group of all ranks on Gloo that torch has no record of."""
    global made
    made += 1
    store = dist.PrefixStore(f"by hand {made}", _get_default_store())
    gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=30))
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def groups_by_hand(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients in a group made by hand, without and with a comm hook, and without a default group."""
    seen: dict[str, Any] = {}
    for name, wrap in CLASSES.items():
        group = by_hand(rank, world_size)
        seen[name] = trained(wrap(Tower(3), process_group=group, bucket_cap_mb=1e-4), rank)
        hooked = wrap(Tower(3), process_group=group)
        hooked.register_comm_hook(group, default_hooks.allreduce_hook)
        seen[f"{name}, hook"] = trained(hooked, rank)
        seen[f"{name}, logged"] = hooked._get_ddp_logging_data()["backend_name"]
    python_group = Delegates(by_hand(rank, world_size))
    ddp = DistributedDataParallel(Tower(3), process_group=python_group, bucket_cap_mb=1e-4)
    seen["python"] = trained(ddp, rank)
    with mock.patch.object(dist, "is_initialized", return_value=False):
        seen["alone"] = trained(DistributedDataParallel(Tower(3), process_group=python_group), rank)
    hooked = DistributedDataParallel(Tower(3), process_group=python_group)
    hooked.register_comm_hook(python_group, default_hooks.allreduce_hook)
    seen["python, hook"] = trained(hooked, rank)
    return seen


@on_both_classes
def last_bucket_small(wrap: Wrap, rank: int, options: dict) -> dict[str, Any]:
    """Sizes and parameters of the rebuilt buckets with DDP_SET_LAST_BUCKET_CAP=1."""
    with mock.patch.dict(os.environ, DDP_SET_LAST_BUCKET_CAP="1"):
        ddp = wrap(Tower(7), **options)
        trained(ddp, rank, steps=4)
        return {key: value for key, value in ddp._get_ddp_logging_data().items() if "rebuilt" in key}


# Names that clients call


@contextmanager
def without_sync(ddp: Any) -> Iterator[None]:
    """As Lightning's forward redirection under manual optimisation."""
    ddp.require_backward_grad_sync = False
    yield
    ddp.require_backward_grad_sync = True


def manual_optimisation(ddp: Any, x: Tensor) -> None:
    """Lightning's: the wrapper's forward pass is local, each backward pass is announced to the reducer."""
    if ddp.static_graph:  # Lightning's backward passes run inside the wrapper's forward pass
        ddp.reducer.prepare_for_forward()
        out = ddp.module(x)
    else:
        with without_sync(ddp):
            out = ddp(x)
    for loss in (out.square().mean(), out.sum())[: 1 if ddp.static_graph else 2]:
        ddp.reducer._rebuild_buckets()
        ddp.reducer.prepare_for_backward([loss] if ddp.find_unused_parameters and not ddp.static_graph else [])
        loss.backward(retain_graph=True)
        if ddp.static_graph and not hasattr(ddp, "flushed"):
            ddp.reducer._delay_all_reduce()
            ddp.flushed = True


def trigger_sync_in_backward(ddp: Any, x: Tensor) -> None:
    """accelerate's: forward passes are local, and the last backward pass averages all the same."""
    with ddp.no_sync():
        losses = [ddp(part).square().mean() for part in x.chunk(3)]
        losses[0].backward()
        losses[1].backward()
    ddp.reducer.prepare_for_backward(losses[2:])
    losses[2].backward()


def micro_batches(ddp: Any, x: Tensor) -> None:
    """Pipeline schedules of torch (GPipe): all forward passes, then all backward passes; the last averages."""
    with ddp.no_sync():
        outs = [ddp(part) for part in x.chunk(3)]
    for number, out in enumerate(outs):
        with nullcontext() if number == 2 else ddp.no_sync():
            if number == 2:
                ddp.reducer.prepare_for_backward([out])
            out.square().mean().backward()


@on_both_classes
def clients_step(wrap: Wrap, rank: int, step: str, options: dict) -> list:
    """Gradients after each of three steps of a client."""
    ddp = wrap(Tower(3), bucket_cap_mb=1e-4, **options)
    seen = []
    for number in range(3):
        ddp.zero_grad()
        globals()[step](ddp, batch(rank, 3, 4, step=number))
        seen.append(gradients(ddp))
    return seen


@on_both_classes
def reducers_names(wrap: Wrap, rank: int) -> list:
    """What the reducer's further names do."""
    ddp = wrap(Tower(3), bucket_cap_mb=1e-4)
    trained(ddp, rank, steps=1)
    done: list[int] = []
    future: torch.futures.Future[int] = torch.futures.Future()
    future.then(lambda _future: done.append(1))
    ddp.reducer._install_post_backward_futures([future])
    rebuilt = [ddp.reducer._rebuild_buckets(), ddp.reducer._rebuild_buckets()]
    future.set_result(0)
    trained(ddp, rank, steps=1)
    presence = dist.all_reduce(torch.ones(1), async_op=True)
    ddp.zero_grad()
    with without_sync(ddp):
        out = ddp(batch(rank, 3, 4))
    ddp.reducer._set_forward_pass_work_handle(presence, False)
    ddp.reducer.prepare_for_backward([])
    out.sum().backward()
    ddp.reducer._push_all_rebuilt_params()
    caps = [ddp.bucket_bytes_cap_default, wrap(Tower(1)).bucket_bytes_cap_default]
    return [rebuilt, done, gradients(ddp), *caps]


# Profiles, modules of TorchScript, parameters and gradients that are left out


@on_both_classes
def profiled_names(wrap: Wrap, rank: int) -> set[str]:
    """Names of the reducer's ranges in a profile of one iteration."""
    ddp = wrap(Tower(3), find_unused_parameters=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trained(ddp, rank, steps=1)
    return {event.key for event in profile.key_averages() if "reducer::" in event.key}


@on_both_classes
def compiled_for_script(wrap: Wrap, rank: int, how: str) -> list:
    """Gradients of a scripted or traced module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        module = linears(4, 4, 4)
        compiled = torch.jit.script(module) if how == "script" else torch.jit.trace(module, torch.ones(3, 4))
        return trained(wrap(compiled), rank)


def parametrized_later(rank: int, _world_size: int) -> str:
    ddp = DistributedDataParallel(linears(4, 4, 4))
    for layer in ddp.module:
        parametrizations.weight_norm(layer)
    try:
        trained(ddp, rank)
    except RuntimeError as error:
        return str(error)
    return "no error"


@on_both_classes
def left_out(wrap: Wrap, rank: int, how: str) -> tuple[list[str], list]:
    """Warnings about gradients that stay local, in two iterations, and the gradients."""
    module = linears(4, 4, 4)
    module[0].requires_grad_(how != "thawed")
    if how == "backward in forward":
        module.register_forward_hook(lambda _module, _inputs, out: out.sum().backward(retain_graph=True))
    if how == "no_grad":
        module.register_forward_hook(lambda module, inputs, _out: torch.enable_grad()(module.forward)(*inputs))
    ddp = wrap(module)
    steps: dict[str, Callable[[Tensor], Any]] = {
        "module": lambda x: ddp.module(x).sum().backward(),
        "two forward passes": lambda x: [out.sum().backward() for out in (ddp(x), ddp(2 * x))],
        "thawed": lambda x: (ddp.module.requires_grad_(True), ddp(x).sum().backward()),
        "backward in forward": lambda x: ddp(x).sum().backward(),
        "no_grad": lambda x: torch.no_grad()(ddp)(x).sum().backward(),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            steps[how](batch(rank, 3, 4, step=step))
    return [str(warning.message) for warning in caught], gradients(ddp)
