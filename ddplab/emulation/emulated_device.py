"""Emulated device: a module that takes recorded time instead of computing, with real gradients.

`EmulatedModel` has the parameters and buffers of a recorded workload. Its forward pass, each of its gradients and its
optimiser step take the time that they took in the recording, in contexts that the caller supplies. Everything else is
real: autograd runs a chain of nodes, one for each gradient, in ready order, and accumulates tensors of the recorded
shapes. So any reducer can wrap the module.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..reference.trace import Buffer, Parameter, Workload
from ..simulator.workload.compute_times import ComputeTimes

Activity = Literal["forward", "backward", "step"]

Computing = Callable[[int, Activity], AbstractContextManager[None]]
"""Makes a context that ends when the device has computed for so many ns; its code runs on the host meanwhile."""


class IterationTimes(NamedTuple):
    """How long each part of an iteration computes, in nanoseconds."""

    forward_ns: int  #: the forward pass
    gradients: tuple[tuple[int, int], ...]
    """Parameter indices in ready order, each with the time since the gradient before it or, the first one, since the
    end of the forward pass."""
    tail_ns: int  #: from the last gradient to the end of the backward pass
    step_ns: int  #: everything after the backward pass

    @classmethod
    def of_rank(cls, times: ComputeTimes, *, optimizes: bool = True) -> Self:
        """Make the times of one iteration of one rank, perhaps without the step of the optimiser.

        Gradients that are ready at the same time come in order of their indices.
        """
        ready_ns, unused = times.ready_ns.tolist(), times.unused.tolist()
        ready = sorted((moment, index) for index, moment in enumerate(ready_ns) if not unused[index])
        moments = [int(times.forward_ns), *(moment for moment, _ in ready)]
        gradients = tuple((index, moment - before) for (moment, index), before in zip(ready, moments, strict=False))
        step_ns = int(times.step_ns) - (0 if optimizes else int(times.optimizer_ns))
        return cls(moments[0], gradients, int(times.backward_end_ns) - moments[-1], step_ns)


class EmulatedOptimizer(torch.optim.SGD):
    """An optimiser whose step takes the time of everything after the model's backward pass, and changes nothing."""

    def __init__(self, parameters: Any, model: "EmulatedModel") -> None:
        super().__init__(parameters)
        self._model = model

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See the class."""
        self._model.step()


class EmulatedModel(nn.Module):
    """A module with the parameters and buffers of a recorded workload; all parameters are zero at first.

    It computes in contexts of `computing`; a batch touches the fraction `sparse_density` of a sparse gradient's rows.
    """

    def __init__(self, workload: Workload, computing: Computing, *, sparse_density: float = 1.0) -> None:
        super().__init__()
        self.computing = computing
        self.times: IterationTimes | None = None  #: of the next iteration; set it before the forward pass
        self.value = 1.0  #: every element of the next gradients
        #: Called at the end of each backward pass, before callbacks that a reducer queued.
        self.at_backward_end: Callable[[], None] | None = None
        tensors: list[Parameter | Buffer] = [*workload.parameters, *workload.buffers]
        names = [tensor.name for tensor in tensors]
        try:
            named = _submodules(tensors, names)
            taken = any(hasattr(self, name.partition(".")[0]) for name in names)
            registered = [name for name, _ in (*named.named_parameters(), *named.named_buffers())]
            if taken or registered != names:
                raise KeyError(names)
        except KeyError:  # for example a parameter "a" and another one "a.b"
            named = _submodules(tensors, [f"{number}.weight" for number in range(len(names))])
        self._modules |= named._modules
        self._parameters |= named._parameters
        self._buffers |= named._buffers
        paths = [name.split(".") for name, _ in self.named_parameters()]
        self._around = [[self.get_submodule(".".join(path[:end])) for end in range(1, len(path))] for path in paths]
        self._places = [([self, *around][-1], path[-1]) for around, path in zip(self._around, paths, strict=True)]
        self._rows = [one.touched_rows(sparse_density) if one.sparse else None for one in workload.parameters]

    def forward(self) -> Tensor:
        """Compute for the time of a forward pass; returns a loss whose backward pass takes recorded time."""
        times = self.times
        if times is None:
            raise RuntimeError("EmulatedModel: expected `times` to be set before the forward pass, got None")
        with self.computing(times.forward_ns, "forward"):
            token = torch.zeros(1, requires_grad=torch.is_grad_enabled())
            token = tail = _computed(token, self, times.tail_ns, None, None)
            calls = groupby(reversed(times.gradients), lambda gradient: self._hooked_module(gradient[0]))
            called: set[nn.Module] = set()
            for number, (module, gradients) in enumerate(calls):
                if module in called:
                    name = next(name for name, one in self.named_modules() if one is module)
                    raise RuntimeError(f"EmulatedModel: expected no other gradient between those of {name}")
                if module is not None:
                    called.add(module)
                layers = partial(self._layers, tuple(gradients))
                own = token if number or module is None else token.detach()  # a model's inputs need no gradient
                token = layers(own) if module is None else module(layers, own)
            first = token + tail  # the first node of the backward pass, which takes no time
            if first.requires_grad:
                first.register_hook(self._backward_starts)
            return first.sum()

    def _backward_starts(self, _gradient: Tensor) -> None:
        if self.at_backward_end is not None:
            torch.autograd.Variable._execution_engine.queue_callback(self.at_backward_end)

    def _layers(self, gradients: Sequence[tuple[int, int]], token: Tensor) -> Tensor:
        for index, gap_ns in gradients:
            token = _computed(token, self, gap_ns, index, self._parameter(index))
        return token

    def _hooked_module(self, index: int) -> nn.Module | None:
        """Return the outermost submodule around a parameter that a reducer has hooked, and that is called for it."""
        return next((module for module in self._around[index] if module._forward_pre_hooks), None)

    def _parameter(self, index: int) -> Tensor:
        """Return a parameter or, between FSDP2's hooks, the tensor in its place."""
        owner, name = self._places[index]
        return getattr(owner, name)  # type: ignore[no-any-return]

    def step(self) -> None:
        """Compute for the time of everything after the backward pass."""
        assert self.times is not None
        with self.computing(self.times.step_ns, "step"):
            pass

    def gradient(self, index: int) -> Tensor:
        """Make a gradient of a parameter: a new tensor, which autograd keeps without copying it."""
        parameter, rows = self._parameter(index), self._rows[index]
        if rows is None:
            return torch.full_like(parameter, self.value, requires_grad=False)
        values = torch.full((rows, *parameter.shape[1:]), self.value, dtype=parameter.dtype)
        return torch.sparse_coo_tensor(
            torch.arange(rows)[None], values, parameter.shape, is_coalesced=True, check_invariants=False
        )


