"""Rank bodies that train with comm hooks, on gradients that the tests choose."""

import copy
import gc
import io
import logging
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel.distributed import _MixedPrecision

from reference.comm_hooks.allreduce import allreduce, noop
from reference.comm_hooks.compress import bf16_compress, compress, fp16_compress
from reference.comm_hooks.post_local_sgd import PostLocalSGDState, post_local_sgd
from reference.comm_hooks.powersgd import PowerSGDState, batched_power_sgd, power_sgd
from reference.comm_hooks.quantization import quantize_per_channel, quantize_per_tensor
from reference.data_parallel import DistributedDataParallel

from .scenarios import Branches, batch

WRAPPERS = {"ours": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}
Shapes = tuple[tuple[int, ...], ...]

POWER: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 1}

# Name: hook, and what makes its state of options.
OURS: dict[str, tuple[Callable, Callable[..., Any]]] = {
    "allreduce": (allreduce, lambda **_: None),
    "noop": (noop, lambda **_: None),
    "fp16": (fp16_compress, lambda **_: None),
    "bf16": (bf16_compress, lambda **_: None),
    "compress(fp16)(allreduce)": (compress(torch.float16)(allreduce), lambda **_: None),
    "compress(bf16)(allreduce)": (compress(torch.bfloat16)(allreduce), lambda **_: None),
    "per tensor": (quantize_per_tensor, lambda **_: None),
    "per channel": (quantize_per_channel, lambda **_: None),
    "power": (power_sgd, lambda **options: PowerSGDState(None, **(POWER | options))),
    "batched power": (batched_power_sgd, lambda **options: PowerSGDState(None, **(POWER | options))),
    "compress(bf16)(power)": (
        compress(torch.bfloat16)(power_sgd),
        lambda **options: PowerSGDState(None, **(POWER | options)),
    ),
    "local": (post_local_sgd, lambda: PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)),
}
# Without those that quantise, which fail on Gloo under torch's class too, and batched PowerSGD, which fails anywhere.
TORCHS: dict[str, tuple[Callable, Callable[..., Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, lambda: None),
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "bf16": (default_hooks.bf16_compress_hook, lambda: None),
    "bf16 wrapper": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), lambda: None),
    "power": (powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(None, **POWER)),
    "local": (
        post_localSGD_hook.post_localSGD_hook,
        lambda: post_localSGD_hook.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False),
    ),
}
HOOKS = {"ours": OURS, "torch": TORCHS}


