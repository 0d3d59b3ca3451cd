"""Adapters `make(module, optimizer) -> (wrapped, step)` for conformance: one that is correct, and faulty ones."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Sharding:
    """Correct: each rank averages, updates its share of the parameters, and broadcasts them, as stage 1 of ZeRO."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.given, self.ranks = optimizer, dist.get_world_size()
        self.optimizer = self.make()

    def make(self) -> Optimizer | None:
        mine = self.parameters[dist.get_rank() :: self.ranks]
        return type(self.given)(mine, **self.given.defaults) if mine else None

    def average(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= self.ranks

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def sent(self) -> list[tuple[int, Tensor]]:
        return [(index % self.ranks, parameter.detach()) for index, parameter in enumerate(self.parameters)]

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.average(parameter.grad)
        self.update()
        for owner, parameter in self.sent():
            dist.broadcast(parameter, owner)


def adapter(sharding: type[Sharding]) -> Callable[[nn.Module, Optimizer], tuple[nn.Module, Any]]:
    def make(module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        return module, sharding(module, optimizer).step

    return make


class Sums(Sharding):
    def average(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)


class SendsAllButTheLast(Sharding):
    def sent(self) -> list[tuple[int, Tensor]]:
        return super().sent()[:-1]


class ForgetsItsState(Sharding):
    def update(self) -> None:
        self.optimizer = self.make()
        super().update()


class UpdatesWithItsOwn(Sharding):
    """The share of a rank gets the rank's own gradients."""

    def average(self, gradient: Tensor) -> None:
        super().average(gradient.clone())


class RefusesDoubles(Sharding):
    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        if len({parameter.dtype for parameter in self.parameters}) > 1:
            raise ValueError("expected one dtype")


class RefusesTies(Sharding):
    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
            raise ValueError("expected parameters that are not tied")


class RefusesAll(Sharding):
    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        if not isinstance(module, nn.Linear):
            raise ValueError("expected another type of module")


class RanksRoundDifferently(Sharding):
    """Each rank goes on with parameters of its own, which differ by less than any check of values sees."""

    def sent(self) -> list[tuple[int, Tensor]]:
        for parameter in self.parameters:
            parameter.detach().mul_(1 + 2e-7 * dist.get_rank())
        return []

    def make(self) -> Optimizer:
        return type(self.given)(self.parameters, **self.given.defaults)


class HangsForOtherOrders(Sharding):
    """Ranks whose gradients become ready in another order than the first rank's wait for ever."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        self.ready: list[int] = []
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _gradient, index=index: self.ready.append(index))

    def update(self) -> None:
        orders: list[list[int]] = [[]] * self.ranks
        dist.all_gather_object(orders, self.ready)
        if self.ready != orders[0]:
            dist.recv(self.parameters[0].detach(), 0)
        self.ready = []
        super().update()


hangs_for_other_orders, refuses_all, ranks_round_differently = map(
    adapter, (HangsForOtherOrders, RefusesAll, RanksRoundDifferently)
)
sharding, sums, sends_all_but_the_last = map(adapter, (Sharding, Sums, SendsAllButTheLast))
forgets_its_state, updates_with_its_own, refuses_doubles, refuses_ties = map(
    adapter, (ForgetsItsState, UpdatesWithItsOwn, RefusesDoubles, RefusesTies)
)


def sends_as_ready(module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
    """Each gradient is sent when it is ready: wrong for ranks whose orders differ."""
    sent: list[tuple[Tensor, Any]] = []

    def send(parameter: Tensor) -> None:
        assert parameter.grad is not None
        sent.append((parameter.grad, dist.all_reduce(parameter.grad, async_op=True)))

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(send)

    def step() -> None:
        while sent:
            gradient, work = sent.pop()
            work.wait()
            gradient /= dist.get_world_size()
        optimizer.step()

    return module, step
