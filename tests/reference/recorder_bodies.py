"""Bodies that tests run on real ranks; importable functions, because another process must find them."""

import copy
import itertools
import warnings
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ddplab.conformance.training_programs import Net, Program, loss_of
from reference.data_parallel import DistributedDataParallel
from reference.minimal import NaiveDataParallel
from reference.observer import Observer
from reference.recorder import record
from reference.trace import Trace

from . import scenarios
from .simulated_gpu import SimulatedGpu, SimulatedLayer

TorchDDP = nn.parallel.DistributedDataParallel
RECORD = ProfilerAction.RECORD
BATCH = 4  # per rank; a power of two, so that means over integers are exact

Gradients = list[list[Tensor]]
"""By iteration, by parameter."""


def mlp(widths: tuple[int, ...], dtype: torch.dtype, seed: int) -> nn.Module:
    """A smooth MLP with real-valued weights."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers).to(dtype)


def mlp_batch(widths: tuple[int, ...], dtype: torch.dtype, seed: int, samples: int) -> Tensor:
    return torch.randn(samples, widths[0], dtype=dtype, generator=torch.Generator().manual_seed(seed + 1))


def train_mlp(
    rank: int,
    world_size: int,
    wrapper: str,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
    cap_mb: float,
) -> Gradients:
    """Gradients of three iterations under "ours", "torch" or "naive"; no optimiser step in between."""
    module = mlp(widths, dtype, seed + rank)  # another seed on every rank: construction must make the ranks equal
    if wrapper == "naive":
        model: nn.Module = NaiveDataParallel(module)
    else:
        model = {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](module, bucket_cap_mb=cap_mb)
    batch = mlp_batch(widths, dtype, seed, world_size * BATCH).split(BATCH)[rank]
    gradients = []
    for _ in range(3):
        model.zero_grad()
        model(batch).square().mean().backward()
        if wrapper == "naive":
            model.average_gradients()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return gradients


def train_mlp_locally(widths: tuple[int, ...], dtype: torch.dtype, seed: int, world_size: int) -> list[Tensor]:
    """Gradients on the concatenated batch, from rank 0's start."""
    model = mlp(widths, dtype, seed)
    model(mlp_batch(widths, dtype, seed, world_size * BATCH)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def mlp_gradient_terms(widths: tuple[int, ...], dtype: torch.dtype, seed: int, world_size: int) -> list[Tensor]:
    """Upper bounds of the sums of the absolute terms that make up each gradient of `train_mlp_locally`, in float64.

    All weights, biases and inputs are replaced by their absolute values, and tanh, whose slope is at most 1, by the
    identity, so nothing cancels. Rounding errors are proportional to these sums, not to the gradients themselves.
    """
    model = nn.Sequential(*(layer for layer in mlp(widths, dtype, seed).double() if isinstance(layer, nn.Linear)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    outputs = model(mlp_batch(widths, dtype, seed, world_size * BATCH).double().abs())
    (2 * outputs.mean()).backward()  # the loss's slope is 2 y / n, and |y| is at most 1
    return [parameter.grad for parameter in model.parameters()]


class _Launches(Observer):
    def __init__(self) -> None:
        self.ready: list[int] = []
        self.launched: list[int] = []

    def bucket_ready(self, bucket: int) -> None:
        self.ready.append(bucket)

    def bucket_launched(self, bucket: int, future: torch.futures.Future) -> None:
        self.launched.append(bucket)


def watch_launches(rank: int, world_size: int, program: Program, plan: list[list[int]]) -> tuple[list, list]:
    """Order in which buckets became ready, and order in which they were launched."""
    ddp = DistributedDataParallel(Net(program, rank), plan=plan)
    ddp.reducer.observers.append(log := _Launches())
    loss_of(ddp, program, 0, rank, world_size).backward()
    return log.ready, log.launched


def watch_rebuild(rank: int, world_size: int, program: Program, cap_mb: float | None) -> list:
    """Bucket assignment during each step's backward pass."""
    ddp = DistributedDataParallel(Net(program, rank), bucket_cap_mb=cap_mb)
    layouts = []
    for number in range(len(program.steps)):
        loss = loss_of(ddp, program, number, rank, world_size)
        layouts.append(ddp.reducer.buckets.assignment)
        loss.backward()
    return layouts


def state_after_construction(rank: int, world_size: int, wrapper: str) -> dict[str, Tensor]:
    """State dict, after construction, of a module initialised differently on every rank."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(2, 2).double())
    return {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](module).state_dict()


def buffers_after_forward(rank: int, _world_size: int, wrapper: str) -> list[list[Tensor]]:
    """Running means of a batch norm, after each of four forward passes, the third under no_sync."""
    torch.manual_seed(0)
    ddp = {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](nn.BatchNorm1d(2))
    seen = []
    for number in range(4):
        with ddp.no_sync() if number == 2 else nullcontext():
            ddp(torch.full((4, 2), float(rank + number)) + torch.eye(4)[:, :2]).sum().backward()
        seen.append([buffer.clone() for buffer in ddp.module.buffers()])
    return seen


def train_channels_last(rank: int, world_size: int, wrapper: str) -> Gradients:
    """Gradients of a convolution whose weights are not contiguous, and their strides."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 2)).to(memory_format=torch.channels_last)
    ddp = {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](module, bucket_cap_mb=1e-3)
    gradients = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((2, 3, 8, 8), 1.0 + rank)).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in ddp.parameters()])
    return gradients