class Given(nn.Module):
    """A module whose gradients are the tensors that are passed to forward."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def given_gradients(rank: int, shapes: Shapes, seed: int, step: int, *, low_rank: int | None = None) -> list[Tensor]:
    """A random tensor for each shape. With `low_rank`, matrices of that rank, with one column space for all ranks."""
    generator = torch.Generator().manual_seed(seed * 1000 + step * 10 + rank)
    common = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        if low_rank is None or len(shape) < 2:
            made.append(torch.randn(shape, generator=generator))
        else:
            columns = torch.Size(shape[1:]).numel()
            basis = torch.randn(shape[0], low_rank, generator=common)
            made.append((basis @ torch.randn(low_rank, columns, generator=generator)).view(shape))
    return made


def mean_gradients(world_size: int, shapes: Shapes, seed: int, step: int, **options: Any) -> list[Tensor]:
    """The averages of the given gradients, computed without a hook or processes."""
    by_rank = [given_gradients(rank, shapes, seed, step, **options) for rank in range(world_size)]
    return [sum(ranks) / world_size for ranks in zip(*by_rank, strict=True)]


def averages(
    rank: int,
    _world_size: int,
    hook: tuple[str, str],
    wrapper: str,
    shapes: Shapes,
    seed: int,
    *,
    steps: int = 4,
    options: dict[str, Any] | None = None,
    state_options: dict[str, Any] | None = None,
    low_rank: int | None = None,
    same: bool = False,
    scales: dict[int, float] | None = None,
    device: str = "cpu",
) -> tuple[list[list[Tensor]], Any, nn.Module]:
    """The given gradients after averaging, by step; the hook's state; the model.

    `same`: use the same gradients in every step; `scales`: factor of the gradients by step.
    """
    function, make_state = HOOKS[hook[0]][hook[1]]
    state = make_state(**(state_options or {}))
    ddp = WRAPPERS[wrapper](Given(shapes).to(device), **(options or {}))
    ddp.register_comm_hook(state, function)
    seen = []
    for step in range(steps):
        ddp.zero_grad()
        given = given_gradients(rank, shapes, seed, 0 if same else step, low_rank=low_rank)
        ddp([g.to(device) * (scales or {}).get(step, 1.0) for g in given]).backward()
        seen.append([w.grad.cpu().clone() for w in ddp.module.weights])
    return seen, state, ddp


def on_classes(
    rank: int, world_size: int, hook: tuple[str, str], *rest: Any, wrappers: tuple[str, ...], **options: Any
) -> list:
    """Averages by class and step."""
    return [averages(rank, world_size, hook, wrapper, *rest, **options)[0] for wrapper in wrappers]


def bytes_given(rank: int, _world_size: int, hook: str, shapes: Shapes) -> int:
    """Bytes that this rank passes to the collectives of one iteration."""
    given = []

    def count(name: str) -> Any:
        real = getattr(dist, name)

        def counted(*tensors: Any, **arguments: Any) -> Any:
            given.append(tensors[-1].nbytes)
            return real(*tensors, **arguments)

        return mock.patch.object(dist, name, counted)

    function, make_state = OURS[hook]
    ddp = DistributedDataParallel(Given(shapes))
    ddp.register_comm_hook(make_state(), function)
    with count("all_reduce"), count("all_gather"):
        ddp(given_gradients(rank, shapes, 0, 0)).backward()
    return sum(given)


def elements_sent(rank: int, world_size: int, hook: str, shapes: Shapes, options: dict) -> tuple[int, Any]:
    """Elements that the hook passes to all-reduces in an iteration, and its compression statistics."""
    sent = []
    real = dist.all_reduce

    def count(tensor: Tensor, **arguments: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, **arguments)

    with mock.patch.object(dist, "all_reduce", count):
        _, before, _ = averages(rank, world_size, ("ours", hook), "ours", shapes, 0, steps=2, state_options=options)
        in_full, sent[:] = sum(sent), []
        _, state, _ = averages(rank, world_size, ("ours", hook), "ours", shapes, 0, steps=3, state_options=options)
    assert before.compression_stats() == (0.0, 0, 0)
    return sum(sent) - in_full, state.compression_stats()


def kept_errors(rank: int, world_size: int, hook: str, shapes: Shapes, seed: int, options: dict) -> float:
    """Relative difference between the given gradients and the sum of sent averages and kept errors."""
    steps = 6
    seen, state, ddp = averages(
        rank, world_size, ("ours", hook), "ours", shapes, seed, steps=steps, state_options=options
    )
    given = [given_gradients(rank, shapes, seed, step) for step in range(steps)]
    worst = 0.0
    for index, parameter in enumerate(ddp.parameters()):
        if hook == "power":
            kept = state._errors.get(state.name(parameter), torch.zeros(shapes[index])).view(shapes[index])
        else:
            (bucket,) = ddp.reducer.buckets
            flat = state._errors["bucket 0"].flatten()[: bucket.buffer.numel()]
            kept = bucket.views_of(flat)[bucket.indices.index(index)]
        everyones = sum(step[index] for step in given) - kept
        dist.all_reduce(everyones)
        sent = sum(step[index] for step in seen)
        worst = max(worst, float((everyones / world_size - sent).norm() / (1 + sent.norm())))
    return worst


def _trainer(seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-3)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def train_and_save(
    rank: int, _world_size: int, folder: str, first: int, last: int, hook: str, options: dict
) -> tuple[list[Tensor], int]:
    """Iterations `first` to `last` under a hook, beginning with what the last call saved; saves at the end."""
    function, make_state = OURS[hook]
    ddp, optimizer = _trainer(seed=3)
    path = Path(folder) / f"rank-{rank}.pt"
    if first == 0:
        state = make_state(**options)
    else:
        saved = torch.load(path, weights_only=False)
        ddp.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["hook"]
    ddp.register_comm_hook(state, function)
    for step in range(first, last):
        optimizer.zero_grad()
        ddp(batch(rank, 5, 12, step=step)).square().mean().backward()
        optimizer.step()
    torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "hook": state}, path)
    return [p.detach().clone() for p in ddp.parameters()], state.iter


def saved_with_a_group(rank: int, world_size: int) -> list[list[str]]:
    """Warnings on loading a state whose group was: none given, all ranks, a part, that of a subgroup."""
    part = dist.new_group([rank], use_local_synchronization=True)
    states = [
        PowerSGDState(None),
        PowerSGDState(dist.group.WORLD),
        PowerSGDState(part),
        PostLocalSGDState(None, part, 3),
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


def size_when_saved(rank: int, world_size: int, shapes: Shapes) -> tuple[int, int]:
    """Size of the pickle of a state, and of the tensors that it keeps, in bytes."""
    _, state, _ = averages(rank, world_size, ("ours", "power"), "ours", shapes, 0)
    remembered = sum(t.nbytes for t in [*state._errors.values(), *state._qs.values()])
    file = io.BytesIO()
    torch.save(state, file)
    assert copy.deepcopy(state)._errors.keys() == state._errors.keys()
    return file.tell(), remembered


def skips_unused_parameters(rank: int, _world_size: int) -> list[bool]:
    """Whether gradients are finite, by iteration, under PowerSGD when the last bucket is sometimes not sent."""
    ddp = DistributedDataParallel(
        Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-6
    )
    ddp.register_comm_hook(PowerSGDState(None, **POWER), power_sgd)
    finite = []
    for which in ("ab", "ab", "ab", "a", "b", "ab"):
        ddp.zero_grad()
        ddp(batch(rank, 3, 4), which).sum().backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None))
    return finite


def averages_around_a_failure(rank: int, _world_size: int, shapes: Shapes) -> list[list[Tensor]]:
    """Averages of six iterations; a further iteration fails between them, before its last bucket is sent."""
    state = PowerSGDState(None, **POWER)
    ddp = DistributedDataParallel(Given(shapes), bucket_cap_mb=1e-6)
    ddp.register_comm_hook(state, power_sgd)
    failing = False

    def fail(_parameter: Tensor) -> None:
        if failing:
            raise ArithmeticError("in the middle")

    ddp.module.weights[0].register_post_accumulate_grad_hook(fail)
    seen = []
    for step in range(6):
        if step == 4:
            failing = True
            with suppress(ArithmeticError):
                ddp(given_gradients(rank, shapes, 0, 99)).backward()
            failing = False
            ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=1e-6)
            ddp.register_comm_hook(state, power_sgd)
        ddp.zero_grad()
        ddp(given_gradients(rank, shapes, 0, step)).backward()
        seen.append([p.grad.clone() for p in ddp.parameters()])
    return seen


def copies_under_a_hook(rank: int, _world_size: int, hook: str, how: str) -> tuple[list, list, str]:
    """Averages of a module and of its copy, which train on one after the other, and the copy's logged hook."""
    ddp, _ = _trainer(seed=3)
    if hook == "builtin":
        ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    else:
        function, make_state = OURS[hook]
        ddp.register_comm_hook(dist.group.WORLD if hook == "allreduce" else make_state(), function)

    def train(model: DistributedDataParallel) -> list:
        seen = []
        for step in range(4):
            model.zero_grad()
            model(batch(rank, 5, 12, step=step)).square().mean().backward()
            seen.append([p.grad.clone() for p in model.parameters()])
        return seen

    train(ddp)
    if how == "deepcopy":
        twin = copy.deepcopy(ddp)
    else:
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    return train(twin), train(ddp), twin._get_ddp_logging_data()["comm_hook"]


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


