"""Mistakes that a script can make with our data parallelism: each function makes one mistake, which may raise."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from inspect import signature
from tempfile import TemporaryDirectory
from types import FunctionType

import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _MixedPrecision

from ddplab.reference.comm_hooks.allreduce import allreduce
from ddplab.reference.comm_hooks.compress import compress
from ddplab.reference.data_parallel import DistributedDataParallel as Wrapped

from .scenarios import Branches, Nested


class UsesOneOfTwo(nn.Module):
    """One parameter gets all gradients and the other none, so two backward passes give the first one two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x


def line() -> nn.Linear:
    return nn.Linear(2, 1)


def x(rows: int = 1, columns: int = 2) -> Tensor:
    return torch.ones(rows, columns)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), line())


def twice(ddp: nn.Module, inputs: Tensor) -> None:
    """One forward pass and two backward passes."""
    loss = ddp(inputs).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def join(ddp: nn.Module) -> None:
    with ddp.join():
        ddp(x()).sum().backward()


def train(ddp: nn.Module, *steps: str) -> None:
    """Train layers of `Branches`, by step."""
    for which in steps:
        ddp(x(1, 4), which).sum().backward()


def unused_then_no_sync(rank: int) -> None:
    ddp = Wrapped(Branches())
    ddp(x(1, 4), "a").sum().backward()
    with ddp.no_sync():
        ddp(x(1, 4), "a").sum().backward()


def output_unused_in_loss(_rank: int) -> None:
    ddp = Wrapped(Nested("tuple"))
    for _ in range(2):
        ddp(x(1, 4))[0].sum().backward()