class HasExtraState(nn.Module):
    """Extra state and a non-persistent buffer, both of which a broadcast of the state dict would handle wrongly."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(rank)))
        self.register_buffer("passing", torch.full((2,), float(rank)), persistent=False)

    def get_extra_state(self) -> dict:
        return {"not": "a tensor"}

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + self.passing


def values_after_construction(rank: int, _world_size: int) -> list[float]:
    """First elements of the parameter and of the non-persistent buffer."""
    ddp = DistributedDataParallel(HasExtraState(rank + 1), forward_sync_buffers=False)
    return [ddp.module.weight[0].item(), ddp.module.passing[0].item()]


def gradients_after_a_stray_forward(rank: int, _world_size: int) -> list[float]:
    """A synchronised forward pass without backward, then one under no_sync: nothing is averaged."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ddp(torch.ones(1, 1))
    with ddp.no_sync():
        ddp(torch.full((1, 1), float(rank))).sum().backward()
    return ddp.module.weight.grad.flatten().tolist()


def save_trace_to_one_path(rank: int, world_size: int, path: str) -> None:
    """Save a trace to one path on every rank, as the README's example does."""
    trace, *_ = record_training(rank, world_size, "ours", 1)
    for _ in range(20):
        trace.save(path)


def record_oddly(rank: int, _world_size: int, oddity: str) -> Trace:
    """Recordings of unusual but legitimate training scripts."""
    torch.manual_seed(0)
    module = mlp((4, 4, 4), torch.float32, 0)
    group = dist.group.WORLD
    if oddity == "a backward pass beside the output":
        with record(module, process_group=group) as recording:
            module(torch.ones(1, 4)).sum().backward()
            sum(parameter.square().sum() for parameter in module.parameters()).backward()
    elif oddity == "a comm hook that sends something else":
        ddp = TorchDDP(module)
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        with record(ddp) as recording:
            for _ in range(4):
                ddp(torch.ones(1, 4)).sum().backward()
    elif oddity == "two at once":
        first, second = TorchDDP(module), TorchDDP(mlp((3, 3), torch.float32, 0))
        with record(first) as recording, record(second):
            for _ in range(2):
                first(torch.ones(1, 4)).sum().backward()
                second(torch.ones(1, 3)).sum().backward()
    elif oddity == "a forward pass without backward, then no_sync":
        ddp = DistributedDataParallel(module)
        with record(ddp) as recording:
            ddp(torch.ones(1, 4))
            with ddp.no_sync():
                ddp(torch.ones(1, 4)).sum().backward()
    elif oddity == "a bucket that is skipped":
        ddp = DistributedDataParallel(
            scenarios.Branches(),
            bucket_cap_mb=0,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
        )
        with record(ddp) as recording:
            for which in ("ab", "a", "b"):  # the buckets of b come first
                ddp(torch.ones(1, 4), which).sum().backward()
    elif oddity.endswith("that ignores a parameter"):
        module._ddp_params_and_buffers_to_ignore = ["0.weight"]
        ddp = {"our": DistributedDataParallel, "torch's": TorchDDP}[oddity.split()[0]](module)
        with record(ddp) as recording:
            for _ in range(3):
                ddp(torch.ones(1, 4)).sum().backward()
    return recording.trace