class _Layer(torch.autograd.Function):
    """Computes the gradient of one parameter or, without one, what follows on the last gradient."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, model: EmulatedModel, duration_ns: int, index: int | None, _parameter: Tensor | None
    ) -> Tensor:
        ctx.model, ctx.duration_ns, ctx.index = model, duration_ns, index
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with ctx.model.computing(ctx.duration_ns, "backward"):
            gradient = None if ctx.index is None else ctx.model.gradient(ctx.index)
        return gradients[0], None, None, None, gradient


_computed: Callable[..., Tensor] = _Layer.apply


def _submodules(tensors: Sequence[Parameter | Buffer], names: Sequence[str]) -> nn.Module:
    """A module whose submodules hold the parameters, then the buffers, under these names.

    Raises KeyError if a name is that of a submodule and of a tensor, or not possible in a module.
    """
    root = nn.Module()
    for tensor, name in zip(tensors, names, strict=True):
        *path, attribute = name.split(".")
        sparse = isinstance(tensor, Parameter) and tensor.sparse
        owner = root
        for depth, part in enumerate(path):
            if part not in owner._modules:
                owner.add_module(part, _SparseEmbedding() if sparse and depth == len(path) - 1 else _Submodule())
            owner = owner.get_submodule(part)
        if sparse and not (attribute == "weight" and isinstance(owner, _SparseEmbedding)):
            raise KeyError(name)
        dtype = getattr(torch, tensor.dtype)
        if isinstance(tensor, Parameter):
            owner.register_parameter(attribute, nn.Parameter(torch.zeros(tensor.shape, dtype=dtype)))
        else:
            owner.register_buffer(attribute, torch.zeros(tensor.size_bytes // dtype.itemsize, dtype=dtype))
    return root


class _Submodule(nn.Module):
    """Computes what the model asks for, between the hooks of a reducer."""

    def forward(self, layers: Callable[[Tensor], Tensor], token: Tensor) -> Tensor:
        return layers(token)


class _SparseEmbedding(nn.Embedding):
    """A layer that reducers recognise as one with sparse gradients; its weight is registered afterwards."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.sparse = True