class Opaque:
    """A return type that is not searched for tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


def output_not_found(_rank: int) -> None:
    module = Nested("tuple")
    inner = module.forward
    module.forward = lambda x: (inner(x)[0], Opaque(*inner(x)[1][:1]))
    ddp = Wrapped(module, find_unused_parameters=True)
    output, opaque = ddp(x(1, 4))
    (output.sum() + opaque.tensors[0].sum()).backward()


def used_outside_forward(_rank: int) -> None:
    module = Branches()
    ddp = Wrapped(module, find_unused_parameters=True)
    (ddp(x(1, 4), "a").sum() + module.b(x(1, 4)).sum()).backward()


def two_backward_passes(_rank: int) -> None:
    ddp = Wrapped(two_layers(), bucket_cap_mb_list=[1e-6])
    first, second = line(), line()
    features = ddp.module[0](x())
    ddp(x())
    first(features).sum().backward(retain_graph=True)
    second(features).sum().backward()


def static_graph_hides_its_output(_rank: int) -> None:
    ddp = Wrapped(Branches(), static_graph=True)
    ddp.module.register_forward_hook(lambda _module, _inputs, output: iter([output]))
    for _ in range(2):
        (output,) = ddp(x(1, 4), "a")
        output.sum().backward()


def different_buffers(rank: int) -> None:
    module = line()
    module.register_buffer("mask", torch.ones(2 + rank))
    Wrapped(module)


def frozen_after_wrapping(_rank: int) -> None:
    ddp = Wrapped(two_layers())
    ddp.module[0].requires_grad_(False)
    for _ in range(2):
        ddp(x(1, 2)).sum().backward()


def different_layers_frozen(rank: int) -> None:
    module = nn.Sequential(line(), line())
    module[rank].requires_grad_(False)
    Wrapped(module)


def error_that_cannot_be_pickled_on_one_rank(rank: int) -> None:
    class UnpicklableError(Exception):
        pass

    class Refuses(nn.Linear):
        def named_parameters(self, *_args, **_options):
            raise UnpicklableError("no names today")

    Wrapped(line() if rank == 0 else Refuses(2, 1))


def unknown_name_in_plan_of_a_group_of_one(rank: int) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    Wrapped(line(), process_group=alone)
    Wrapped(line(), process_group=alone, plan=[["weight", "bia"]])


def converted_after_wrapping(_rank: int) -> None:
    ddp = Wrapped(line())
    ddp.double()
    ddp(x().double()).sum().backward()


def converted_and_back(_rank: int) -> None:
    ddp = Wrapped(line())
    for _ in range(3):
        ddp(x()).sum().backward()
    ddp.double().float().zero_grad()
    ddp(x()).sum().backward()


def swapped(_rank: int) -> None:
    module = line()
    ddp = Wrapped(module)
    module.zero_grad()
    torch.utils.swap_tensors(module.weight, nn.Parameter(module.weight.detach().clone()))
    ddp(x()).sum().backward()


def dense_where_sparse(_rank: int) -> None:
    module = nn.Embedding(4, 2, sparse=True)
    ddp = Wrapped(module)
    module.sparse = False
    ddp(torch.tensor([1])).sum().backward()


def delayed(module: nn.Module, *names: str, trigger: str = "bias") -> nn.Module:
    """Wrap a module of which some gradients are averaged late, when that of the trigger is."""
    named = [(name, module.get_parameter(name)) for name in names]
    hooked = module.get_parameter(trigger)
    return Wrapped(module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=hooked)


def delayed_without_trigger(_rank: int) -> None:
    module = line()
    Wrapped(module, delay_all_reduce_named_params=[("weight", module.weight)])


def delayed_of_another_module(_rank: int) -> None:
    module = line()
    delayed = [("weight", line().weight)]
    Wrapped(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.bias)


def frozen_trigger(_rank: int) -> None:
    module = line()
    module.bias.requires_grad_(False)
    delayed(module, "weight")


def exception_after_a_delayed_all_reduce(_rank: int) -> None:
    def fail(_gradient: Tensor) -> None:
        raise ArithmeticError

    ddp = delayed(two_layers(), "1.weight", "1.bias", trigger="1.weight")
    ddp.module[0].weight.register_hook(fail)
    with suppress(ArithmeticError):
        ddp(x()).sum().backward()
    ddp(x())


def compiled_autograd(_rank: int) -> None:
    ddp = Wrapped(line())
    loss = ddp(x()).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    raise RuntimeError("no error")


def _distributed_autograd(rank: int, *, forward_inside: bool) -> None:
    """Gradients of `torch.distributed.autograd` stay in its context; it hides the error of a hook."""
    from torch.distributed import autograd, rpc

    with TemporaryDirectory() as folder:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
        rpc.init_rpc(f"rank-{rank}", rank=0, world_size=1, rpc_backend_options=options)
        try:
            ddp = Wrapped(line())
            loss = None if forward_inside else ddp(x()).sum()
            with autograd.context() as context, nullcontext() if forward_inside else suppress(RuntimeError):
                autograd.backward(context, [ddp(x()).sum() if loss is None else loss])
        finally:
            rpc.shutdown()
    ddp(x())


def trigger_before_the_delayed(_rank: int) -> None:
    ddp = delayed(two_layers(), "0.weight", trigger="1.bias")
    ddp(x()).sum().backward()


def trigger_before_the_delayed_in_a_later_iteration(_rank: int) -> None:
    module = two_layers()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ddp = delayed(module, "0.weight", trigger="1.bias")
    ddp(x()).sum().backward()


def replaced_by_loading(_rank: int) -> None:
    ddp = Wrapped(nn.Sequential(line(), nn.Linear(1, 1)))
    ddp(x()).sum().backward()
    ddp.load_state_dict(copy.deepcopy(ddp.state_dict()), assign=True)
    ddp(x()).sum().backward()


def replaced_inside_the_wrapper(_rank: int) -> None:
    ddp = Wrapped(line(), static_graph=True)
    for _ in range(3):
        ddp(x()).sum().backward()
    ddp.module.load_state_dict(copy.deepcopy(ddp.module.state_dict()), assign=True)
    ddp(x()).sum().backward()


def replaced_in_one_layer(_rank: int) -> None:
    ddp = Wrapped(nn.Sequential(line(), nn.Linear(1, 1)), find_unused_parameters=True)
    ddp.module[1].weight = nn.Parameter(torch.ones(1, 1))
    ddp(x()).sum().backward()


def two_comm_hooks(_rank: int) -> None:
    ddp = Wrapped(line())
    for _ in range(2):
        ddp.register_comm_hook(None, lambda state, bucket: None)


def comm_hook_in_backward(_rank: int) -> None:
    ddp = Wrapped(line())
    module = next(iter(ddp.module.parameters()))
    module.register_post_accumulate_grad_hook(lambda _: ddp.register_comm_hook(None, lambda state, bucket: None))
    ddp(x()).sum().backward()


def comm_hook_returns_too_little(_rank: int) -> None:
    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(torch.ones(1))
        return future

    train_with(hook)


def comm_hook_returns_nothing(_rank: int) -> None:
    def hook(state, bucket):
        dist.all_reduce(bucket.buffer())

    train_with(hook)


def comm_hook_fails_in_a_callback(_rank: int) -> None:
    def hook(state, bucket):
        sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return sent.then(lambda future: future.value()[7])

    train_with(hook)


def comm_hook_fails_inside_compress(_rank: int) -> None:
    def mine(state, bucket):
        raise OverflowError("too steep")

    train_with(compress(torch.bfloat16)(mine))


def comm_hook_raises_on_one_rank(rank: int) -> None:
    """Rank 1 raises an error; rank 0 waits for its collective until a short time-out."""

    def hook(group, bucket):
        if rank == 1 and bucket.index() == 1:
            raise OverflowError("too steep")
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()

    train_with(hook, timeout_s=1 + 2 * rank, bucket_cap_mb=1e-6)


class Refuses:
    def __call__(self, words, state, bucket):
        raise OverflowError("too steep")


def train_with(hook: Callable, *, timeout_s: float = 60, **options: object) -> None:
    """Run two iterations under a comm hook whose state is a process group with this time-out."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=timeout_s))
    ddp = Wrapped(line(), process_group=group, forward_sync_buffers=False, **options)
    ddp.register_comm_hook(group, hook)
    for _ in range(2):
        ddp(x()).sum().backward()