def outputs_of(rank: int, world_size: int) -> bool:
    """Whether forward returns the very object that the module returned."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, *, scale: float) -> dict:
            self.made = {"loss": (self.weight * scale).sum(), "extra": ["text", None]}
            return self.made

    ddp = DistributedDataParallel(Odd())
    return ddp(scale=2.0) is ddp.module.made


def survives_dropping_the_wrapper(rank: int, _world_size: int) -> bool:
    """A module outlives its DDP: it trains alone, and under a new DDP, without the old one's hooks."""
    module = nn.Linear(2, 1)
    ddp = DistributedDataParallel(module)
    del ddp
    module(torch.ones(1, 2) * rank).sum().backward()
    local = module.weight.grad.clone()
    module.zero_grad()
    DistributedDataParallel(module)(torch.ones(1, 2) * rank).sum().backward()
    return bool((local == rank).all())


def record_training(
    rank: int, world_size: int, wrapper: str, iterations: int, accumulate: int = 1
) -> tuple[Trace, Gradients, Gradients]:
    """A recording, the gradients with recording, and those without."""
    together = []
    for watched in (True, False):
        model = mlp((8, 16, 16, 4), torch.float32, 0)
        if wrapper != "module":
            model = {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](model, bucket_cap_mb=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = mlp_batch((8,), torch.float32, rank, BATCH)
        gradients = []
        group = dist.group.WORLD
        with record(model, model="mlp", batch=BATCH, process_group=group) if watched else nullcontext() as recording:
            for number in range(iterations):
                last = (number + 1) % accumulate == 0
                with nullcontext() if last else model.no_sync():
                    model(batch).square().mean().backward()
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    model(batch)  # an evaluation in between is not part of an iteration
        if watched:
            trace = recording.trace
        together.append(gradients)
    return trace, *together


def record_inside(rank: int, world_size: int, wrapper: str) -> list[str]:
    """Record the module inside a data-parallel one, by mistake; returns the warnings."""
    model = mlp((8, 16, 4), torch.float32, 0)
    wrapped = {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](model)
    with warnings.catch_warnings(record=True) as caught, record(model):
        warnings.simplefilter("always")
        for _ in range(2):
            wrapped(mlp_batch((8,), torch.float32, rank, BATCH)).square().mean().backward()
    return [str(one.message) for one in caught]


def profile_and_record(rank: int, world_size: int, wrapper: str, folder: str) -> Trace:
    """A recording of some iterations, which torch's profiler watches too and writes into the folder."""
    model = mlp((512, 1024, 1024, 64), torch.float32, 0)
    if wrapper == "torch":
        model = TorchDDP(model, bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = mlp_batch((512,), torch.float32, rank, 64)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # torch's class rebuilds its buckets
        step()
    with (
        record(model, process_group=dist.group.WORLD) as recording,
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=lambda _: RECORD) as profiler,
    ):
        for _ in range(4):
            step()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    return recording.trace


def profile_variant(rank: int, world_size: int, change: dict[str, int], folder: str) -> None:
    """Profile torch's class with an argument, with accumulation under no_sync, or with several passes in a step."""
    change = dict(change)
    accumulated, passes = change.pop("no_sync", 1), change.pop("passes", 1)
    model = TorchDDP(mlp((512, 1024, 64), torch.float32, 0), bucket_cap_mb=0.2, **change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = mlp_batch((512,), torch.float32, rank, 64)

    def step(number: int) -> None:
        last = (number + 1) % accumulated == 0
        for _ in range(passes):
            with nullcontext() if last else model.no_sync():
                model(batch).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    for number in range(3 * accumulated):  # torch's class rebuilds its buckets
        step(number)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=lambda _: RECORD) as profiler:
        for number in range(4 * accumulated):
            step(number)
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")


def run_scenario(rank: int, _world_size: int, case: str) -> tuple[list, list]:
    """Values that a scenario collects under our class and under torch's."""
    scenario = scenarios.CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scenario(DistributedDataParallel, rank), scenario(TorchDDP, rank)


def assert_same(got: object, expected: object) -> None:
    """Assert that nested values are equal bit for bit."""
    if isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, Tensor):
        assert isinstance(got, Tensor)
        assert got.stride() == expected.stride()
        assert torch.equal(got, expected), f"{got} is not {expected}"
    else:
        assert got == expected


