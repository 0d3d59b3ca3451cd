"""Rank bodies of test_drop_in.py: names and features that scripts and libraries know from torch's class."""

import copy
import io
import pickle
import warnings
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddplab
from ddplab.reference.data_parallel import DistributedDataParallel

from ..scenarios import Branches, Wrap, batch, gradients, on_both_classes, train, trained
from .mixed_precision_bodies import Precision


class Tower(nn.Module):
    """Linear layers, each with a name, whose gradients arrive from the last to the first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=layer > 0) for layer in range(count))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


# Process groups


class Fails(torch.autograd.Function):
    """An error in the backward pass."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Tensor) -> Tensor:
        raise ArithmeticError


def update_groups(
    rank: int, _world_size: int, groups: list[tuple[int, ...]], options: dict, fails: bool
) -> tuple[list, list, bool]:
    """Gradients of both classes in one process group after the other, and whether ours rebuilt its last buckets.

    With `fails`, each group's last backward pass raises an error under our class.
    """
    made = [dist.new_group(list(ranks)) for ranks in groups]
    both = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(Tower(3), bucket_cap_mb=1e-4, **options)
        seen = []
        for group, ranks in zip([None, *made], [range(4), *groups], strict=True):
            if group is not None:
                ddp._update_process_group(group)
            if rank not in ranks:
                continue
            seen += trained(ddp, rank)
            if fails and wrap is DistributedDataParallel:
                with suppress(ArithmeticError):
                    Fails.apply(ddp(batch(rank, 4, 4))).sum().backward()
        both.append(seen)
        if wrap is DistributedDataParallel:
            rebuilt = ddp._has_rebuilt_buckets
        del ddp  # torch's may hang when it is freed after its group
    dist.barrier()
    for group, ranks in zip(made, groups, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)
    return (*both, rebuilt)


def update_with_a_comm_hook(rank: int, _world_size: int) -> list[float]:
    """Rank 0 and 1 train in a group of their own, in low precision: averages before and after."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), mixed_precision=Precision(None, "float16").config())
    pair = dist.new_group([0, 1])
    averages = []
    for group in (None, pair):
        ddp._update_process_group(group)
        if group is None or rank < 2:
            ddp.zero_grad()
            ddp(torch.full((1, 1), float(rank))).sum().backward()
            averages.append(ddp.module.weight.grad.item())
    if rank < 2:
        dist.destroy_process_group(pair)
    return averages


# Features switched on after construction


@on_both_classes
def static_graph_later(wrap: Wrap, rank: int, options: dict) -> list:
    """Gradients under a class that learns after construction that the graph is static."""
    module = Tower(3)
    module.register_parameter("unused", nn.Parameter(torch.ones(2)))
    ddp = wrap(module, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp._set_static_graph()
        ddp._set_static_graph()
    return [ddp.static_graph, len(caught), *trained(ddp, rank)]


# Being torch's class


class PassesThrough(DistributedDataParallel):
    """A subclass as many projects have one: attributes that it lacks are the module's; others are its own."""

    log = "a subclass's own"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    @property
    def plan(self) -> str:
        return self.log


