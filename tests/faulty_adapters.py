"""Adapters `make(module, optimizer) -> (wrapped, step)` for conformance: one that is correct, and faulty ones."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Sharding:
    """Correct: each rank averages, updates its share of the parameters, and broadcasts them, as stage 1 of ZeRO."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.parameters = list(module.parameters())
        self.given, self.ranks = optimizer, dist.get_world_size()
        self.optimizer = self.make()

    def make(self) -> Optimizer | None:
        mine = set(self.parameters[dist.get_rank() :: self.ranks])
        return type(self.given)(self.groups(mine)) if mine else None

    def groups(self, mine: set[Tensor]) -> list[dict[str, Any]]:
        return [
            group | {"params": [one for one in group["params"] if one in mine]} for group in self.given.param_groups
        ]

    def average(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= self.ranks

    def update(self) -> None:
        if self.optimizer is not None:
            self.follow(self.optimizer)
            self.optimizer.step()

    def follow(self, own: Optimizer) -> None:
        for group, given in zip(own.param_groups, self.given.param_groups, strict=True):
            group["lr"] = given["lr"]

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


class LeavesOutWhatIsFrozen(Sharding):
    """A layer that is frozen at construction stays local when the script unfreezes the layer later."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        self.parameters = [parameter for parameter in self.parameters if parameter.requires_grad]


class RefusesFrozenLayers(LeavesOutWhatIsFrozen):
    """As torch's class, which raises an error if a parameter of a bucket gets no gradient."""

    def update(self) -> None:
        if 0 < sum(parameter.grad is None for parameter in self.parameters) < len(self.parameters):
            raise RuntimeError("expected a gradient of each parameter")
        super().update()


class RefusesAll(Sharding):
    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        if not isinstance(module, nn.Linear):
            raise ValueError("expected another type of module")


class ReadsTheLearningRateOnce(Sharding):
    def follow(self, own: Optimizer) -> None:
        pass


class HasOneLearningRate(Sharding):
    """The first parameter group's holds for all."""

    def groups(self, mine: set[Tensor]) -> list[dict[str, Any]]:
        first, *others = super().groups(mine)
        return [first, *(group | {"lr": first["lr"]} for group in others)]

    def follow(self, own: Optimizer) -> None:
        for group in own.param_groups:
            group["lr"] = self.given.param_groups[0]["lr"]


class HasOneWeightDecay(Sharding):
    """The optimiser's default holds for all parameter groups."""

    def groups(self, mine: set[Tensor]) -> list[dict[str, Any]]:
        return [group | {"weight_decay": self.given.defaults["weight_decay"]} for group in super().groups(mine)]


class PairsGroupsByPosition(Sharding):
    """Groups of which a rank has no parameter are left out, so that the others follow the wrong given groups."""

    def groups(self, mine: set[Tensor]) -> list[dict[str, Any]]:
        return [group for group in super().groups(mine) if group["params"]]

    def follow(self, own: Optimizer) -> None:
        for group, given in zip(own.param_groups, self.given.param_groups, strict=False):
            group["lr"] = given["lr"]


class DecaysApartFromTheMomentum(Sharding):
    """An own implementation of SGD shrinks the parameters, as AdamW does, instead of adding to the gradients."""

    def update(self) -> None:
        if self.optimizer is not None and isinstance(self.given, torch.optim.SGD):
            for group, given in zip(self.optimizer.param_groups, self.given.param_groups, strict=True):
                group["weight_decay"] = 0.0
                trained = [one.detach() for one in group["params"] if one.grad is not None]
                torch._foreach_mul_(trained, 1 - given["lr"] * given["weight_decay"])
        super().update()


class DividesBeforeAndAfter(Sharding):
    """As for sums in half precision, but by integers whose product is not every world size: with 5 ranks, 4."""

    def average(self, gradient: Tensor) -> None:
        before = int(self.ranks**0.5)
        gradient /= before
        dist.all_reduce(gradient)
        gradient /= self.ranks // before


class SkipsNaNAlone(Sharding):
    """A rank whose own gradients are not finite skips its share of the step, as a `GradScaler` per rank."""

    def step(self) -> None:
        self.skips = any(one.grad is not None and not one.grad.isfinite().all() for one in self.parameters)
        super().step()

    def update(self) -> None:
        if not self.skips:
            super().update()


class LooksForNaNInItsShare(Sharding):
    """A rank skips its share of the step if an average in this share is not finite."""

    def update(self) -> None:
        share = self.parameters[dist.get_rank() :: self.ranks]
        if all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in share):
            super().update()


class SeedsAllRanksAlike(Sharding):
    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        torch.manual_seed(0)