def layouts_by_iteration(rank: int, _world_size: int, options: dict) -> tuple[list, list]:
    """Parameter indices by bucket in each iteration, and whether the buckets have been rebuilt."""
    both = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        ddp = wrapper(mlp((4, 4, 4, 4), torch.float32, 0), **options)
        index = {id(parameter): number for number, parameter in enumerate(ddp.module.parameters())}
        seen = []
        for _ in range(4):
            loss = ddp(torch.ones(1, 4)).sum()
            if wrapper is DistributedDataParallel:
                buckets = [list(indices) for indices in ddp.reducer.buckets.assignment]
            else:
                shadows = ddp.reducer._get_zeros_like_grad_buckets()
                buckets = [[index[id(parameter)] for parameter in bucket.parameters()] for bucket in shadows]
            loss.backward()
            seen.append((buckets, ddp._has_rebuilt_buckets))
        both.append(seen)
    return tuple(both)


def logging_data(rank: int, _world_size: int, options: dict) -> tuple[dict, dict]:
    both = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        ddp = wrapper(mlp((4, 4, 4), torch.float32, 0), **options)
        for _ in range(6):
            ddp(torch.ones(1, 4)).sum().backward()
        both.append(ddp._get_ddp_logging_data())
    return tuple(both)


def bytes_of_gradients_and_buckets(rank: int, _world_size: int) -> dict[str, int]:
    """Bytes of distinct storages that gradients and buckets occupy after three iterations."""
    found = {}
    for name, view, to_none in (
        ("copies", False, True),
        ("views", True, True),
        ("views, zeroed in place", True, False),
    ):
        ddp = DistributedDataParallel(mlp((4, 200, 200, 4), torch.float32, 0), gradient_as_bucket_view=view)
        for _ in range(3):
            ddp.zero_grad(set_to_none=to_none)
            ddp(torch.ones(2, 4)).sum().backward()
        tensors = [p.grad for p in ddp.parameters()] + [bucket.buffer for bucket in ddp.reducer.buckets]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[name] = sum(storages.values())
        found["parameters"] = sum(p.numel() * p.element_size() for p in ddp.parameters())
    return found


def exchange_state_with_torch(rank: int, _world_size: int) -> bool:
    ours = DistributedDataParallel(mlp((4, 4), torch.float32, rank))
    torchs = TorchDDP(mlp((4, 4), torch.float32, rank + 7))
    torchs.load_state_dict(ours.state_dict())
    there = all(map(torch.equal, ours.parameters(), torchs.parameters()))
    torchs.module[0].weight.data.add_(1)
    ours.load_state_dict(torchs.state_dict())
    return there and all(map(torch.equal, ours.parameters(), torchs.parameters()))


def buckets_sent_for_unused_parameters(rank: int, _world_size: int) -> tuple[int, int]:
    """Number of buckets sent when two of the parameters are unused, one bucket each: without and with skipping."""
    sent = []
    for skip in (False, True):
        ddp = DistributedDataParallel(
            scenarios.Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=skip, bucket_cap_mb=1e-6
        )
        for _ in range(2):
            ddp(torch.ones(1, 4), "a").sum().backward()
        sent.append(ddp.reducer.reduced_buckets)
        assert ddp.module.b.weight.grad is None
    return tuple(sent)


def construct_on_one_rank_only(rank: int, _world_size: int) -> list[float] | None:
    if rank == 0:
        return None
    module = nn.Linear(1, 1)
    for parameter in module.parameters():
        nn.init.constant_(parameter, float(rank))
    DistributedDataParallel(module, init_sync=False)
    return [parameter.item() for parameter in module.parameters()]


def train_with_unused_output(rank: int, _world_size: int, structure: str) -> list:
    return scenarios.output_unused_in_loss(DistributedDataParallel, rank, structure=structure)


def train_with_custom_outputs(rank: int, _world_size: int, structure: str) -> list:
    return [
        scenarios.custom_outputs(DistributedDataParallel, rank, structure=structure, **options)
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True})
    ]


