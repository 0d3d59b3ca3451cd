"""Real models: small ones with real-valued weights, whose gradients equal the average up to its rounding.

Then number formats: NaN and infinity, averages in half precision, and mixed precision.
A body that compares, such as `trains`, returns what is wrong, and an empty text if nothing is.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..reference.launch import rank_device
from .check_runner import Bench
from .class_under_test import NotSupportedError, Subject
from .local_training import describe_difference, same
from .training_programs import halve_learning_rate, whole


class Assembled(nn.Module):
    """Modules and parameters by name; forward is `compute(self, ...)`."""

    def __init__(self, compute: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the function computes."""
        return self.compute(self, *inputs, **named)


def _precisions(*dtypes: torch.dtype) -> nn.Module:
    layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes)
    return Assembled(
        lambda own, x: reduce(lambda y, one: y + one(y.to(one.weight.dtype)).tanh(), own.layers, x), layers=layers
    )


def _recurrent() -> nn.Module:
    """Build a model of which a cap of 200 bytes makes two buckets at construction, and three in ready order."""
    lstm, head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)
    return Assembled(lambda own, x: own.head(own.lstm(x.reshape(-1, 2, 3))[0]), lstm=lstm, head=head)


def _complex() -> nn.Module:
    """Build a model with complex weights, whose gradients are complex too."""
    first, second = nn.Linear(6, 4, dtype=torch.complex64), nn.Linear(4, 2, dtype=torch.complex64)
    return Assembled(lambda own, x: own.second(own.first(x + 0j).sin()).abs(), first=first, second=second)


def _lazy() -> nn.Module:
    """Build a model of which autograd leaves one gradient as a conjugate view, and one as a negative view."""
    parts = {"weight": nn.Parameter(torch.randn(6, dtype=torch.complex64)), "scale": nn.Parameter(torch.ones(()))}
    return Assembled(lambda own, x: (x * own.weight.conj() * torch.complex(x.sum(), own.scale).conj()).abs(), **parts)


def overlapping() -> nn.Module:
    """Build a model of parameters that share memory, two of them all of theirs, and have gradients of their own."""
    flat = torch.randn(9)
    first, second, third = (nn.Parameter(flat[start : start + 6]) for start in (0, 3, 0))
    parts = {"first": first, "second": second, "third": third}
    return Assembled(lambda own, x: x @ own.first.tanh() + (x * own.second).sum(dim=1) * own.third.sum(), **parts)


def _bag() -> nn.Module:
    bag, head = nn.EmbeddingBag(7, 4, sparse=True), nn.Linear(4, 2)
    return Assembled(lambda own, x: own.head(own.bag(words(x))), bag=bag, head=head)


def language_model(*, sparse: bool = False) -> nn.Module:
    """Build an embedding whose weights also compute the output, as in language models; not if it is sparse."""
    embedding, inner, head = nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
    if not sparse:
        head.weight = embedding.weight
    parts = {"embedding": embedding, "inner": inner, "head": head}
    return Assembled(lambda own, x: own.head(own.inner(own.embedding(words(x))).tanh()), **parts)


def words(x: Tensor) -> Tensor:
    """Return words out of a vocabulary of seven."""
    return x.abs().mul(3).long() % 7


def mlp() -> nn.Module:
    """Build a multi-layer perceptron."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def _convolutions() -> nn.Module:
    first = nn.Conv2d(1, 3, 2, padding=1)
    norm = nn.GroupNorm(1, 3).requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Unflatten(1, (1, 3, 2)), first, norm, nn.ReLU(), nn.Conv2d(3, 2, 2))


Make = Callable[[], nn.Module]
FOUR = torch.float64, torch.float32, torch.bfloat16, torch.float16
REAL_MODELS: dict[str, Make] = {
    "multi-layer perceptron": mlp,
    "layers of four dtypes": partial(_precisions, *FOUR, torch.float64),
    "complex weights": _complex,
    "more weights than bfloat16 counts": partial(_precisions, *[torch.bfloat16] * 130),
    "convolutions and a frozen norm": _convolutions,
    "recurrent network": _recurrent,
    "language model with tied weights": language_model,
}
"""Models with real-valued weights that take inputs of shape [rows, 6]."""
RARE = ("layers of four dtypes", "complex weights", "more weights than bfloat16 counts")
"""Models that most sharding implementations do not support."""
NESTEROV: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, momentum=0.5, nesterov=True)}
LAZY: dict[str, Any] = {"make": _lazy, "what": "conjugate and negative views as gradients"}
"""Arguments of `trains`."""
SPARSE_MODELS: dict[str, Make] = {
    "sparse embedding": partial(language_model, sparse=True),
    "bag of sparse embeddings": _bag,
}
STEPS = 3
Pass = Callable[[nn.Module, int, int], Tensor | None]
"""Runs forward for a step and the batch of a rank; returns the loss, or None if it has run backward."""


def batch(step: int, rank: int) -> Tensor:
    """Return what a rank trains on in a step; shape [4, 6]."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(rank_device())


