"""Rank bodies of test_interface.py: what a comm hook may do, and what is kept of it."""

import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel.distributed import _MixedPrecision

from ddplab.reference.comm_hooks.allreduce import allreduce
from ddplab.reference.comm_hooks.powersgd import PowerSGDState
from ddplab.reference.data_parallel import DistributedDataParallel

from ..hook_bodies import OURS, Given, given_gradients, register
from ..scenarios import Wrap, batch, gradients, on_both_classes, trained
from .drop_in_bodies import copied


def _trainer(seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-3)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def train_and_save(
    rank: int, _world_size: int, folder: str, first: int, last: int, hook: str, options: dict
) -> tuple[list[Tensor], int]:
    """Iterations `first` to `last` under a hook, beginning with what the last call saved; saves at the end."""
    ddp, optimizer = _trainer(seed=3)
    path = Path(folder) / f"rank-{rank}.pt"
    if first == 0:
        state = register(ddp, hook, **options)
    else:
        saved = torch.load(path, weights_only=False)
        ddp.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["hook"]
        ddp.register_comm_hook(state, OURS[hook][0])
    for step in range(first, last):
        optimizer.zero_grad()
        ddp(batch(rank, 5, 12, step=step)).square().mean().backward()
        optimizer.step()
    torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "hook": state}, path)
    return [p.detach().clone() for p in ddp.parameters()], state.iter


def saved_with_a_group(rank: int, world_size: int) -> list[list[str]]:
    """Warnings on loading a state whose group was: none given, all ranks, a part."""
    part = dist.new_group([rank], use_local_synchronization=True)
    states = [
        PowerSGDState(None),
        PowerSGDState(dist.group.WORLD),
        PowerSGDState(part),
    ]
    said = []
    for state in states:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = pickle.loads(pickle.dumps(state))
            assert loaded.process_group is None
            assert {k: v for k, v in vars(loaded).items() if "group" not in k} == {
                k: v for k, v in vars(state).items() if "group" not in k
            }
        said.append([str(warning.message) for warning in caught])
    return said


def copies_under_a_hook(rank: int, _world_size: int, hook: str, how: str) -> tuple[list, list, str]:
    """Averages of a module and of its copy, which train on one after the other, and the copy's logged hook."""
    ddp, _ = _trainer(seed=3)
    if hook == "builtin":
        ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    else:
        register(ddp, hook, dist.group.WORLD if hook == "allreduce" else None)
    trained(ddp, rank, 4, (5, 12))
    twin = copied(ddp, how)
    return trained(twin, rank, 4, (5, 12)), trained(ddp, rank, 4, (5, 12)), twin._get_ddp_logging_data()["comm_hook"]


def freed_after_a_failure(_rank: int, _world_size: int, how: str) -> bool:
    """Whether a reducer is freed after its hook has failed."""

    def hook(_state, bucket):
        future: torch.futures.Future = torch.futures.Future()
        if how == "raises":
            raise ArithmeticError
        if how == "a future with an error":
            future.set_exception(ArithmeticError())
        else:
            future.set_result("nonsense")
        return future

    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_comm_hook(None, hook)
    with suppress(RuntimeError, TypeError):
        ddp(torch.ones(1, 2)).sum().backward()
    reducer = weakref.ref(ddp.reducer)
    del ddp
    gc.collect()
    return reducer() is None


def sliced_results(rank: int, _world_size: int) -> list[list[Tensor]]:
    """Averages by mode; the hook returns a slice, every other number, a view of the buffer, or calls `set_buffer`."""

    def hook(how, bucket):
        buffer = bucket.buffer()
        dist.all_reduce(buffer.div_(2))
        length = len(buffer)
        if how == "slice":
            result = torch.cat([torch.zeros(5), buffer])[5:]
        elif how == "stride":
            result = torch.stack([buffer, torch.zeros(length)], 1)[:, 0]
        elif how.startswith("float16"):
            inside = buffer.view(torch.float16)
            result = inside[:length] if how.endswith("start") else inside[length:]
            result.copy_(buffer.half())
        elif how == "negative":
            result = torch._neg_view(buffer.neg_())
        else:
            bucket.set_buffer(torch.cat([torch.zeros(5), buffer])[5:])
            result = torch.cat([g.flatten() for g in bucket.gradients()])
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(result)
        return future

    seen = []
    for view in (False, True):
        for how in ("slice", "stride", "float16 at the start", "float16 at the end", "negative", "set_buffer"):
            ddp = DistributedDataParallel(Given(((3, 2), (4,))), gradient_as_bucket_view=view)
            ddp.register_comm_hook(how, hook)
            ddp(given_gradients(rank, ((3, 2), (4,)), 0, 0)).backward()
            seen.append([p.grad.clone() for p in ddp.parameters()])
    return seen