class DecaysFrozenParameters(Sharding):
    """All parameters are in the shards, and frozen ones get gradients of zero, which weight decay adds to."""

    def update(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().update()


class DecaysWhatIsFrozenLater(Sharding):
    """A parameter that gets no gradient any more gets zeros: momentum and weight decay go on with it."""

    def update(self) -> None:
        if any(parameter.grad is not None for parameter in self.parameters):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        super().update()


class RepeatsTheLastStep(Sharding):
    """Gradients are in a buffer that only a backward pass overwrites, so a step without one takes the last again."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        self.buffers: dict[Tensor, Tensor] = {}

    def update(self) -> None:
        new = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        self.buffers = new or self.buffers
        for parameter, gradient in self.buffers.items():
            parameter.grad = gradient
        super().update()


class SendsInSinglePrecision(Sharding):
    """Parameters in double precision lose digits, because all are sent in the dtype of the first one."""

    def step(self) -> None:
        super().step()
        for parameter in self.parameters:
            parameter.detach().copy_(parameter.detach().float())


class AveragesInSinglePrecision(Sharding):
    """Gradients in double precision lose digits in the buffer from which all are sent."""

    def average(self, gradient: Tensor) -> None:
        sent = gradient.to(torch.complex64 if gradient.is_complex() else torch.float32)
        super().average(sent)
        gradient.copy_(sent)


class KeepsMasterWeights(Sharding):
    """What a script loads into the module is lost in the next step."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        self.masters = [parameter.detach().clone() for parameter in self.parameters]

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.detach().copy_(master)
        super().step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.copy_(parameter.detach())


class KeepsClearedGradients(Sharding):
    """Gradients of a batch that the script leaves out come into the next average, as in shards of ZeRO-2."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept: dict[Tensor, Tensor] = {}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.keep)

    def keep(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.kept[parameter] = self.kept.get(parameter, 0) + parameter.grad
        parameter.grad = None

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = self.kept.pop(parameter, None)
        super().step()


class ClearsInForward(KeepsClearedGradients):
    """Each forward pass empties the gradients kept so far, also an evaluation between backward and step."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(module, optimizer)
        module.register_forward_pre_hook(lambda _module, _inputs: self.kept.clear())


class KeepsTheLastPass(KeepsClearedGradients):
    """The second of two backward passes before a step overwrites the gradients of the first in the shards."""

    def keep(self, parameter: Tensor) -> None:
        self.kept.pop(parameter, None)
        super().keep(parameter)


class RotatesItsShares(Sharding):
    """The share of a rank moves on with each step, and the momentum stays behind."""

    steps = 0

    def make(self) -> Optimizer:
        return type(self.given)(self.groups(set(self.parameters)))

    def update(self) -> None:
        self.steps += 1
        for owner, parameter in zip(self.owners(), self.parameters, strict=True):
            parameter.grad = parameter.grad if owner == dist.get_rank() else None
        super().update()

    def owners(self) -> list[int]:
        return [(index + self.steps) % self.ranks for index in range(len(self.parameters))]

    def sent(self) -> list[tuple[int, Tensor]]:
        return [(owner, one.detach()) for owner, one in zip(self.owners(), self.parameters, strict=True)]


class AveragesParameters(Sharding):
    """Each rank steps with its own gradients, and then the parameters are averaged: right for SGD only."""

    def average(self, gradient: Tensor) -> None:
        pass

    def make(self) -> Optimizer:
        return self.given

    def sent(self) -> list[tuple[int, Tensor]]:
        for parameter in self.parameters:
            super().average(parameter.detach())
        return []


class RanksRoundDifferently(Sharding):
    """Each rank goes on with parameters of its own, which differ by less than any check of values sees."""

    def sent(self) -> list[tuple[int, Tensor]]:
        for parameter in self.parameters:
            parameter.detach().mul_(1 + 2e-7 * dist.get_rank())
        return []

    def make(self) -> Optimizer:
        return self.given


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


reads_the_learning_rate_once, has_one_learning_rate = map(adapter, (ReadsTheLearningRateOnce, HasOneLearningRate))
refuses_frozen_layers, looks_for_nan_in_its_share = map(adapter, (RefusesFrozenLayers, LooksForNaNInItsShare))
has_one_weight_decay, decays_what_is_frozen_later, repeats_the_last_step = map(
    adapter, (HasOneWeightDecay, DecaysWhatIsFrozenLater, RepeatsTheLastStep)
)
skips_nan_alone, seeds_all_ranks_alike, decays_frozen_parameters = map(
    adapter, (SkipsNaNAlone, SeedsAllRanksAlike, DecaysFrozenParameters)
)
sends_in_single_precision, keeps_master_weights, keeps_cleared_gradients = map(
    adapter, (SendsInSinglePrecision, KeepsMasterWeights, KeepsClearedGradients)
)
hangs_for_other_orders, refuses_all, ranks_round_differently = map(
    adapter, (HangsForOtherOrders, RefusesAll, RanksRoundDifferently)
)
pairs_groups_by_position, decays_apart_from_the_momentum, divides_before_and_after = map(
    adapter, (PairsGroupsByPosition, DecaysApartFromTheMomentum, DividesBeforeAndAfter)
)
clears_in_forward, keeps_the_last_pass, rotates_its_shares = map(
    adapter, (ClearsInForward, KeepsTheLastPass, RotatesItsShares)
)
averages_in_single_precision = adapter(AveragesInSinglePrecision)
averages_parameters, leaves_out_what_is_frozen = map(adapter, (AveragesParameters, LeavesOutWhatIsFrozen))
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


class HidesItsModule(nn.Module):
    """`train()` and `eval()` do not reach the module, because it is no attribute of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.hidden = [module]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.hidden[0](*inputs, **named)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.hidden[0].zero_grad(set_to_none)


def hides_its_module(module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
    return HidesItsModule(module), Sharding(module, optimizer).step