def build(make: Make, seed: int) -> nn.Module:
    """Build a model with random weights."""
    torch.manual_seed(seed)
    return make().to(rank_device())


def mean_square(module: nn.Module, step: int, rank: int) -> Tensor:
    """Return the mean square of a module's output; see `Pass`."""
    return module(batch(step, rank)).square().mean()  # type: ignore[no-any-return]


def of_uneven_rows(module: nn.Module, step: int, rank: int) -> Tensor:
    """Return a loss of more rows on later ranks, where sparse gradients then have more entries."""
    return module(batch(step, rank)[: rank + 1]).square().mean()  # type: ignore[no-any-return]


def _run_backward(run: Pass, module: nn.Module, step: int, rank: int) -> None:
    if (loss := run(module, step, rank)) is not None:
        loss.backward()


def local_gradients(twin: nn.Module, run: Pass, step: int, ranks: Sequence[int]) -> list[dict[str, Tensor | None]]:
    """Return the gradients that each of these ranks has alone."""
    found = []
    for rank in ranks:
        twin.zero_grad()
        _run_backward(run, twin, step, rank)
        gradients = {name: one.grad for name, one in twin.named_parameters()}
        found.append({name: None if one is None else one.to_dense() for name, one in gradients.items()})
    return found


def difference(
    module: nn.Module,
    local: Sequence[Mapping[str, Tensor | None]],
    divisor: float | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float = 0.0,
) -> str:
    """Say which gradient of a module is not the average of these of each rank; empty if all are.

    A gradient None counts as zero, and stays None if all ranks have None. The sum is divided by `divisor` (None: the
    number of ranks in `local`), and rounds in `dtype` (None: that of the gradients), or by more: by `tolerance`.
    """
    for name, parameter in module.named_parameters():
        parts = [of_rank[name] for of_rank in local]
        if all(part is None for part in parts):
            if parameter.grad is not None:
                return f"gradient of {name!r}: got a tensor, expected None, because no rank has one"
            continue
        if parameter.grad is None and (having := sum(part is not None for part in parts)) < len(parts):
            return f"gradient of {name!r}: got None, expected a tensor: {having} of {len(parts)} ranks have one"
        stacked = real(torch.stack([torch.zeros_like(parameter) if part is None else part for part in parts]))
        stacked *= len(parts) / (divisor or len(parts))
        rounded = dtype or next(part.dtype for part in parts if part is not None)
        if problem := outside(parameter.grad, stacked, rounded, tolerance):
            return f"gradient of {name!r}: {problem}"
    return ""


