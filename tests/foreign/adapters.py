"""Adapters: what other libraries wrap a module and its optimiser with, as their guides say, for `ddplab conform`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

KEPT: list[Any] = []
"""Servers of this process."""
Adapted = tuple[nn.Module, Callable[[], object]]


def again(optimizer: Optimizer, module: nn.Module, before: list[nn.Parameter]) -> Optimizer:
    """Make the same optimiser for a module whose parameters, those `before`, were replaced by shards."""
    shards = dict(zip(before, module.parameters(), strict=True))
    return type(optimizer)(groups_of(optimizer, shards), **optimizer.defaults)


def groups_of(optimizer: Optimizer, shards: dict[nn.Parameter, nn.Parameter] | None = None) -> list[dict[str, Any]]:
    """Return parameter groups without frozen parameters; of shards, if there are any."""
    trainable = [[one for one in group["params"] if one.requires_grad] for group in optimizer.param_groups]
    own = [[shards[one] for one in of_group] if shards else of_group for of_group in trainable]
    return [group | {"params": of_group} for group, of_group in zip(optimizer.param_groups, own, strict=True)]


def settings_of_launcher() -> None:
    """Set what torchrun sets, which some libraries read."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # never used: the process group exists already


def torch_ddp(module: nn.Module, optimizer: Optimizer, *, find_unused_parameters: bool = False) -> Adapted:
    """`DistributedDataParallel` of torch."""
    return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters), optimizer.step


def torch_zero(module: nn.Module, optimizer: Optimizer, *, find_unused_parameters: bool = False) -> Adapted:
    """`ZeroRedundancyOptimizer` of torch."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)
    return wrapped, ZeroRedundancyOptimizer(groups_of(optimizer), type(optimizer), **optimizer.defaults).step


def torch_fully_shard(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """`fully_shard` of torch (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    before = list(module.parameters())
    wrapped: Any = fully_shard(module)

    @contextmanager
    def no_sync() -> Iterator[None]:
        wrapped.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            wrapped.set_requires_gradient_sync(True)

    wrapped.no_sync = no_sync
    return wrapped, again(optimizer, module, before).step


def torch_replicate(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """`replicate` of torch."""
    from torch.distributed._composable.replicate import replicate

    return replicate(module), optimizer.step


def torch_replicate_of_fsdp(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """`replicate` of torch, on FSDP2's parts."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    before = list(module.parameters())
    return replicate(module), again(optimizer, module, before).step


def _deepspeed(stage: int, module: nn.Module, optimizer: Optimizer) -> Adapted:
    settings_of_launcher()
    import deepspeed

    how = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    made = deepspeed.initialize(model=module, optimizer=optimizer, config=how | zero, dist_init_required=False)
    return made[0], made[0].step


def deepspeed_1(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """ZeRO stage 1 of deepspeed."""
    return _deepspeed(1, module, optimizer)


def deepspeed_2(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """ZeRO stage 2 of deepspeed."""
    wrapped, step = _deepspeed(2, module, optimizer)
    wrapped.no_sync = None  # it raises an error, as its guide says
    return wrapped, step


def accelerate_ddp(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """`Accelerator` of accelerate."""
    settings_of_launcher()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, stepping = accelerator.prepare(module, optimizer)
    return wrapped, stepping.step


def fabric_ddp(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """`Fabric` of lightning, with its strategy ddp."""
    settings_of_launcher()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    fabric.launch()
    wrapped, stepping = fabric.setup(module, optimizer)
    return wrapped, stepping.step


def fairscale_sharded(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """`ShardedDataParallel` and `OSS` of fairscale."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    sharded = OSS(groups_of(optimizer), type(optimizer), **optimizer.defaults)
    return ShardedDataParallel(module, sharded), sharded.step


@cache
def torchft_manager() -> Any:
    """Make torchft's manager of this rank, which is a replica group of its own; rank 0 has the lighthouse."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    size, address = dist.get_world_size(), [""]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if dist.get_rank() == 0:
        KEPT.append(LighthouseServer(bind="127.0.0.1:0", min_replicas=size, join_timeout_ms=5000))
        address = [KEPT[-1].address()]
    dist.broadcast_object_list(address)
    group: Any = {"rank": 0, "world_size": 1, "store_addr": "127.0.0.1", "store_port": store.port}
    group |= {"replica_id": str(dist.get_rank()), "lighthouse_addr": address[0], "hostname": "127.0.0.1"}
    state: Any = {"load_state_dict": None, "state_dict": None, "init_sync": False, "use_async_quorum": False}
    KEPT.append(store)
    return Manager(pg=ProcessGroupGloo(), min_replica_size=size, **group, **state)


def torchft_ddp(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """`DistributedDataParallel` of torchft.

    Each rank is a replica group of its own.
    """
    import torchft

    manager = torchft_manager()
    wrapped = torchft.DistributedDataParallel(manager, module)
    manager.start_quorum()  # its optimiser starts the next one in `zero_grad`

    def step() -> None:
        if manager.should_commit():
            optimizer.step()
        manager.start_quorum()

    return wrapped, step


def megatron_ddp(module: nn.Module, optimizer: Optimizer) -> Adapted:
    """`DistributedDataParallel` of megatron-core."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    with mock.patch("torch.cuda.current_device", return_value="cpu"):  # where it puts its buffers
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), module)

    def step():
        wrapped.finish_grad_sync()
        for p in module.parameters():
            p.grad = getattr(p, "main_grad", None)
        optimizer.step()
        wrapped.zero_grad_buffer()

    return wrapped, step