class WrittenInPython(dist.ProcessGroup):
    """A process group without a backend, so without options or a time-out; forwards its collectives to Gloo."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)
        self._gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        return self._gloo.allreduce(tensors, *options)

    def broadcast(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        return self._gloo.broadcast(tensors, *options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any) -> dist.Work:
        return self._gloo.allgather(outputs, inputs, *options)


def averages_over_a_group_written_in_python(rank: int, world_size: int, shapes: Shapes) -> list[list[Tensor]]:
    """Averages over such a group, without a hook and with one."""
    if not hasattr(dist.Backend, "WRITTEN_IN_PYTHON"):
        dist.Backend.register_backend("written_in_python", WrittenInPython, devices=["cpu"])
    group = dist.new_group(list(range(world_size)), backend="written_in_python")
    seen = []
    for hook in (None, allreduce):
        ddp = DistributedDataParallel(Given(shapes), process_group=group)
        if hook is not None:
            ddp.register_comm_hook(group, hook)
        ddp(given_gradients(rank, shapes, 0, 0)).backward()
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


def logged_statistics(rank: int, world_size: int, every: int) -> list[str]:
    """What PowerSGD logs in 8 iterations, 6 of which compress."""
    logger = logging.getLogger("reference.comm_hooks.powersgd")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        options = {"compression_stats_logging_frequency": every}
        averages(rank, world_size, ("ours", "power"), "ours", ((8, 8),), 0, steps=8, state_options=options)
    finally:
        logger.removeHandler(handler)
    return records


def local_sgd(rank: int, world_size: int, period: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Parameters by step, with gradients averaged in pairs from step 2 on, and all ranks' averaged every `period`."""
    subgroup, _ = dist.new_subgroups(2)
    ddp = DistributedDataParallel(nn.Linear(4, 3))
    torch.manual_seed(1)
    for parameter in ddp.parameters():
        nn.init.normal_(parameter)
    start = [p.detach().clone() for p in ddp.parameters()]
    ddp.register_comm_hook(PostLocalSGDState(None, subgroup, 2), post_local_sgd)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=period, warmup_steps=2)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        ddp(batch(rank, 5, 4, step=step)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(ddp.parameters())
        seen.append([p.detach().clone() for p in ddp.parameters()])
    return seen, start


def local_sgd_by_hand(world_size: int, period: int, start: list[Tensor]) -> list[list[list[Tensor]]]:
    """The parameters of `local_sgd`, computed without processes; by step and rank."""
    models = []
    for _ in range(world_size):
        model = nn.Linear(4, 3)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        models.append(model)
    seen = []
    for step in range(6):
        gradients = []
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(rank, 5, 4, step=step)).square().mean().backward()
            gradients.append([p.grad for p in model.parameters()])
        for rank, model in enumerate(models):
            pair = [rank // 2 * 2, rank // 2 * 2 + 1]
            over = pair if step >= 2 else list(range(world_size))
            with torch.no_grad():
                for index, parameter in enumerate(model.parameters()):
                    parameter -= 0.1 * sum(gradients[r][index] for r in over) / len(over)
        if step >= 2 and (step - 2) % period == 0:
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p.detach().clone() for p in parameters) / world_size
                    for parameter in parameters:
                        parameter.copy_(mean)
        seen.append([[p.detach().clone() for p in model.parameters()] for model in models])
    return seen