class Parts(DistributedDataParallel):
    """Wraps its module part by part, as mmengine's class does for generators and discriminators."""

    def __init__(self, module: nn.Sequential) -> None:
        super(DistributedDataParallel, self).__init__()
        self.module = module
        module[0] = DistributedDataParallel(module[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Named(nn.Module):
    """Attributes of the module that our class has needed too, under these names."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        torch.manual_seed(shift)
        self.features, self.slots, self.debug = nn.Linear(4, 4), 3, 4

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


def copied(ddp: nn.Module, how: str) -> nn.Module:
    """A copy of a wrapper, made in one of the ways in which scripts save and load it whole."""
    if how == "deepcopy":
        return copy.deepcopy(ddp)
    if how == "pickle":
        return pickle.loads(pickle.dumps(ddp))
    file = io.BytesIO()
    torch.save(ddp, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


OF_TORCH_2_15 = {
    *("finalize_backward", "lazy_bucket_allocation", "require_manual_backward_finalization"),
    *("should_finalize_after_backward", "_static_graph_delay_allreduce_enqueued"),
}
"""Names that torch's class has from 2.15 on, and one that it has with a static graph only."""


def as_torchs(rank: int, _world_size: int) -> dict[str, Any]:
    """What clients ask of an instance."""
    ddp = DistributedDataParallel(Named(rank))
    torchs = TorchDDP(Named(rank))
    passing, parts = PassesThrough(Named(rank)), Parts(nn.Sequential(nn.Linear(4, 4)))
    active = []
    ddp.module.register_forward_hook(lambda *_: active.append(DistributedDataParallel._active_ddp_module is ddp))
    trained = []
    for wrapper in (ddp, passing, parts, *(copied(PassesThrough(Named(rank)), how) for how in COPIES)):
        wrapper(batch(rank, 4, 4)).square().sum().backward()
        trained.append(gradients(wrapper))
    return {
        "instances": [isinstance(wrapper, TorchDDP) for wrapper in (ddp, passing, parts)],
        "subclass": issubclass(PassesThrough, TorchDDP),
        "active": [*active, DistributedDataParallel._active_ddp_module],
        "passed": [passing.slots, passing.debug, passing.plan, passing.features is passing.module.features],
        "names": sorted(set(dir(ddp)) - set(dir(torchs)) - {"_active_ddp_module"} - OF_TORCH_2_15),
        "keys": list(get_model_state_dict(ddp)),
        "trained": trained,
    }


COPIES = ("deepcopy", "pickle", "torch.save")


def replaced(rank: int, _world_size: int) -> list:
    """What importers get while our class replaces torch's, and after that; and the graphs of torch.compile."""
    seen: list = []
    for context in (ddplab.replace_ddp(), nullcontext()):
        with context:
            from torch.nn.parallel import DistributedDataParallel as FromParallel
            from torch.nn.parallel.distributed import DistributedDataParallel as FromHome

            seen.append([found.__module__ for found in (FromParallel, FromHome, TorchDDP)])
            from torch._dynamo.testing import CompileCounterWithBackend

            torch._dynamo.reset()
            counter = CompileCounterWithBackend("eager")
            ddp = FromHome(torch.compile(Layers(4, 600), backend=counter), bucket_cap_mb=1)
            ddp(batch(rank, 2, 600)).sum().backward()
            seen[-1].append(counter.frame_count)
    return seen


def pipelined(rank: int, _world_size: int, name: str) -> tuple[list, list]:
    """Two stages of a pipeline on two ranks each: four micro-batches in flight; what one process computes beside it.

    torch's class sometimes raises an internal error here, when it rebuilds its buckets.
    """
    from torch.distributed import pipelining

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    index = rank // 2
    stages = []
    for number in range(2):
        torch.manual_seed(number)
        stages.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    alone = copy.deepcopy(nn.Sequential(*stages))
    ddp = DistributedDataParallel(stages[index], process_group=mesh["replica"].get_group())
    stage = pipelining.PipelineStage(ddp, index, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = getattr(pipelining, name)(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    got, expected = [], []
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        x = batch(rank % 2, 8, 4, step=step)
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.cos())
        got += gradients(ddp)
        for replica in range(2):
            x = batch(replica, 8, 4, step=step)
            nn.functional.mse_loss(alone(x), x.cos()).div(2).backward()
        expected += gradients(alone[index])
    return got, expected


def saved_by_torchs_class(_rank: int, _world_size: int) -> str:
    """The error of a wrapper that torch's class has pickled and ours is to load."""
    saved = pickle.dumps(TorchDDP(nn.Linear(2, 2)))
    with ddplab.replace_ddp():
        try:
            pickle.loads(saved)
        except RuntimeError as error:
            return str(error)
    return ""


# torch.compile


class Layers(nn.Module):
    """A user-defined class, because torch.compile skips torch's own, such as Sequential."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.register_buffer("shift", torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x + self.shift


@on_both_classes
def compiled(wrap: Wrap, rank: int, order: str) -> tuple[list, int]:
    """Gradients by step, then parameters, and the number of graphs; `order` says what is compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    module: nn.Module = Layers(4, 600)
    if order == "module":
        module = torch.compile(module, backend=counter)
    ddp: Any = wrap(module, bucket_cap_mb=1)
    run = torch.compile(ddp, backend=counter) if order == "wrapper" else ddp
    seen = train(run, rank, steps=3, shape=(2, 600))
    torch._dynamo.reset()
    return seen, counter.frame_count


def compiled_in_low_precision(rank: int, _world_size: int, order: str) -> tuple[list, list]:
    """Gradients by step, then parameters, compiled and not."""
    both = []
    for compiles in (True, False):
        torch._dynamo.reset()
        module: nn.Module = Layers(2, 8)
        if compiles and order == "module":
            module = torch.compile(module, backend="eager")
        ddp: Any = DistributedDataParallel(module, mixed_precision=Precision("bfloat16", "float32").config())
        run = torch.compile(ddp, backend="eager") if compiles and order == "wrapper" else ddp
        both.append(train(run, rank, loss=lambda output: output.float().square().mean(), shape=(2, 8)))
    torch._dynamo.reset()
    return tuple(both)


# Names that torch's own libraries use


@on_both_classes
def replicated(wrap: Wrap, rank: int) -> list:
    """Gradients under torch's `replicate`, built on a class."""
    module = Tower(2)
    with mock.patch.dict(replicate.__globals__, {"DistributedDataParallel": wrap}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicate(module)
        return trained(module, rank)


def names_missing(rank: int, _world_size: int) -> tuple[list[str], list[str]]:
    """Names of torch's class that ours lacks, and those that it computes, so that `vars` lacks them."""
    ours, torchs = (wrapper(nn.Linear(1, 1)) for wrapper in (DistributedDataParallel, TorchDDP))
    missing = sorted(name for name in dir(torchs) if not name.startswith("__") and not hasattr(ours, name))
    return missing, sorted(vars(torchs).keys() - vars(ours).keys() - set(missing))


def forward_before_training(rank: int, _world_size: int) -> int:
    """Number of calls of the set-up hook in three forward passes: evaluation, accumulation, training."""

    class Counts(DistributedDataParallel):
        calls = 0

        def _setup_in_backward_optimizers(self) -> None:
            self.calls += 1

    ddp = Counts(nn.Linear(1, 1))
    with torch.no_grad():
        ddp(torch.ones(1, 1))
    with ddp.no_sync():
        ddp(torch.ones(1, 1)).sum().backward()
    ddp(torch.ones(1, 1)).sum().backward()
    return ddp.calls


def attributes_that_torch_lets_scripts_set(_rank: int, _world_size: int) -> dict[str, object]:
    """Set attributes of the wrapper after construction, and call methods that torch's class has."""
    ddp = DistributedDataParallel(Branches())
    ddp.find_unused_parameters = True
    for _ in range(2):  # without the search the second forward pass would raise
        ddp.zero_grad()
        ddp(torch.ones(1, 4), "a").sum().backward()
    buffered = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    synchronized = [buffered.will_sync_module_buffers()]
    buffered.broadcast_buffers = False
    synchronized.append(buffered.will_sync_module_buffers())
    refused = []
    for name in ("gradient_as_bucket_view", "static_graph", "batched_grad_copy", "skip_all_reduce_unused_params"):
        try:
            setattr(ddp, name, True)
        except AttributeError as error:
            refused.append(str(error))
    (inputs,), (kwargs,) = ddp.to_kwargs((torch.ones(2),), {"scale": 2}, 0)
    return {
        "unused": ddp.module.b.weight.grad,
        "synchronized": synchronized,
        "refused": refused,
        "moved": (inputs[0].tolist(), kwargs),
    }
