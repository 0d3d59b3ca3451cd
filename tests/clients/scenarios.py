"""Small training runs of real clients. Each returns the tensors that it ends with, on each of two Gloo ranks.

A scenario gets `wrap`, the class under test; trainers that wrap models themselves read it under torch's name.
"""

import inspect
import io
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import accelerate
import ignite.distributed
import ignite.engine
import lightning
import lightning.fabric
import lightning.pytorch.callbacks as callbacks
import peft
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, Dataset

Tensors = list[Tensor]
SCENARIOS: dict[str, Callable[..., Tensors]] = {}
"""Scenarios by name: `scenario(wrap)` returns the final tensors."""
BY_HAND: list[str] = []
"""Names of those that wrap their model themselves."""


def scenario(**cases: dict[str, Any]) -> Callable[[Callable[..., Tensors]], Callable[..., Tensors]]:
    """Register a function as a scenario under its name, or once for each case with the case's arguments."""

    def register(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
        by_hand = next(iter(inspect.signature(function).parameters)) == "wrap"
        for case, options in (cases or {"": {}}).items():
            name = f"{function.__name__}: {case}" if case else function.__name__
            SCENARIOS[name] = lambda wrap, options=options: function(wrap, **options)
            if by_hand:
                BY_HAND.append(name)
        return function

    return register


def crossed(*axes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cases with one choice of each axis; settings of one keyword add up. Empty choices have no part in the name."""
    cases = {}
    for choices in product(*(axis.items() for axis in axes)):
        merged: dict[str, Any] = {}
        for _, settings in choices:
            for keyword, value in settings.items():
                merged[keyword] = merged.get(keyword, {}) | value if isinstance(value, dict) else value
        cases[", ".join(name for name, settings in choices if settings) or "plain"] = merged
    return cases


WRAPPER: dict[str, dict[str, Any]] = {
    "": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    "no buffers": {"broadcast_buffers": False},
}
"""Options of the wrapper, by name."""


def without(*names: str) -> dict[str, dict[str, Any]]:
    """Options of the wrapper but these."""
    return {name: options for name, options in WRAPPER.items() if name not in names}


def wrapped(keyword: str) -> dict[str, dict[str, Any]]:
    """The options of the wrapper as the value of one keyword of a scenario."""
    return {name: {keyword: options} if options else {} for name, options in WRAPPER.items()}


class Net(nn.Module):
    """Layers with buffers, a shared layer, and one that is used only with `every`."""

    def __init__(self, *, every: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head, self.rest, self.every = nn.Linear(32, 4), nn.Linear(32, 4), every

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden) + (self.rest(hidden) if self.every else 0)


class Pairs(Dataset):
    """Inputs and classes, the same on all ranks; samplers give each rank its own."""

    def __init__(self, count: int = 32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randint(0, 4, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def batches(steps: int = 4, shape: tuple[int, ...] = (4, 8)) -> Iterator[Tensor]:
    for step in range(steps):
        yield torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def state(module: nn.Module) -> Tensors:
    """Parameters, buffers and gradients."""
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [tensor.detach().clone() for tensor in (*module.state_dict().values(), *grads)]


def train(ddp: nn.Module, inputs: Iterator[Tensor] | None = None, *, set_to_none: bool = True) -> Tensors:
    optimizer = torch.optim.SGD((p for p in ddp.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
    for x in inputs or batches():
        optimizer.zero_grad(set_to_none=set_to_none)
        out = ddp(x)
        (out if isinstance(out, Tensor) else out[0]).square().mean().backward()
        optimizer.step()
    return state(ddp)


# Lightning


class Lit(lightning.LightningModule):
    """A module of Lightning; `how` says how it optimises."""

    def __init__(self, how: str = "automatic", *, every: bool = True) -> None:
        super().__init__()
        self.net, self.how = Net(every=every), how
        self.automatic_optimization = how == "automatic"

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.toggle_optimizer(optimizer) if self.how == "gan" else None
            loss = self.loss(batch)
            self.manual_backward(loss)
            if self.how != "accumulate" or index % 2:
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer) if self.how == "gan" else None
        return None

    def validation_step(self, batch: Any, _index: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.how == "gan":
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net.body, self.net.head)], []
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Finetune(callbacks.BaseFinetuning):
    """Unfreezes the body after the first epoch, so after wrapping."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.body, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.body, optimizer, lr=0.01)


def trainer(strategy: dict[str, Any], **options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"max_epochs": 2, "enable_checkpointing": False, "default_root_dir": tempfile.mkdtemp()}
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(**strategy), **(quiet | defaults | options)
    )


HOW: dict[str, dict[str, Any]] = {
    "": {},
    "accumulation": {"options": {"accumulate_grad_batches": 3}},
    "clipping": {"options": {"gradient_clip_val": 0.5}},
    "bf16": {"options": {"precision": "bf16-mixed"}},
    "manual": {"how": "manual"},
    "manual accumulation": {"how": "accumulate"},
    "gan": {"how": "gan"},
    "a part of the module": {"every": False},
}


@scenario(
    **crossed(wrapped("strategy"), HOW),
    clipping_by_value={"options": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}},
    fp16_hook={"strategy": {"ddp_comm_hook": default_hooks.fp16_compress_hook}},
    anomaly={"options": {"detect_anomaly": True}},
    finetuning={"callback": Finetune},
)
def lightning_trainer(
    _wrap: Any,
    *,
    strategy: dict | None = None,
    options: dict | None = None,
    how: str = "automatic",
    every: bool = True,
    callback: Any = None,
) -> Tensors:
    lightning.seed_everything(dist.get_rank(), verbose=False)
    module = Lit(how, every=every)
    run = trainer(strategy or {}, callbacks=[callback()] if callback else [], **(options or {}))
    run.fit(module, DataLoader(Pairs(), 4), DataLoader(Pairs(8), 4))
    return state(module)