def builtin_hooks(rank: int, _world_size: int) -> list[bool]:
    """Whether a hook registered by torch's enumeration gives the same on both classes."""
    same = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        both = []
        for wrapper in WRAPPERS.values():
            ddp = wrapper(Given(((3, 4), (5,))))
            ddp._register_builtin_comm_hook(kind)
            ddp(given_gradients(rank, ((3, 4), (5,)), 0, 0)).backward()
            both.append([p.grad for p in ddp.parameters()])
        same.append(all(torch.equal(a, b) for a, b in zip(*both, strict=True)))
    return same


# Process groups and callbacks of futures


class _Slow:
    """Keeps the thread that frees it busy for a while."""

    def __del__(self) -> None:
        time.sleep(0.3)


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
    if hook == "mixed precision":
        ddp = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=1e-5, mixed_precision=_MixedPrecision(None, torch.bfloat16)
        )
    else:
        function, make_state = OURS[hook]
        state = make_state()
        if state is None:
            state = group
        else:
            state.process_group = group
        ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-5)
        ddp.register_comm_hook(state, function)
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


def destroy_the_group_while_gloo_frees_callbacks(rank: int, _world_size: int, hook: str) -> None:
    """Drop all references of the main thread to a group before Gloo's thread drops those of its last callbacks."""
    group = dist.new_group()

    def freed_slowly(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        slow = _Slow()
        return lambda done, callback=callback, _slow=slow: callback(done)  # the last default is freed first

    _train(rank, hook, group, _callbacks_pass_through(freed_slowly))
    gc.collect()
    dist.destroy_process_group(group)
    del group
    time.sleep(1)