class TwoWeights(nn.Module):
    """Returns a factor times one of its weights, so the factor is the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1) for _ in range(2))

    def forward(self, factor: float, index: int) -> Tensor:
        return self.weights[index] * factor


def drop_accumulated_gradients(rank: int, _world_size: int) -> list[str]:
    """Rank 1's second parameter is used under no_sync only, and its gradient is dropped."""
    ddp = DistributedDataParallel(TwoWeights(), find_unused_parameters=True)
    with ddp.no_sync():
        ddp(4.0 * (1 + rank), 1).backward()
    ddp.zero_grad()
    ddp(4.0 * (1 + rank), 0).backward()
    return ["None" if p.grad is None else f"{p.grad.item():.1f}" for p in ddp.parameters()]


def train_unevenly(rank: int, _world_size: int, options: dict, first: int) -> list:
    """Gradients of each step and the final parameters; under join, rank 0 has fewer inputs."""
    ddp = DistributedDataParallel(mlp((4, 4, 4), torch.float32, 0), bucket_cap_mb=1e-4, **options)
    with ddp.join():
        seen = scenarios.train(ddp, rank, steps=first if rank == 0 else 6)[:-1]
    return [*seen, [p.detach().clone() for p in ddp.parameters()]]


def second_derivatives(rank: int, _world_size: int) -> tuple[bool, bool]:
    """d/dw of (w x)^2 is 2 w x^2, averaged; its derivative by w is this rank's 2 x^2."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    ddp = DistributedDataParallel(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp(torch.tensor([[1.0 + rank]])).square().sum().backward(create_graph=True)
    gradient = module.weight.grad
    module.weight.grad = None
    (second,) = torch.autograd.grad(gradient.sum(), module.weight)
    return gradient.item() == (2 * 1 + 2 * 4) / 2, second.item() == 2 * (1 + rank) ** 2


def backward_after_the_next_forward(rank: int, _world_size: int) -> bool:
    """The graph saves a buffer, and the next forward pass overwrites that buffer with rank 0's."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * self.scale * x

    ddp = DistributedDataParallel(Scaled())
    first = ddp(torch.ones(1))
    second = ddp(torch.ones(1))
    (first + second).sum().backward()
    return ddp.module.weight.grad.item() == 2


def _on_gpu(wrapper: type[nn.Module], rank: int, options: dict, steps: int = 4) -> list:
    ddp = wrapper(
        mlp((64, 64, 300, 64), torch.float32, 0).cuda(),
        device_ids=[torch.cuda.current_device()],
        bucket_cap_mb=0.05,
        **options,
    )
    return scenarios.train(ddp, rank, steps=steps, shape=(8, 64))


def _to_cpu(value: object) -> object:
    if isinstance(value, list):
        return [_to_cpu(part) for part in value]
    return value.cpu() if isinstance(value, Tensor) else value


def train_on_gpu(rank: int, _world_size: int, options: dict) -> tuple[list, list]:
    return tuple(_to_cpu(_on_gpu(wrapper, rank, options)) for wrapper in (DistributedDataParallel, TorchDDP))


def count_kernels(rank: int, _world_size: int, options: dict) -> tuple[int, int]:
    """Kernels and copies that one iteration launches on the device, after the rebuild."""
    counts = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        ddp = wrapper(mlp((64,) * 9, torch.float32, 0).cuda(), device_ids=[torch.cuda.current_device()], **options)
        x = torch.ones(8, 64, device="cuda")
        for _ in range(3):
            ddp.zero_grad()
            ddp(x).sum().backward()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ddp.zero_grad()
            ddp(x).sum().backward()
            torch.cuda.synchronize()
        counts.append(len([event for event in profile.events() if event.device_type.name == "CUDA"]))
        assert counts[-1] > 0
    return tuple(counts)


def train_on_side_stream(rank: int, _world_size: int) -> tuple[list, list]:
    both = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            seen = _on_gpu(wrapper, rank, {})
        stream.synchronize()
        both.append(_to_cpu(seen))
    return tuple(both)


def train_sync_batch_norm(rank: int, _world_size: int) -> tuple[list, list]:
    both = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        module = nn.Sequential(*mlp((4, 4), torch.float32, 0), nn.BatchNorm1d(4))
        ddp = wrapper(
            nn.SyncBatchNorm.convert_sync_batchnorm(module).cuda(), device_ids=[torch.cuda.current_device()]
        )
        both.append(_to_cpu([*scenarios.train(ddp, rank), *ddp.buffers()]))
    return tuple(both)


