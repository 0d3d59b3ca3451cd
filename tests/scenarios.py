"""What a training script may do with a data-parallel module; each scenario runs alike under our class and torch's.

A scenario gets `wrap(module, **options)` and its rank, and returns what it saw: gradients, parameters, texts. On two
ranks a sum has one order, so both classes must see the same bits.
"""

import dataclasses
import itertools
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import register_pytree_node

from ddplab.reference.data_parallel import DistributedDataParallel

from .torch_options import takes

CLASSES: dict[str, type[nn.Module]] = {"ours": DistributedDataParallel, "torch": TorchDDP}
Wrap = Callable[..., nn.Module]
Pair = namedtuple("Pair", ["used", "ignored"])


@dataclasses.dataclass
class Outputs:
    """What a module may return; torch's class finds the tensors in it, but passes none of them to its sink."""

    used: Tensor
    ignored: Tensor


class Labelled(list):
    """A list whose constructor takes something else than its elements."""

    def __init__(self, *parts: Any, label: str) -> None:
        super().__init__(parts)
        self.label = label


class LabelledTuple(tuple):
    """The same as a tuple."""

    label: str

    def __new__(cls, *parts: Any, label: str) -> "LabelledTuple":
        made = super().__new__(cls, parts)
        made.label = label
        return made


class Exact(Pair):
    """A named tuple with a constructor of its own."""

    def __new__(cls, both: tuple[Any, Any]) -> "Exact":
        return super().__new__(cls, *both)


class Single(OrderedDict):
    """A dict that cannot be copied: its constructor needs an argument."""

    def __init__(self, used: Any, ignored: Any) -> None:
        super().__init__(used=used, ignored=ignored)


class Box:
    """A class that torch's pytree has been told of."""

    def __init__(self, used: Any, ignored: Any) -> None:
        self.used, self.ignored = used, ignored


register_pytree_node(Box, lambda box: ([box.used, box.ignored], None), lambda parts, _: Box(*parts))