def large_parameter_converted(_rank: int) -> None:
    ddp = Wrapped(nn.Linear(200, 200), gradient_as_bucket_view=True)
    ddp.module.weight.register_post_accumulate_grad_hook(_to_columns)
    ddp(x(1, 200)).sum().backward()


def _to_columns(parameter: Tensor) -> None:
    parameter.grad = parameter.grad.t().contiguous().t()


def backward_inside_no_sync(_rank: int) -> None:
    ddp = Wrapped(line())
    loss = ddp(x()).sum()
    with ddp.no_sync():
        loss.backward()


def forward_inside_no_sync(_rank: int) -> None:
    ddp = Wrapped(line())
    with ddp.no_sync():
        loss = ddp(x()).sum()
    loss.backward()


def converted_to_channels_last_after_wrapping(_rank: int) -> None:
    module = nn.Conv2d(3, 4, 3)
    ddp = Wrapped(module)
    module.to(memory_format=torch.channels_last)
    ddp(torch.ones(1, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()


def graph_of_gradients(_rank: int) -> None:
    ddp = Wrapped(line())
    ddp(x()).square().sum().backward(create_graph=True)


def rank_that_leaves_the_order(rank: int) -> None:
    """Rank 1 skips the last iteration; rank 0 waits for it until a short time-out."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1 + 2 * rank))
    ddp = Wrapped(line(), process_group=group, debug=True, forward_sync_buffers=False)
    for step in range(4):
        if rank == 1 and step == 3:
            return
        ddp(x()).sum().backward()


def explained_launches(_rank: int, _world_size: int, steps: list[tuple[str, int]]) -> list[str]:
    """What each module's `explain` returns for its last launch, after steps in which all ranks keep the launch order.

    Steps: ("copy", r): rank r alone copies the first module; ("copy", -1): all ranks copy it and keep the copy;
    ("construct", 0): all ranks construct another module; ("train", i): they train module i.
    """
    modules = [Wrapped(line(), debug=True)]
    for step, number in steps:
        if step == "construct":
            modules.append(Wrapped(line(), debug=True))
        elif step == "train":
            modules[number % len(modules)](x()).sum().backward()
        elif number in (-1, dist.get_rank()):
            twin = copy.deepcopy(modules[0])
            if number == -1:
                modules.append(twin)
    for module in modules:
        module(x()).sum().backward()
    dist.barrier()
    orders = [module.reducer.launch_order for module in modules]
    return [order.explain(order._launches[order._group.group_name]) for order in orders]


def message(rank: int, _world_size: int, misuse: str) -> str:
    """The warnings and, if there is one, the error that a mistake causes; one per line."""
    errors = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            MISUSES[misuse](rank)
        except Exception as error:  # noqa: BLE001 - the tests check the type
            errors = [f"{type(error).__name__}: {error}"]
    return "\n".join([f"{warning.category.__name__}: {warning.message}" for warning in caught] + errors)


IN_ONE_CALL: dict[str, Callable[[int], object]] = {
    "unused_in_forward": lambda _rank: train(Wrapped(Branches()), "a", "a"),
    "unused_in_forward_later": lambda _rank: train(Wrapped(Branches()), "ab", "ab", "a", "a"),
    "static_graph_uses_more": lambda _rank: train(Wrapped(Branches(), static_graph=True), "a", "ab"),
    "static_graph_uses_less": lambda _rank: train(Wrapped(Branches(), static_graph=True), "ab", "a", "a"),
    "different_shapes": lambda rank: Wrapped(nn.Linear(2 + rank, 1)),
    "different_counts": lambda rank: Wrapped(nn.Linear(2, 1, bias=rank == 0)),
    "different_searches": lambda rank: Wrapped(line(), find_unused_parameters=rank == 0),
    "different_buffer_syncs": lambda rank: Wrapped(nn.BatchNorm1d(1), forward_sync_buffers=rank == 0),
    "different_buffer_broadcasts": lambda rank: Wrapped(nn.BatchNorm1d(1), broadcast_buffers=rank == 0),
    "different_skips": lambda rank: Wrapped(
        line(), find_unused_parameters=True, skip_all_reduce_unused_params=rank == 0
    ),
    "different_reductions": lambda rank: Wrapped(
        line(), mixed_precision=_MixedPrecision(reduce_dtype=(torch.float16, torch.bfloat16)[rank])
    ),
    "different_triggers": lambda rank: delayed(two_layers(), "1.weight", trigger=f"0.{('weight', 'bias')[rank]}"),
    "different_delays": lambda rank: delayed(two_layers(), f"{rank}.bias", trigger="0.weight"),
    "different_caps": lambda rank: Wrapped(line(), bucket_cap_mb=1 + rank),
    "nothing_to_train_on_one_rank": lambda rank: Wrapped(line() if rank == 0 else nn.ReLU()),
    "nothing_to_train": lambda _rank: Wrapped(nn.ReLU()),
    "lazy_parameters": lambda _rank: Wrapped(nn.Sequential(line(), nn.LazyLinear(2))),
    "made_in_inference_mode": lambda _rank: Wrapped(torch.inference_mode()(line)()),
    "sync_batch_norm_on_cpu": lambda _rank: Wrapped(nn.Sequential(line(), nn.SyncBatchNorm(1))),
    "unknown_name_in_plan": lambda _rank: Wrapped(line(), plan=[["weight", "bia"]]),
    "parameter_twice_in_plan": lambda _rank: Wrapped(line(), plan=[[0, 1], [1]]),
    "sparse_in_a_shared_bucket": lambda _rank: Wrapped(
        nn.Sequential(nn.Embedding(2, 2, sparse=True), line()), plan=[[0, 1, 2]]
    ),
    "mixed_precision_is_no_configuration": lambda _rank: Wrapped(line(), mixed_precision=torch.bfloat16),
    "mixed_precision_in_integers": lambda _rank: Wrapped(
        line(), mixed_precision=_MixedPrecision(param_dtype=torch.int8)
    ),
    "delayed_on_one_rank": lambda rank: delayed(line(), *["weight"][:rank]),
    "delayed_sparse_gradients": lambda _rank: delayed(nn.Embedding(4, 2, sparse=True), "weight", trigger="weight"),
    "group_and_mesh": lambda _rank: Wrapped(
        line(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))
    ),
    "comm_hook_beside_mixed_precision": lambda _rank: Wrapped(
        line(), mixed_precision=_MixedPrecision(torch.bfloat16)
    ).register_comm_hook(None, allreduce),
    "two_device_ids": lambda _rank: Wrapped(line(), device_ids=[0, 1]),
    "device_id_for_a_cpu_module": lambda _rank: Wrapped(line(), device_ids=[0]),
    "mesh_of_two_dimensions": lambda _rank: Wrapped(line(), device_mesh=init_device_mesh("cpu", (1, 2))),
    "comm_hook_without_bucket": lambda _rank: Wrapped(line()).register_comm_hook(None, lambda state, gradients: None),
    "comm_hook_is_no_function": lambda _rank: Wrapped(line()).register_comm_hook(None, 3),
    "comm_hook_never_ends": lambda _rank: train_with(lambda state, bucket: torch.futures.Future(), timeout_s=0.5),
    "comm_hook_is_an_object": lambda _rank: train_with(partial(Refuses(), "state")),
    "cap_of_another_type_on_one_rank": lambda rank: Wrapped(line(), bucket_cap_mb=25 if rank == 0 else "25"),
    "device_id_on_one_rank": lambda rank: Wrapped(line(), device_ids=None if rank == 0 else [0]),
    "pickled_with_a_group": lambda _rank: Wrapped(line(), process_group=dist.new_group([0, 1])).__getstate__(),
    "group_without_this_rank": lambda _rank: Wrapped(line(), process_group=dist.GroupMember.NON_GROUP_MEMBER),
    "join_with_delayed_all_reduces": lambda _rank: join(delayed(line(), "weight")),
    "join_with_skipped_buckets": lambda _rank: join(
        Wrapped(line(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    ),
    "second_backward_after_a_delayed_all_reduce": lambda _rank: twice(
        delayed(line(), "weight", trigger="weight"), x()
    ),
    "two_gradients_for_one_none_for_another": lambda _rank: twice(Wrapped(UsesOneOfTwo()), torch.ones(2)),
    "distributed_autograd": partial(_distributed_autograd, forward_inside=True),
    "distributed_autograd_after_forward": partial(_distributed_autograd, forward_inside=False),
    "deprecated_arguments": lambda _rank: Wrapped(line(), broadcast_buffers=True, check_reduction=True),
}
MISUSES: dict[str, Callable[[int], object]] = IN_ONE_CALL | {
    name: value
    for name, value in globals().items()
    if isinstance(value, FunctionType) and list(signature(value).parameters) in (["rank"], ["_rank"])
}
