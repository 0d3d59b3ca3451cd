"""What a training script may do with a data-parallel module; each scenario runs alike under our class and torch's.

A scenario gets `wrap(module, **options)` and its rank, and returns what it saw: gradients, parameters, texts. On two
ranks a sum has one order, so both classes must see the same bits.
"""

import dataclasses
import itertools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from .torch_options import takes

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
            "list": [used, [ignored, None]],
            "dict": {"used": used, "more": {"ignored": ignored}},
            "namedtuple": Pair(used, [ignored]),
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
        used = output["used"] if structure == "dict" else getattr(output, "used", None)
        return (output[0] if used is None else used).square().mean()

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


class Checkpointed(nn.Module):
    """Runs its layers under activation checkpointing, as often as told, perhaps with weights in common."""

    def __init__(self, *, reentrant: bool, times: int, shared: bool, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.times = reentrant, times
        self.first, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        if shared:
            self.b.weight = self.a.weight
        if unused:
            self.forgotten = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            for layer in (self.a, self.b):
                x = checkpoint(layer, x, use_reentrant=self.reentrant).relu()
        return x


def checkpoints(wrap: Wrap, rank: int, *, static: bool, find_unused: bool = False, **how: Any) -> list:
    ddp = wrap(Checkpointed(**how), static_graph=static, find_unused_parameters=find_unused)
    return train(ddp, rank)


def mixed(wrap: Wrap, rank: int, *, set_to_none: bool = True, **options: Any) -> list:
    """Parameters of two dtypes, frozen, tied, without elements, complex."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).double()
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.a.weight
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            x = self.frozen(self.tied(self.a(x)))
            x = self.b(x.double()) + self.empty.sum()
            return (x * self.complex).abs()

    return train(wrap(Mixed(), bucket_cap_mb=1e-4, **options), rank, set_to_none=set_to_none)


def channels_last(wrap: Wrap, rank: int, **options: Any) -> list:
    """Convolutions whose weights, and so their gradients, are not contiguous."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 2)).to(memory_format=torch.channels_last)
    return train(wrap(module, bucket_cap_mb=1e-3, **options), rank, shape=(2, 3, 8, 8))


def sparse(wrap: Wrap, rank: int, *, kind: str, empty_on: int | None = None, **options: Any) -> list:
    """Gradients of an embedding, on one rank perhaps without a single index."""
    torch.manual_seed(0)
    embedding = {"embedding": nn.Embedding, "bag": nn.EmbeddingBag}[kind](6, 3, sparse=True)
    module = nn.ModuleList([embedding, nn.Linear(3, 2)])
    bags = (torch.tensor([0]),) if kind == "bag" else ()
    module.forward = lambda indices: module[1](embedding(indices, *bags)).square().sum() + 0 * module[1].bias.sum()
    ddp = wrap(module, **options)
    seen = []
    for step in range(3):
        ddp.zero_grad()
        count = 0 if rank == empty_on else 2 + rank + step
        indices = torch.arange(count) % 6
        ddp(indices).backward()
        seen.append([g.to_dense() for g in gradients(ddp)])
    return seen


def several_backwards(wrap: Wrap, rank: int, **options: Any) -> list:
    """Two backward passes after one forward pass: only the first is averaged."""
    ddp = wrap(linears(4, 4, 2), **options)
    seen = []
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(batch(rank, 3, 4, step=step)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        seen.append(gradients(ddp))
    return seen


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


def no_gradient_outputs(wrap: Wrap, rank: int, **options: Any) -> list:
    """Some outputs, or all of a pass, need no gradient."""
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    inner = module.forward
    module.forward = lambda x: (inner(x), inner(x).detach(), x)
    ddp = wrap(module, **options)
    seen = []
    for step in range(3):
        with torch.no_grad():
            ddp(batch(rank, 3, 4))
        ddp.eval()(batch(rank, 3, 4))
        ddp.train().zero_grad()
        output = ddp(batch(rank, 3, 4, step=step))
        output[0].square().mean().backward()
        seen += [gradients(ddp), [part.requires_grad for part in output]]
    return seen


def functional(wrap: Wrap, rank: int) -> list:
    """Called with other parameters: then those get the gradients, and nothing is averaged."""
    ddp = wrap(linears(4, 2))
    others = {f"module.{name}": torch.ones_like(p).requires_grad_() for name, p in ddp.module.named_parameters()}
    torch.func.functional_call(ddp, others, batch(rank, 3, 4)).sum().backward()
    return [*(p.grad for p in others.values()), *train(ddp, rank)]


def autocast(wrap: Wrap, rank: int) -> list:
    ddp = wrap(linears(4, 4, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch(rank, 3, 4, step=step)).square().mean()
        scaler.scale(loss).backward()
        seen.append(gradients(ddp))
        scaler.step(optimizer)
        scaler.update()
    return [*seen, [p.detach().clone() for p in ddp.parameters()]]


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


def buffer_hook(wrap: Wrap, rank: int, *, after: bool, futures: bool) -> list:
    """A user's hook adds up buffers over the ranks."""
    ddp = wrap(nn.Sequential(*linears(4, 4), nn.BatchNorm1d(4)))

    def hook(state: Any, named: dict[str, Tensor]) -> Any:
        state.append(sorted(named))
        works = [torch.distributed.all_reduce(named["1.running_mean"], async_op=True).get_future()]
        return works if futures else torch.futures.wait_all(works) and None

    calls: list = []
    location = _BufferCommHookLocation.POST_FORWARD if after else _BufferCommHookLocation.PRE_FORWARD
    ddp._register_buffer_comm_hook(calls, hook, location)
    seen = []
    for step in range(3):
        ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
        seen.append([buffer.clone() for buffer in ddp.buffers()])
    return [*seen, calls]


def user_hooks(wrap: Wrap, rank: int, **options: Any) -> list:
    """Hooks on gradients that a script registers run before the averaging."""

    def clamp(parameter: Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    ddp = wrap(linears(4, 200, 100), **options)
    for parameter in ddp.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
        parameter.register_post_accumulate_grad_hook(clamp)
    return train(ddp, rank)


def uneven(wrap: Wrap, rank: int, *, divide: bool, first: int = 2, hooked: bool = False, **options: Any) -> list:
    """Rank 0 runs out of inputs first; perhaps a hook of the user's adds up the buffers."""
    ddp = wrap(nn.Sequential(*linears(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), bucket_cap_mb=1e-4, **options)

    def hook(_state: Any, named: dict[str, Tensor]) -> None:
        for buffer in named.values():
            torch.distributed.all_reduce(buffer)

    if hooked:
        ddp._register_buffer_comm_hook(None, hook, _BufferCommHookLocation.PRE_FORWARD)
    with ddp.join(divide_by_initial_world_size=divide):
        seen = train(ddp, rank, steps=5 if rank else first)
    return [*seen, [p.detach().clone() for p in ddp.parameters()], list(ddp.buffers())]


CUSTOM_OUTPUTS = [
    *("list subclass", "tuple subclass", "namedtuple subclass", "return type"),
    *("dict that cannot be copied", "twice the same"),
]
BOTH_ZEROS = [{"set_to_none": True}, {"set_to_none": False}]
MODES: list[dict[str, Any]] = [
    mode for mode in ({}, {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}) if takes(mode)
]
CHECKPOINTS: list[dict[str, Any]] = [
    {"static": False, "reentrant": False, "times": 1, "shared": False, "unused": False},
    {"static": False, "reentrant": True, "times": 1, "shared": False, "unused": False},
    {"static": False, "reentrant": False, "times": 2, "shared": True, "unused": False},
    {"static": False, "reentrant": False, "times": 1, "shared": False, "unused": True, "find_unused": True},
    *(
        {"static": True, "reentrant": reentrant, "times": times, "shared": shared, "unused": unused}
        for reentrant in (False, True)
        for times, shared, unused in ((1, False, True), (2, False, False), (1, True, False), (2, True, True))
    ),
]


def _cases(scenario: Callable[..., list], *argument_sets: dict[str, Any], modes: bool = False) -> dict[str, Callable]:
    found = {}
    for mode in MODES if modes else [{}]:
        for arguments in argument_sets or ({},):
            every = arguments | mode
            if not takes(every):
                continue
            words = ", ".join(f"{key}={value}" for key, value in every.items())
            found[f"{scenario.__name__}({words})"] = partial(scenario, **every)
    return found


CASES: dict[str, Callable[..., list]] = {
    **_cases(mixed, *BOTH_ZEROS, modes=True),
    **_cases(channels_last, modes=True),
    **_cases(sparse, *({"kind": kind, "empty_on": rank} for kind in ("embedding", "bag") for rank in (None, 0, 1))),
    **_cases(sparse, {"kind": "embedding"}, modes=True),
    **_cases(several_backwards, modes=True),
    **_cases(
        custom_outputs,
        *(
            {"structure": structure} | options
            for structure in CUSTOM_OUTPUTS
            for options in ({}, {"find_unused_parameters": True})
            if structure != "namedtuple subclass" or not options  # torch's class calls its constructor
        ),
    ),
    **_cases(cached_output, {}, {"find_unused_parameters": True}, {"static_graph": True}),
    **_cases(backward_in_parts, *({"between": between} for between in ("kept", "None", "zeros", "halved"))),
    **_cases(no_gradient_outputs, {}, {"find_unused_parameters": True}, {"static_graph": True}, modes=True),
    **_cases(functional),
    **_cases(autocast),
    # Futures of a hook before forward are a race with forward, in torch too.
    **_cases(buffer_hook, *({"after": after, "futures": futures} for after, futures in ((0, 0), (1, 0), (1, 1)))),
    **_cases(user_hooks, modes=True),
    **_cases(
        uneven,
        {"divide": True},
        {"divide": False},
        {"divide": False, "first": 0},
        {"divide": True, "hooked": True},
        {"divide": True, "find_unused_parameters": True},
    ),
    **_cases(checkpoints, *CHECKPOINTS),
    **_cases(output_unused_in_loss, *({"structure": name} for name in ("tuple", "list", "dict", "namedtuple"))),
}
