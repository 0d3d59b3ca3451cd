"""What the ranks of the tutorials do. Importable functions, because a process cannot find what a notebook defines."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import models
from reference.data_parallel import DistributedDataParallel, NaiveDataParallel
from reference.parameters import trainable_parameters
from reference.recorder import record
from reference.trace import Trace

BATCH, INPUTS, WIDTH = 16, 8, 16
STEPS = 20
CLIP = 0.1
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


# 1. Why average gradients?


def integer_model() -> nn.Module:
    """Two layers whose weights are small integers, in double precision: every sum of a gradient is exact."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0)
        parameter.data += torch.randint(-2, 3, parameter.shape, generator=generator)
    return model


def float_model() -> nn.Module:
    """The same layers with random weights in single precision: sums are rounded."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


MODELS = {"integers": integer_model, "floats": float_model}


def batch(step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks: small integers, other ones each step."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randint(-2, 3, (BATCH, INPUTS), generator=generator)
    return inputs.to(dtype), torch.randint(-2, 3, (BATCH, 1), generator=generator).to(dtype)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(model(inputs), targets)


def gradients_of_whole_batch(weights: str) -> list[Tensor]:
    """In one process."""
    model = MODELS[weights]()
    return _gradients(model, *batch(dtype=next(model.parameters()).dtype))


def gradients(rank: int, world_size: int, weights: str) -> list[Tensor]:
    """Of this rank's share of the batch, averaged over the ranks."""
    model = MODELS[weights]()
    inputs, targets = batch(dtype=next(model.parameters()).dtype)
    mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    return average(_gradients(model, inputs[mine], targets[mine]))