def real(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision; a complex one as pairs."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def outside(got: Tensor | None, parts: Tensor, dtype: torch.dtype, tolerance: float = 0.0) -> str:
    """Say how a gradient differs from the average of these parts by more than the average may round."""
    if got is None:
        return "got None, expected a tensor"
    got = real(got.to_dense())
    expected = parts.mean(dim=0)
    bound = (len(parts) + 2) * max(torch.finfo(dtype).eps, tolerance) * parts.abs().sum(dim=0)
    near = ((got - expected).abs() <= bound) | (got == expected) | (got.isnan() & expected.isnan())
    if bool(near.all()):
        return ""
    ratio = (got.flatten() @ expected.flatten() / expected.square().sum()).item()
    if (shown := f"{ratio:.4g}") != "1" and bool(((got - ratio * expected).abs() <= 10 * bound).all()):
        return f"{shown} times the expected value"
    return describe_difference(torch.where(near, expected, got), expected)


class Training:
    """A model that trains on this rank, beside a twin that computes what each rank would have alone.

    Only the average rounds: each of its additions and divisions by at most one unit of the sum of absolute values.
    `ranks` train together, and start from the first one's parameters; without any: all. Of an adapter, the parameters
    are compared after each step; `optimizer` makes its optimiser, and each of `rates`, which change, is a group's.
    """

    def __init__(self, subject: Subject, make: Make = mlp, ranks: Sequence[int] = (), **options: Any) -> None:
        self.subject, self.rank, self.rates = subject, dist.get_rank(), options.pop("rates", ())
        self.optimizer_class = options.pop("optimizer", partial(torch.optim.Adam, eps=1e-3))
        self.ranks = ranks or range(dist.get_world_size())
        first = self.ranks[0]
        self.module, self.twin = build(make, first if subject.is_adapter else self.rank), build(make, first)
        prepared = subject.prepare(self.module, self._make_optimizer, **{"bucket_cap_mb": 1e-4} | options)
        self.wrapped, self.optimizer, self.update = prepared

    def _make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        if self.subject.is_adapter:  # a small gradient may round, and must not decide the sign of an update
            parameters, rates = list(module.parameters()), self.rates or (0.1,)
            parts = [*([one] for one in parameters[: len(rates) - 1]), parameters[len(rates) - 1 :]]
            groups = [{"params": part, "lr": lr, "weight_decay": lr} for part, lr in zip(parts, rates, strict=True)]
            return self.optimizer_class(groups, lr=rates[0], weight_decay=0.1)  # type: ignore[no-any-return]
        return torch.optim.SGD(module.parameters(), lr=0.1)

    def backward(self, run: Pass, step: int) -> None:
        """Run forward and backward of a step, from gradients that are None (an adapter's: cleared after its step)."""
        if not self.subject.is_adapter:
            self.module.zero_grad()
        _run_backward(run, self.wrapped, step, self.rank)
        self.finish()

    def finish(self) -> None:
        """Call what must follow a backward pass."""
        self.subject.finish(self.wrapped, self.optimizer)

    def local(self, run: Pass, step: int, ranks: Sequence[int] | None = None) -> list[dict[str, Tensor | None]]:
        """Return the gradients that these ranks would have alone; None: all that train."""
        self.twin.load_state_dict(self.module.state_dict())
        return local_gradients(self.twin, run, step, self.ranks if ranks is None else ranks)

    def wrong(self, run: Pass, step: int, ranks: Sequence[int] | None = None, **how: Any) -> str:
        """Say which gradient is not the average over these ranks; empty if all are. `how`: see `difference`."""
        problem = difference(self.module, self.local(run, step, ranks), tolerance=self.subject.tolerance, **how)
        return problem and f"iteration {step}, rank {self.rank}: {problem}"

    def train(self, run: Pass = mean_square, steps: int = STEPS) -> str:
        """Train and compare after each backward pass or step; call on every rank. Returns what is wrong."""
        twins, problem = self._make_optimizer(self.twin), ""  # returned at the end, because the other ranks go on
        for step in range(steps):
            before = flat(self.module.parameters())
            self.backward(run, step)
            wrong = "" if self.subject.is_adapter else self.wrong(run, step)
            self.update()
            if self.subject.is_adapter:
                self.wrapped.zero_grad()
                wrong = self._step_twin(twins, run, step)
            elif same(before, flat(self.module.parameters())):
                wrong = wrong or f"iteration {step}, rank {self.rank}: the optimiser changed nothing"
            if self.rates:  # a script schedules the optimiser whose method the step is, or else the given one
                halve_learning_rate(twins, self.optimizer, getattr(self.update, "__self__", None))
            problem = problem or wrong
        if set(differing_ranks(self.module.parameters(), self.ranks[0])) & set(self.ranks):
            return problem or f"iteration {steps - 1}: parameters differ between the ranks"
        return problem

    def _step_twin(self, twins: torch.optim.Optimizer, run: Pass, step: int) -> str:
        """Train the twin with averages; say which parameter of the module is not the twin's."""
        local = local_gradients(self.twin, run, step, self.ranks)
        for name, parameter in self.twin.named_parameters():
            parts = [part for of_rank in local if (part := of_rank[name]) is not None]
            parameter.grad = torch.stack(parts).sum(dim=0) / len(local) if parts else None
        twins.step()
        problem = ""
        for name, want in self.twin.named_parameters():
            values, rounding = whole(self.module.get_parameter(name)), max(1e-5, 4 * torch.finfo(want.dtype).eps)
            if not same(values, want, rtol=rounding, atol=rounding):
                how = describe_difference(values, want.detach(), by_ratio=False)
                problem = problem or f"iteration {step}, rank {self.rank}: parameter {name!r}: {how}"
        return problem


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return all values of tensors in one of double precision; of sharded ones: call on every rank."""
    return torch.cat([real(whole(tensor)).flatten() for tensor in tensors])


def differing_ranks(tensors: Iterable[Tensor], like: int) -> list[int]:
    """Return the ranks on which these tensors are not those of the rank `like`; call on every rank."""
    digest = flat(tensors)
    every = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(every, digest)
    return [rank for rank, one in enumerate(every) if not same(one, every[like])]


def trains(
    _rank: int, _size: int, subject: Subject, run: Pass = mean_square, steps: int = STEPS, what: str = "", **how: Any
) -> str:
    """Train a model and compare each average; `what` names the case in the message, the others see `Training`."""
    problem = Training(subject, **how).train(run, steps)
    return f"{what}: {problem}" if what and problem else problem


def with_subclasses() -> nn.Module:
    """Build a perceptron whose weights are instances of a subclass of Tensor."""
    module = mlp()
    for layer in (part for part in module.modules() if isinstance(part, nn.Linear)):
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Subclass))
    return module


class Subclass(Tensor):
    """A tensor of a class of its own, as libraries make them."""


# Number formats

PRECISIONS = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float16))
"""Dtypes of computation and of all-reduces."""


def _wide_gradients() -> nn.Module:
    """Build a layer in bfloat16 with gradients in float32, beside another one."""

    def forward(own: Any, x: Tensor) -> Any:
        weight, bias = (_Widened.apply(one) for one in own.low.parameters())  # type: ignore[no-untyped-call]
        return own.head(nn.functional.linear(x, weight, bias).tanh())

    low = nn.Linear(6, 5, dtype=torch.bfloat16)
    for parameter in low.parameters():
        parameter.grad_dtype = torch.float32
    return Assembled(forward, low=low, head=nn.Linear(5, 3))


class _Widened(torch.autograd.Function):
    """Converts to float32, as `Tensor.float` does, and leaves the gradient as it is."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.float()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient


def _scaled_weights(dtype: torch.dtype, elements: int = 4) -> nn.Module:
    """Build three weights; the gradient of each is a factor that the caller gives."""

    def forward(own: Any, factors: Sequence[Tensor]) -> Tensor:
        scaled = [one * factor for one, factor in zip(own.weights, factors, strict=True)]
        return torch.stack([weight.sum(dtype=torch.float32) for weight in scaled]).sum()

    weights = nn.ParameterList(nn.Parameter(torch.ones(elements, dtype=dtype)) for _ in range(3))
    return Assembled(forward, weights=weights)


def compare_special_values(rank: int, world_size: int, subject: Subject) -> str:
    """Average gradients of which one is NaN and others are infinite, on one rank each; in bfloat16, large ones."""
    if subject.is_adapter:
        return _takes_or_skips(Training(subject))
    for dtype, usual in ((torch.float32, 1.0), (torch.bfloat16, 2.0**20)):
        others = torch.full((4,), usual)
        factors = [others.clone() for _ in range(world_size)]
        factors[0] = torch.tensor([float("nan"), float("inf"), usual, float("inf")])
        factors[-1] = torch.tensor([usual, usual, usual, float("-inf")])
        training = Training(subject, partial(_scaled_weights, dtype), bucket_cap_mb=1e-6)
        of_weights = [factors[rank], others, others]
        training.backward(lambda module, _step, _rank, of_weights=of_weights: module(of_weights), 0)  # type: ignore[misc]
        wanted = [torch.stack(factors).mean(dim=0), others, others]
        for index, (parameter, want) in enumerate(zip(training.module.parameters(), wanted, strict=True)):
            if not same(parameter.grad, want.to(dtype), rtol=8 * torch.finfo(dtype).eps):
                found = describe_difference(parameter.grad, want.to(dtype))
                return f"rank {rank}: gradient {index} in {dtype}: {found}"
    return ""


def _takes_or_skips(training: Training) -> str:
    """Step an adapter after NaN in one gradient of rank 0: all ranks update all parameters with it, or leave all."""

    def infinite_input(module: nn.Module, step: int, rank: int) -> Tensor:
        x = batch(step, rank)
        x[0, 0] /= rank  # rank 0's is infinite, where tanh is flat: only the first weight's gradient has NaN
        return module(x).square().mean()  # type: ignore[no-any-return]

    before = flat(training.module.parameters())
    problem = training.train(infinite_input, 1)
    if same(flat(training.module.parameters()), before):
        return ""  # a rank that has skipped the step alone differs from the others, which return that
    return problem and f"NaN in a gradient of rank 0, after which all ranks must step, or none of them: {problem}"


def compare_large_values(rank: int, world_size: int, subject: Subject) -> str:
    """Average half-precision gradients whose sum over the ranks overflows, while the average does not."""
    for cap_mb, elements in ((1e-6, 4), (25.0, 4), (25.0, 2**19)):
        factors = [torch.full((elements,), 40_000.0 - 64 * one, dtype=torch.float16) for one in range(world_size)]
        parts = torch.stack(factors).double()
        training = Training(subject, partial(_scaled_weights, torch.float16, elements), bucket_cap_mb=cap_mb)
        for step in range(2):
            training.backward(lambda module, _step, rank, factors=factors: module([factors[rank]] * 3), step)  # type: ignore[misc]
            for index, parameter in enumerate(training.module.parameters()):
                if problem := outside(parameter.grad, parts, torch.float16, subject.tolerance):
                    where = f"iteration {step}, rank {rank}: half-precision gradient {index} of {elements} elements"
                    return f"{where}, {factors[rank][0]:g} on this rank: {problem}"
    return ""


def in_mixed_precision(_rank: int, _world_size: int, subject: Subject, low: torch.dtype, reduce: torch.dtype) -> str:
    """Compute in one dtype and reduce in another; parameters and gradients keep theirs."""
    from torch.nn.parallel import distributed

    distributed.logger.setLevel(logging.ERROR)  # torch's class warns that it has received the configuration
    training = Training(subject, mixed_precision=distributed._MixedPrecision(param_dtype=low, reduce_dtype=reduce))
    training.twin.to(low)

    def run(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank).to(low)).square().mean()  # type: ignore[no-any-return]

    where = f"computes in {low}, reduces in {reduce}"
    for step in range(4):
        training.backward(run, step)
        with torch.no_grad():
            run(training.wrapped, step, training.rank)
        for name, parameter in training.module.named_parameters():
            if parameter.dtype != torch.float32 or parameter.grad is None or parameter.grad.dtype != torch.float32:
                return f"{where}, iteration {step} and evaluation: {name!r} or its gradient is no float32"
        if problem := training.wrong(run, step, dtype=reduce):
            return f"{where}, {problem}"
        training.optimizer.step()
    return ""