def train_without_set_device(rank: int, _world_size: int) -> bool:
    """Whether a rank whose module is on its own GPU leaves GPU 0 to rank 0."""
    ddp = DistributedDataParallel(mlp((4, 4), torch.float32, 0).to(rank), device_ids=[rank])
    ddp(torch.ones(1, 4)).sum().backward()
    return rank == 0 or torch.cuda.memory_allocated(0) == 0


def inputs_on_cpu(rank: int, _world_size: int) -> bool:
    ddp = DistributedDataParallel(mlp((4, 4), torch.float32, 0).cuda(), device_ids=[torch.cuda.current_device()])
    return ddp(torch.ones(1, 4)).device.type == "cuda"


def names_missing(rank: int, _world_size: int) -> list[str]:
    ours, torchs = (wrapper(nn.Linear(1, 1)) for wrapper in (DistributedDataParallel, TorchDDP))
    return sorted(name for name in dir(torchs) if not name.startswith("__") and not hasattr(ours, name))


class Layers(nn.Module):
    """A user-defined module class, because torch.compile skips torch's own classes, such as Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def compiled_graphs(rank: int, _world_size: int) -> tuple[int, int]:
    """Number of graphs that torch.compile passes to its backend for a module of several buckets."""
    counts = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        ddp = torch.compile(wrapper(Layers(), bucket_cap_mb=1), backend=backend)
        ddp(torch.ones(2, 600)).sum().backward()
        counts.append(len(graphs))
    return tuple(counts)


def local_buffers(rank: int, _world_size: int) -> bool:
    module = nn.Linear(1, 1)
    module.register_buffer("own", torch.full((1 + rank,), float(rank)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(module, broadcast_buffers=False)
    ddp(torch.ones(1, 1)).sum().backward()
    return bool((module.own == rank).all())


def static_graph_over_two_epochs(rank: int, _world_size: int) -> bool:
    """Train two epochs under Join, the first without inputs on rank 0; whether the final model is finite."""
    ddp = DistributedDataParallel(mlp((4, 4, 4), torch.float32, 0), bucket_cap_mb=1e-4, static_graph=True)
    for first, last in ((0, 4), (3, 4)):
        with ddp.join():
            scenarios.train(ddp, rank, steps=last if rank else first)
    return bool(torch.isfinite(next(ddp.parameters())).all())


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


def train_compressed(rank: int, _world_size: int) -> float:
    """Largest relative difference between gradients averaged in bfloat16 and in float32."""
    gradients = []
    for hook in (None, default_hooks.bf16_compress_hook):
        ddp = DistributedDataParallel(mlp((4, 4), torch.float32, 0))
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        ddp(mlp_batch((4,), torch.float32, rank, 3)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
    exact, compressed = gradients
    return float((exact - compressed).abs().max() / exact.abs().max())


def compare_on_three_ranks(rank: int, _world_size: int) -> list[float]:
    """Largest relative difference to torch's gradients: plain, and as views zeroed in place."""
    differences = []
    for view in (False, True):
        both = []
        for wrapper in (DistributedDataParallel, TorchDDP):
            ddp = wrapper(mlp((8, 8, 8), torch.float32, 0), gradient_as_bucket_view=view)
            steps = scenarios.train(ddp, rank, shape=(3, 8), set_to_none=not view)
            both.append(torch.cat([tensor.flatten() for step in steps for tensor in step]))
        differences.append(float((both[0] - both[1]).abs().max() / both[1].abs().max()))
    return differences


def attributes_that_torch_lets_scripts_set(_rank: int, _world_size: int) -> dict[str, object]:
    """Set attributes of the wrapper after construction, and call methods that torch's class has."""
    ddp = DistributedDataParallel(scenarios.Branches())
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
        "is torch's": isinstance(ddp, TorchDDP),
    }


def _double_gradient(of: nn.Parameter, _ready: Tensor) -> None:
    of.grad.mul_(2)