@scenario()
def lightning_weight_averaging(_wrap: Any) -> Tensors:
    lightning.seed_everything(0, verbose=False)
    module = Lit()
    trainer({}, callbacks=[callbacks.StochasticWeightAveraging(1e-2)], max_epochs=3).fit(
        module, DataLoader(Pairs(), 4)
    )
    return state(module)


@scenario()
def lightning_resume(_wrap: Any) -> Tensors:
    """Checkpoint keys are those of the module; another trainer goes on from them."""
    lightning.seed_everything(0, verbose=False)
    path = [tempfile.mkdtemp() + "/last.ckpt"]
    dist.broadcast_object_list(path)
    first = trainer({}, enable_checkpointing=True, max_epochs=1)
    first.fit(Lit(), DataLoader(Pairs(), 4))
    first.save_checkpoint(path[0])
    module = Lit()
    trainer({}, max_epochs=2).fit(module, DataLoader(Pairs(), 4), ckpt_path=path[0])
    keys = sorted(torch.load(path[0], weights_only=False)["state_dict"])
    return [*state(module), torch.tensor([ord(letter) for letter in "".join(keys)])]


@scenario(**crossed(wrapped("ddp"), {"": {}, "no_backward_sync": {"accumulate": True}, "clipping": {"clip": True}}))
def fabric(_wrap: Any, *, accumulate: bool = False, clip: bool = False, ddp: dict | None = None) -> Tensors:
    strategy = lightning.fabric.strategies.DDPStrategy(**(ddp or {}))
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number, x in enumerate(batches(6)):
        with fabric.no_backward_sync(model, enabled=accumulate and number % 2 == 0):
            fabric.backward(model(x).square().mean())
        if not accumulate or number % 2:
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [*state(net), torch.tensor(len(model.state_dict()))]


# accelerate and transformers


@scenario(
    **crossed(
        wrapped("ddp"),
        {
            "": {},
            "accumulation": {"accumulate": 3},
            "clipping": {"clip": True},
            "fp16 hook": {"comm_hook": accelerate.utils.DDPCommunicationHookType.FP16},
            "a part of the module": {"every": False},
        },
    ),
    passed={"passed": True},
)
def accelerate_loop(
    wrap: Any,
    *,
    accumulate: int = 1,
    clip: bool = False,
    comm_hook: Any = None,
    ddp: dict | None = None,
    every: bool = True,
    passed: bool = False,
) -> Tensors:
    arguments = dict(ddp or {}) | ({"comm_hook": comm_hook} if comm_hook else {})
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        kwargs_handlers=[accelerate.DistributedDataParallelKwargs(**arguments)],
    )
    net = Net(every=every)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(wrap(net) if passed else net, optimizer, DataLoader(Pairs(), 4))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.unwrap_model(model) is net
    assert not any(isinstance(part, torch.nn.parallel.DistributedDataParallel) for part in net.modules())
    return [*state(net), torch.tensor(len(accelerator.get_state_dict(model)))]