def _with_buffers() -> nn.Module:
    """Build a layer, which has a buffer too, beside buffers of dtypes that are rare in sums."""
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False))  # whose buffers are None
    module[0].register_buffer("count", torch.zeros(3, 2).t())
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex64):
        module.register_buffer(f"of_{str(dtype)[6:]}", torch.zeros(3, dtype=dtype))
    return module


def compare_buffers(rank: int, _world_size: int, subject: Subject) -> str:
    """Train with buffers of rare dtypes, one on rank 0 and zero or NaN elsewhere, later on one; another one grows.

    One iteration is in eval mode, the last follows an error in forward. Averages of models may share buffers' memory.
    """
    training, problem = Training(subject, _with_buffers), ""
    for step in range(STEPS + 1):
        training.wrapped.train(step != 1)
        at = {1: "in eval mode, ", STEPS: "after a forward pass that raised an error, "}.get(step, "")
        if step == STEPS:
            with suppress(TypeError):
                training.wrapped("no tensor")
        grown = torch.ones(step, 2, device=rank_device()) * (rank == 0)
        training.module.register_buffer("grows", grown if step > 1 else None)
        for buffer in training.module.buffers():
            if step == 0 or rank == step % 2:
                buffer.fill_(1 if rank == 0 else torch.nan if buffer.is_floating_point() else 0)
        before = {name: buffer.detach() for name, buffer in training.module.named_buffers()}
        training.backward(mean_square, step)
        for name, buffer in training.module.named_buffers():
            wrong = "" if buffer.is_set_to(before[name]) else "got new memory; expected values copied into its own"
            wrong = wrong if bool((buffer == 1).all()) else "is not that of rank 0"
            problem = problem or (wrong and f"{at}iteration {step}, rank {rank}: the buffer {name!r} {wrong}")
    return problem


def check_wide_gradients(bench: Bench) -> None:
    """Gradients in float32 of parameters in bfloat16 keep their digits; a class may refuse them with an error."""
    if refusal := bench.averages_or_refuses("type|float", trains, make=_wide_gradients):
        raise NotSupportedError(f"it refuses them: {refusal}")


def check_mixed_precision(bench: Bench) -> None:
    """Forward and backward in one dtype, all-reduces in another; a class may refuse with an error."""
    bench.needs("mixed_precision")
    for low, reduced in PRECISIONS:
        if refusal := bench.averages_or_refuses("precision|dtype|float", in_mixed_precision, low, reduced):
            raise NotSupportedError(f"it refuses it: {refusal}")