def sparse_gradients_seen(_rank: int, _world_size: int) -> list[bool]:
    """Whether both `gradients` and `buffer` of a bucket return the sparse gradient."""
    same = []

    def hook(_state, bucket):
        (gradient,) = bucket.gradients()
        same.append(gradient._nnz() == bucket.buffer()._nnz() > 0)
        return allreduce(None, bucket)

    ddp = DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
    ddp.register_comm_hook(None, hook)
    ddp(torch.tensor([1, 2])).sum().backward()
    return same


@on_both_classes
def builtin_hooks(wrap: Wrap, rank: int) -> list[list[Tensor]]:
    """Averages by hook that torch enumerates."""
    seen = []
    for kind in (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS):
        ddp = wrap(Given(((3, 4), (5,))))
        ddp._register_builtin_comm_hook(kind)
        ddp(given_gradients(rank, ((3, 4), (5,)), 0, 0)).backward()
        seen.append(gradients(ddp))
    return seen


@contextmanager
def _callbacks_pass_through(change: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Iterator[None]:
    """Futures get `change(callback)` in place of every callback that has to wait for their result."""

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda future, callback: original(future, callback if future.done() else change(callback))

    with ExitStack() as stack:
        for method in ("then", "add_done_callback"):
            stack.enter_context(mock.patch.object(torch._C.Future, method, patched(getattr(torch._C.Future, method))))
        yield


def _train(rank: int, hook: str, group: dist.ProcessGroup, last_step: AbstractContextManager[None]) -> None:
    """Train for four iterations with one of our hooks, or with mixed precision, on the ranks of a group."""
    module = Given(((6, 5), (4,), (8, 8)))
    precision = {"mixed_precision": _MixedPrecision(None, torch.bfloat16)} if hook == "mixed precision" else {}
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-5, **precision)
    if not precision:
        register(ddp, hook, group)
    for step in range(4):
        with last_step if step == 3 else nullcontext():
            ddp(given_gradients(rank, ((6, 5), (4,), (8, 8)), 0, step)).backward()


def groups_behind(callback: Callable[..., Any]) -> list[dist.ProcessGroup]:
    """All process groups that a callback keeps alive, through whatever it refers to."""
    found, seen, left = [], set(), [callback]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, ModuleType | type | FrameType):
            continue
        seen.add(id(one))
        if isinstance(one, dist.ProcessGroup):
            found.append(one)
        elif isinstance(one, FunctionType):
            left += [*(one.__closure__ or ()), one.__defaults__, one.__kwdefaults__]
        else:
            left += gc.get_referents(one)
    return found


def callbacks_that_hold_a_group(rank: int, _world_size: int, hook: str) -> list[str]:
    group = dist.new_group()
    holding: list[str] = []

    def look(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if groups_behind(callback):
            holding.append(repr(callback))
        return callback

    for _ in range(3):  # a callback of a future that is done is called at once
        _train(rank, hook, group, _callbacks_pass_through(look))
    dist.barrier()
    dist.destroy_process_group(group)
    return holding


@on_both_classes
def gradients_that_a_hook_sees(wrap: Wrap, _rank: int) -> tuple[bool, bool]:
    """Whether `GradBucket.gradients` of a channels-last weight has its strides, and whether it is its gradient."""
    ddp = wrap(nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last))
    given = []

    def hook(given, bucket):
        given.extend(gradient.clone() for gradient in bucket.gradients())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(given, hook)
    ddp(torch.arange(18.0).reshape(1, 2, 3, 3)).sum().backward()
    weight = ddp.module.weight
    return given[0].stride() == weight.stride(), torch.equal(given[0], weight.grad)