def average(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each of them, averaged over the ranks in place."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return list(tensors)


def train(rank: int, world_size: int, optimizer: str, averaged: str, every: int) -> list[Tensor]:
    """Parameters after `STEPS` steps in which ranks average their gradients, or every few steps their parameters."""
    model = float_model().double()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        stepper.zero_grad()
        loss_of(model, inputs[mine], targets[mine]).backward()
        if averaged == "gradients":
            average([_gradient(parameter) for parameter in model.parameters()])
        stepper.step()
        if averaged == "parameters" and (step + 1) % every == 0:
            average([parameter.data for parameter in model.parameters()])
    return [parameter.detach() for parameter in model.parameters()]


def start() -> list[Tensor]:
    """The parameters that `train` begins with."""
    return [parameter.detach() for parameter in float_model().double().parameters()]


def distance(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """The largest difference of any element."""
    return max((one - other).abs().max().item() for one, other in zip(some, others, strict=True))


def weighted_gradients(rank: int, _world_size: int, shares: Sequence[int], weights: Sequence[float]) -> list[Tensor]:
    """Each rank's gradient times its weight, added up; rank r has `shares[r]` of the inputs."""
    inputs, targets = batch()
    first = sum(shares[:rank])
    mine = _gradients(integer_model(), inputs[first : first + shares[rank]], targets[first : first + shares[rank]])
    for gradient in mine:
        gradient *= weights[rank]
        dist.all_reduce(gradient)
    return mine


def clipped(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Scaled so that their common norm is at most `CLIP`."""
    norm = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors])).item()
    return [tensor * min(1.0, CLIP / norm) for tensor in tensors]


def clipped_gradients(rank: int, world_size: int, when: str) -> list[Tensor]:
    """Clipped "before" they are averaged, or "after"."""
    model = float_model()
    inputs, targets = batch(dtype=torch.float32)
    mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    own = _gradients(model, inputs[mine], targets[mine])
    return average(clipped(own)) if when == "before" else clipped(average(own))


def _gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    loss_of(model, inputs, targets).backward()
    return [_gradient(parameter) for parameter in model.parameters()]


# 2. From naive to bucketed


def time_in_pieces(_rank: int, _world_size: int, total_bytes: int, piece_bytes: int, repeats: int) -> list[int]:
    """Nanoseconds until `total_bytes` have been added up in messages of `piece_bytes`, all issued at once."""
    pieces = torch.ones(total_bytes // 4).split(piece_bytes // 4)
    times_ns = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter_ns()
        works = [dist.all_reduce(piece, async_op=True) for piece in pieces]
        for work in works:
            work.wait()
        times_ns.append(time.perf_counter_ns() - start)
    return times_ns[1:]  # the first touched the memory


def iterate_naively(_rank: int, _world_size: int, model: str, iterations: int) -> tuple[int, list[int]]:
    """All-reduces an iteration, and nanoseconds of each iteration, with one all-reduce a parameter."""
    module, loss_fn = models.build(model)
    naive = NaiveDataParallel(module)
    sent = sum(parameter.requires_grad for parameter in module.parameters())
    return sent, _iterations_ns(naive, loss_fn, iterations, naive.average_gradients)


def iterate(_rank: int, _world_size: int, model: str, iterations: int, cap_mb: float) -> tuple[int, list[int]]:
    """The same with buckets of `cap_mb`; the first iterations, before the buckets are rebuilt, do not count."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    times_ns = _iterations_ns(ddp, loss_fn, iterations, lambda: None)
    return len(ddp.reducer.layout.buckets), times_ns


def _iterations_ns(module: nn.Module, loss_fn: models.Loss, count: int, finish: Callable[[], None]) -> list[int]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    times_ns = []
    for _ in range(count + 2):
        dist.barrier()
        start = time.perf_counter_ns()
        optimizer.zero_grad()
        loss_fn(module).backward()
        finish()
        optimizer.step()
        times_ns.append(time.perf_counter_ns() - start)
    return times_ns[2:]


# 3. Overlap and order


def record_alone(_rank: int, _world_size: int, model: str, iterations: int) -> Trace:
    """When each gradient is ready, without any communication."""
    module, loss_fn = models.build(model)
    with record(module, model=model) as recording:
        for _ in range(iterations):
            loss_fn(module).backward()
    return recording.trace


def record_plan(_rank: int, _world_size: int, model: str, plan: Sequence[Sequence[int]], iterations: int) -> Trace:
    """When each gradient and each bucket is ready, launched and done, under our reducer with these buckets."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, plan=plan)
    with record(ddp, model=model) as recording:
        for _ in range(iterations):
            loss_fn(ddp).backward()
    return recording.trace


class TwoBranches(nn.Module):
    """Two layers of one shape, of which each rank uses another one last: so their gradients come in another order."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(INPUTS, INPUTS, bias=False)
        self.right = nn.Linear(INPUTS, INPUTS, bias=False)
        self.order = ("left", "right") if rank == 0 else ("right", "left")

    def forward(self, inputs: Tensor) -> Tensor:
        """Both layers, in this rank's order."""
        for name in self.order:
            inputs = torch.tanh(self.get_submodule(name)(inputs))
        return inputs


Sent = tuple[list[str], list[Tensor], list[Tensor]]
"""Names in the order in which gradients came, a rank's own gradients, and what it holds after averaging."""


def send_at_once(rank: int, world_size: int) -> Sent:
    """Each gradient of `TwoBranches` is sent as soon as it comes."""
    model = TwoBranches(rank)
    own, came, works = _own_gradients(model), [], []

    def arrived(name: str, parameter: Tensor) -> None:
        came.append(name)
        works.append(dist.all_reduce(_gradient(parameter), async_op=True))

    _listen(model, arrived)
    _loss_of_branches(model).backward()
    for work in works:
        work.wait()
    return came, own, [_gradient(parameter) / world_size for parameter in model.parameters()]


def send_in_order(rank: int, _world_size: int) -> Sent:
    """Our reducer sends them, in one bucket each."""
    model = TwoBranches(rank)
    own, came = _own_gradients(model), []
    _listen(model, lambda name, _parameter: came.append(name))
    ddp = DistributedDataParallel(model, plan=[[name] for name, _ in reversed(list(model.named_parameters()))])
    _loss_of_branches(ddp).backward()
    return came, own, [_gradient(parameter) for parameter in model.parameters()]


def layouts(_rank: int, _world_size: int, model: str, cap_mb: float, iterations: int) -> list[list[list[str]]]:
    """Parameter names by bucket, in each iteration."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    names = list(trainable_parameters(module))
    seen = []
    for _ in range(iterations):
        loss_fn(ddp).backward()
        seen.append([[names[index] for index in bucket] for bucket in ddp.reducer.layout.indices])
    return seen


def done_ms(ready_ms: Sequence[float], *, per_bucket: int, all_reduce_ms: float) -> tuple[float, float]:
    """When the last bucket of equal parameters is done, in reverse order of registration and in that order."""
    ends = []
    for order in (ready_ms[::-1], ready_ms):
        end = 0.0
        for first in range(0, len(order), per_bucket):
            end = max(end, *order[first : first + per_bucket]) + all_reduce_ms
        ends.append(end)
    return ends[0], ends[1]


def _own_gradients(model: nn.Module) -> list[Tensor]:
    _loss_of_branches(model).backward()
    own = [_gradient(parameter).clone() for parameter in model.parameters()]
    model.zero_grad()
    return own


def _loss_of_branches(model: nn.Module) -> Tensor:
    loss: Tensor = model(batch()[0].float()).square().mean()
    return loss


def _listen(model: nn.Module, arrived: Callable[[str, Tensor], None]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(arrived, name))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