def on_both_classes(scenario: Callable[..., Any]) -> Callable[..., list]:
    """The rank body that runs a scenario, `scenario(wrap, rank, ...)`, under our class and then under torch's."""

    @wraps(scenario)
    def body(rank: int, _world_size: int, *arguments: Any, **options: Any) -> list:
        return [scenario(wrap, rank, *arguments, **options) for wrap in CLASSES.values()]

    return body


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def batch(rank: int, *shape: int, step: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def linears(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def mlp(widths: tuple[int, ...], dtype: torch.dtype, seed: int) -> nn.Module:
    """A smooth MLP with real-valued weights."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers).to(dtype)


def mlp_batch(widths: tuple[int, ...], dtype: torch.dtype, seed: int, samples: int) -> Tensor:
    return torch.randn(samples, widths[0], dtype=dtype, generator=torch.Generator().manual_seed(seed + 1))


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


def assert_same_pairs(results: Sequence[tuple[object, object]]) -> None:
    """Assert that both results of each rank are equal bit for bit."""
    for got, expected in results:
        assert_same(got, expected)


def trained(ddp: nn.Module, rank: int, steps: int = 3, shape: tuple[int, ...] = (3, 4)) -> list[list[Tensor | None]]:
    """Gradients of each step, without an optimiser."""
    dtype, seen = next(ddp.parameters()).dtype, []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, *shape, step=step).to(dtype)).square().mean().backward()
        seen.append(gradients(ddp))
    return seen


def train(
    ddp: nn.Module,
    rank: int,
    *,
    steps: int = 4,
    loss: Callable[[Any], Tensor] = lambda output: output.square().mean(),
    shape: tuple[int, ...] = (3, 4),
    set_to_none: bool = True,
) -> list:
    """Gradients of each step and the parameters at the end."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(ddp(batch(rank, *shape, step=step))).backward()
        seen.append(gradients(ddp))
        optimizer.step()
    return [*seen, [p.detach().clone() for p in ddp.parameters()]]


class Branches(nn.Module):
    """Uses layer a, b or both, as told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, which: str) -> Tensor:
        h = self.first(x)
        return sum(getattr(self, name)(h) for name in which)


class Nested(nn.Module):
    """Returns two outputs in a structure; the second will take no part in the loss."""

    def __init__(self, structure: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.structure = structure
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        used, ignored = self.a(x), self.b(x)
        return {
            "tuple": (used, (ignored, 3)),
            "dataclass": Outputs(used, ignored),
            "list subclass": Labelled(used, ignored, label="a"),
            "tuple subclass": LabelledTuple(used, ignored, label="a"),
            "namedtuple subclass": Exact((used, ignored)),
            "return type": torch.return_types.max((used, ignored)),
            "dict that cannot be copied": Single(used, ignored),
            "twice the same": [used, used, ignored],
            "registered node": Box(used, ignored),
        }[self.structure]


def output_unused_in_loss(wrap: Wrap, rank: int, *, structure: str, **options: Any) -> list:
    ddp = wrap(Nested(structure), **(options or {"find_unused_parameters": True}))

    def loss(output: Any) -> Tensor:
        return (output[0] if isinstance(output, tuple | list) else output.used).square().mean()

    return [type(ddp(batch(rank, 3, 4))).__name__, *train(ddp, rank, loss=loss)]


def custom_outputs(wrap: Wrap, rank: int, *, structure: str, **options: Any) -> list:
    """Outputs in a class with a constructor of its own, or one that permits no copies."""
    ddp = wrap(Nested(structure), **options)

    def loss(output: Any) -> Tensor:
        parts = list(output.values() if isinstance(output, dict) else output)
        return sum(part.square().mean() for part in parts)

    output = ddp(batch(rank, 3, 4))
    return [type(output).__name__, len(output), getattr(output, "label", None), *train(ddp, rank, loss=loss)]


def cached_output(wrap: Wrap, rank: int, **options: Any) -> list:
    """A module that returns one tensor again and again, as often as it is called; and how many hooks that has."""
    module = linears(4, 2)
    inner, cache = module.forward, []

    def forward(x: Tensor, *, fresh: bool) -> Tensor:
        if fresh:
            cache[:] = [inner(x)]
        return cache[0]

    module.forward = forward
    ddp = wrap(module, **options)
    seen = []
    for step in range(2):
        for fresh in (True, False, False, False):
            output = ddp(batch(rank, 3, 4, step=step), fresh=fresh)
        assert len(cache[0]._backward_hooks or ()) <= 1
        ddp.zero_grad()
        output.square().mean().backward()
        seen.append(gradients(ddp))
    return seen


def complex_weights(wrap: Wrap, rank: int, **options: Any) -> list:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.real, self.complex = nn.Linear(4, 4), nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.real(x) * self.complex).abs()

    return train(wrap(Complex(), **options), rank)


def backward_in_parts(wrap: Wrap, rank: int, *, between: str, **options: Any) -> list:
    """Two losses with a backward pass each, which only together reach all parameters.

    What the script does to the gradients in between comes too late for the averages.
    """
    ddp = wrap(Nested("tuple"), **options)
    seen = []
    for step in range(3):
        ddp.zero_grad()
        used, (other, _) = ddp(batch(rank, 3, 4, step=step))
        used.square().mean().backward(retain_graph=True)
        if between == "halved":
            ddp.module.a.weight.grad.mul_(0.5)
        elif between != "kept":
            ddp.zero_grad(set_to_none=between == "None")
        other.square().mean().backward()
        seen.append(gradients(ddp))
    return seen


ODD_BUFFERS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda base: base.view(4, 6).t(),
    "every other column": lambda base: base.view(4, 6)[:, ::2],
    "channels last": lambda base: base.view(1, 4, 3, 2).permute(0, 3, 1, 2),
    "overlapping": lambda base: base.as_strided((5, 3), (2, 1)),
    "negative": lambda base: torch.conj(torch.view_as_complex(base.view(12, 2))).imag,
    "without elements": lambda base: base[:0],
    "expanded": lambda base: base[:4].view(4, 1).expand(4, 3),
    "a number, expanded": lambda base: base[:1].expand(5),
    "conjugate": lambda base: torch.conj(torch.view_as_complex(base.view(12, 2))),
}
"""Views of 24 numbers. Torch's class refuses to broadcast the expanded ones, and does not change conjugate ones."""


CUSTOM_OUTPUTS = [
    *("list subclass", "tuple subclass", "namedtuple subclass", "return type"),
    *("dict that cannot be copied", "twice the same"),
]
MODES: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}]


def _cases(scenario: Callable[..., list], *argument_sets: dict[str, Any]) -> dict[str, Callable]:
    found = {}
    for arguments in filter(takes, argument_sets):
        words = ", ".join(f"{key}={value}" for key, value in arguments.items())
        found[f"{scenario.__name__}({words})"] = partial(scenario, **arguments)
    return found


CASES: dict[str, Callable[..., list]] = {
    **_cases(complex_weights, *MODES),
    **_cases(cached_output, {}, {"find_unused_parameters": True}, {"static_graph": True}),
    **_cases(backward_in_parts, *({"between": between} for between in ("kept", "None", "zeros", "halved"))),
}