def gradients_changed_by_a_later_hook(rank: int, _world_size: int) -> tuple[list[float], list[float]]:
    """Averages of the last layer's gradient, which a hook of the first layer doubles later; ours, then torch's."""
    sent = []
    for wrap in (DistributedDataParallel, TorchDDP):
        module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        ddp = wrap(module)
        first, last = module.parameters()
        first.register_post_accumulate_grad_hook(partial(_double_gradient, last))
        ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
        sent.append(last.grad.flatten().tolist())
    return tuple(sent)


class SharesGradients(nn.Module):
    """Adds an embedding and a vector: the values of the embedding's sparse gradient are the vector's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(12))
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        vector = self.vector.view(4, 3)  # so its gradient comes after the embedding's
        return self.embedding(rows) + vector


def sparse_gradients_in_shared_memory(rank: int, _world_size: int, options: dict) -> list[list[float]]:
    """Averages of 2 on rank 0 and 4 on rank 1 for the vector, by iteration; ours, then torch's."""
    averages = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(SharesGradients(), **options)
        averages.append([])
        for _ in range(3):
            ddp.zero_grad(set_to_none=True)
            (ddp(torch.arange(4)) * torch.full((4, 3), 2.0 * (rank + 1))).sum().backward()
            (found,) = set(ddp.module.vector.grad.tolist())
            assert set(ddp.module.embedding.weight.grad.to_dense().flatten().tolist()) == {3.0}
            averages[-1].append(found)
    return averages


class Returns(nn.Module):
    """Returns its output in a structure."""

    def __init__(self, structure: str) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.structure = structure

    def forward(self, x: Tensor) -> object:
        output = self.layer(x)
        return {
            "tensor": output,
            "dataclass": scenarios.Outputs(output, 0),
            "set": {output},
            "iterator": iter([output]),
        }[self.structure]


def static_graph_behind(rank: int, _world_size: int, structure: str, copied: bool) -> list[list[float]]:
    """Gradients of the weight by iteration, locally 1 and 2; ours, then torch's; perhaps of a deep copy at last."""
    seen = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(Returns(structure), static_graph=True)
        runs = []
        for number in range(6):
            if copied and number == 3:
                ddp = copy.deepcopy(ddp)
            ddp.zero_grad()
            output = ddp(torch.full((1, 1), 1.0 + rank))
            if structure == "dataclass":
                output = output.used
            elif structure != "tensor":
                (output,) = output
            output.sum().backward()
            runs.append(ddp.module.layer.weight.grad.item())
        seen.append(runs)
    return seen


def gradients_that_a_hook_sees(_rank: int, _world_size: int) -> list[tuple[bool, bool]]:
    """Whether `GradBucket.gradients` of a channels-last weight has its strides and is its gradient; ours, torch's."""
    seen = []
    for wrap in (DistributedDataParallel, TorchDDP):
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
        seen.append((given[0].stride() == weight.stride(), torch.equal(given[0], weight.grad)))
    return seen


def items_read_under_join(rank: int, _world_size: int) -> int:
    """How often a rank with inputs calls `Tensor.item` in a forward pass under Join."""
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    read, item = [], torch.Tensor.item
    with mock.patch.object(torch.Tensor, "item", lambda tensor: (read.append(1), item(tensor))[1]), ddp.join():
        for _ in range(3):
            before = len(read)
            output = ddp(torch.ones(1, 1))
            in_forward = len(read) - before
            output.sum().backward()
    return in_forward


class CopiesOut(Observer):
    """Runs the copies out of the buckets on a simulated GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def bucket_done(self, bucket: int) -> None:
        self._gpu.launch(20_000)


def record_on_simulated_gpu(rank: int, world_size: int, wrapper: str, layers_ns: list) -> tuple[Trace, int, int]:
    """A recording of layers on a simulated GPU, how often the host waited in training, and the number of events."""
    gpu = SimulatedGpu()
    model = torch.nn.Sequential(*(SimulatedLayer(gpu, *ns) for ns in layers_ns))
    model = {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](model, bucket_cap_mb=1e-5)
    with mock.patch("reference.recorder.clock_of", return_value=gpu.clock()), record(model) as recording:
        waits = gpu.synchronizations
        if wrapper == "ours":
            model.reducer.observers.append(CopiesOut(gpu))
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            gpu.spend(10**7)
        waits = gpu.synchronizations - waits
    return recording.trace, waits, gpu.events