@scenario()
def accelerate_trigger_sync(_wrap: Any) -> Tensors:
    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for x in batches():
        with accelerator.no_sync(model):
            losses = [model(part).square().mean() for part in x.chunk(2)]
            accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
        optimizer.step()
        optimizer.zero_grad()
    return state(net)


class Tokens(Dataset):
    """Sequences for a language model."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def language_model(kind: str = "gpt2") -> nn.Module:
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        )
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


@scenario(
    **crossed(
        {"": {}, "llama": {"kind": "llama"}, "lora": {"lora": True}},
        {
            "": {},
            "accumulation": {"options": {"gradient_accumulation_steps": 2}},
            "checkpointing": {"options": {"gradient_checkpointing": True}},
            "bf16": {"options": {"bf16": True}},
        },
        {
            "": {},
            "static": {"options": {"ddp_static_graph": True}},
            "unused": {"options": {"ddp_find_unused_parameters": True}},
            "small buckets": {"options": {"ddp_bucket_cap_mb": 1}},
            "no buffers": {"options": {"ddp_broadcast_buffers": False}},
        },
    )
)
def trainer_of_transformers(
    _wrap: Any, *, kind: str = "gpt2", options: dict | None = None, lora: bool = False
) -> Tensors:
    model = language_model(kind)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **(options or {}),
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
    return state(model)


# Models, wrapped by hand


@scenario(
    **crossed(
        {
            "resnet": {"name": "resnet18"},
            "mobilenet": {"name": "mobilenet_v3_small"},
            "convnext of timm": {"name": "timm/convnext_atto"},
            "resnet of timm": {"name": "timm/resnet10t"},
        },
        wrapped("ddp"),
    )
)
def vision(wrap: Any, *, name: str, ddp: dict | None = None) -> Tensors:
    import timm
    import torchvision

    if name.startswith("timm/"):
        model = timm.create_model(name.removeprefix("timm/"), num_classes=4)
    else:
        model = torchvision.models.get_model(name, num_classes=4)
    return train(wrap(model, **(ddp or {})), batches(3, (2, 3, 32, 32)))


@scenario(**crossed({"module": {"compiled": "module"}, "wrapper": {"compiled": "wrapper"}}, WRAPPER))
def compiled(wrap: Any, *, compiled: str, **options: Any) -> Tensors:
    torch._dynamo.reset()
    net: Any = Net()
    ddp = wrap(torch.compile(net, backend="aot_eager") if compiled == "module" else net, **options)
    train(torch.compile(ddp, backend="aot_eager") if compiled == "wrapper" else ddp)
    return state(net)


@scenario(**crossed(WRAPPER))
def compiled_step(wrap: Any, **options: Any) -> Tensors:
    """Forward, loss and backward in one compiled function."""
    torch._dynamo.reset()
    ddp = wrap(Net(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> None:
        ddp(x).square().mean().backward()

    for number, x in enumerate(batches()):
        optimizer.zero_grad()
        step(x[: 2 + number % 2])
        optimizer.step()
    return state(ddp)


@scenario(**crossed(WRAPPER))
def cached_loss(wrap: Any, **options: Any) -> Tensors:
    """The contrastive loss of sentence-transformers that runs forward and backward again inside a backward hook."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**features, "sentence_embedding": self.net(features["input_ids"])}

    model = SentenceTransformer(modules=[Embedding()], device="cpu")
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    loss.model = ddp = wrap(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x in batches():
        optimizer.zero_grad()
        loss([{"input_ids": x}, {"input_ids": x.cos()}], torch.empty(0)).backward()
        optimizer.step()
    return state(model)


@scenario(**crossed(without("static", "static views")))
def wrapper_in_the_style_of_mmcv(wrap: Any, **options: Any) -> Tensors:
    """A subclass that does in `train_step` what forward does, by the private names of torch's class.

    With a static graph torch's class then averages nothing in the first iteration, and ours does.
    """

    class Wrapper(wrap):  # type: ignore[misc]
        def train_step(self, x: Tensor) -> Tensor:
            self.reducer.prepare_for_forward()
            self.reducer._rebuild_buckets()
            if self._check_sync_bufs_pre_fwd():
                self._sync_buffers()
            output: Tensor = self.module(x).square().mean()
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            if torch.is_grad_enabled() and self.require_backward_grad_sync:
                self.require_forward_param_sync = True
                self.reducer.prepare_for_backward([])
            else:
                self.require_forward_param_sync = False
            return output

    ddp = Wrapper(nn.Sequential(Net(), nn.BatchNorm1d(4)), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x in batches():
        optimizer.zero_grad()
        ddp.train_step(x).backward()
        optimizer.step()
    return state(ddp)


@scenario(**crossed(WRAPPER))
def zero_redundancy_optimizer(wrap: Any, **options: Any) -> Tensors:
    ddp = wrap(Net(), **options)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    for x in batches():
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    return state(ddp)


@scenario(**crossed(WRAPPER))
def uneven_inputs(wrap: Any, **options: Any) -> Tensors:
    ddp = wrap(Net(), **options)
    with ddp.join():
        return train(ddp, batches(3 + dist.get_rank()))[: len(ddp.state_dict())]


@scenario(**crossed(without("small buckets", "unused", "unused views")))
def powersgd(wrap: Any, **options: Any) -> Tensors:
    """Collectives of torch's hook may cross with those of other buckets or uses of parameters, under both classes."""
    ddp = wrap(Net(), **options)
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    return train(ddp)


@scenario(**crossed(WRAPPER))
def distributed_checkpoint(wrap: Any, **options: Any) -> Tensors:
    ddp = wrap(Net(), **options)
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp(next(batches())).sum().backward()
    optimizer.step()
    model, states = get_state_dict(ddp, optimizer)
    names = "".join([*model, *states["state"]])
    return [*model.values(), torch.tensor([ord(letter) for letter in names])]


@scenario(**crossed(WRAPPER))
def whole_wrapper_saved(wrap: Any, **options: Any) -> Tensors:
    file = io.BytesIO()
    torch.save(wrap(Net(), **options), file)
    return train(torch.load(io.BytesIO(file.getvalue()), weights_only=False))


# torchft, mmengine, ignite


@scenario()
def torchft_group(wrap: Any) -> Tensors:
    """A group of torchft's, of this rank alone, which torch has no record of: with two ranks torch's class raises."""
    import torchft.process_group

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = torchft.process_group.ProcessGroupGloo()
    group.configure(f"127.0.0.1:{store.port}/prefix", "0", 0, 1)
    return train(wrap(Net(), process_group=group))


@scenario()
def torchft_wrapper(_wrap: Any) -> Tensors:
    """The subclass of torchft, whose comm hook is a method `_comm_hook`; its manager averages over this rank."""
    from unittest.mock import create_autospec

    from torchft.ddp import DistributedDataParallel
    from torchft.manager import Manager, _ManagedWork

    manager = create_autospec(Manager)

    def allreduce(tensor: Tensor) -> Any:
        from torchft.work import _DummyWork

        work = _ManagedWork(manager, _DummyWork(tensor), tensor)
        manager.wrap_future.side_effect = lambda future, *_args, **_options: future
        return work

    manager.allreduce = allreduce
    return train(DistributedDataParallel(manager, Net()))


@scenario(**crossed(WRAPPER))
def mmengine_wrapper(_wrap: Any, **options: Any) -> Tensors:
    """A subclass that mmengine defines when it is imported, of the class that is in place then."""
    from mmengine.model import BaseModel, MMDistributedDataParallel
    from mmengine.optim import OptimWrapper

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: Tensor, mode: str = "loss") -> Any:
            return {"loss": self.net(inputs).square().mean()}

    ddp = MMDistributedDataParallel(Model(), **options)
    wrapper = OptimWrapper(torch.optim.SGD(ddp.parameters(), lr=0.1), accumulative_counts=2)
    for number, x in enumerate(batches()):
        wrapper.initialize_count_status(ddp, number, 4)
        ddp.train_step({"inputs": x}, wrapper)
    return state(ddp)


@scenario(**crossed(WRAPPER))
def ignite_trainer(_wrap: Any, **options: Any) -> Tensors:
    model = ignite.distributed.auto_model(Net(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ignite.engine.create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    step.run(DataLoader(Pairs(), 4), max_epochs=1)
    return state(model)
