"""Data-parallel classes with one mistake each, for conformance: correct classes, changed in a few lines."""

import copy
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._pytree import tree_map_only

from ddplab.learn.solutions import Bucketed, Buffered, Hookable, Hooked, Joined, Searching, Shadow
from ddplab.reference.bucketing import rebuild_order
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.minimal import BucketedDataParallel, NaiveDataParallel, OverlappedDataParallel


class LaunchesAsReady(Bucketed):
    """Ranks whose gradients become ready in different orders launch different buckets."""

    launch_complete = Hooked.launch_complete


class Sums(OverlappedDataParallel):
    def factor(self) -> float:
        return dist.get_world_size()

    def finish(self, parameters: list[nn.Parameter], *in_flight: Any) -> None:
        super().finish(parameters, *in_flight)
        for parameter in parameters:
            parameter.grad *= self.factor()


class OnlyRankZeroIsRight(Sums):
    def factor(self) -> float:
        return 0.5 if dist.get_rank() else 1


class SendsMoreFromRankZero(OverlappedDataParallel):
    def finish(self, parameters: list[nn.Parameter], *in_flight: Any) -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(7))
        super().finish(parameters, *in_flight)


class DoesNotWait(OverlappedDataParallel):
    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        super().finish(parameters, flat, SimpleNamespace(wait=lambda: None))


class SkipsZeros(Buffered):
    """A bucket whose gradients are all zero on a rank is not sent there."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        return super().send(flat, parameters) if flat.any() else SimpleNamespace(wait=lambda: None)


class KeepsHandlesInItsClass(NaiveDataParallel):
    """Right on ranks that are processes; where ranks are threads, they wait for the handles of others."""

    handles: list[Any] = []  # noqa: RUF012 - the fault

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: Tensor) -> None:
        if not self.handles:
            torch.autograd.Variable._execution_engine.queue_callback(self.average_gradients)
        parameter.grad /= dist.get_world_size(self.process_group)
        self.handles.append(dist.all_reduce(parameter.grad, group=self.process_group, async_op=True))

    def average_gradients(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


class KeepsItsLastBucket(OverlappedDataParallel):
    def average_gradients(self) -> None:
        if self.in_flight:
            *_, work = self.in_flight.pop()
            work.wait()
        super().average_gradients()


@contextmanager
def unchanged(tensors: Iterator[Tensor]) -> Iterator[None]:
    """Give tensors back what they have now."""
    before = [(one, one.detach().clone()) for one in tensors]
    yield
    for tensor, values in before:
        tensor.detach().copy_(values)


class StartsUnequal(OverlappedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        with unchanged(module.parameters()):
            super().__init__(module, **options)


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> nn.Module:
    """Correct; as in the adapters of CS336's assignment."""
    return BucketedDataParallel(module, bucket_cap_mb=bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: Any, optimizer: Any) -> None:
    ddp_model.average_gradients()


def make_ddp(module: nn.Module, bucket_cap_mb: float) -> nn.Module:
    return BucketedDataParallel(module, bucket_cap_mb=bucket_cap_mb)


class CopiesOutInMemoryOrder(Buffered):
    """Parameters that are not contiguous get a permutation of their averages."""

    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        work.wait()
        for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            gradient = self.gradient(parameter)
            gradient.copy_(part.as_strided(parameter.shape, gradient.stride()))


class NeverSendsBuffers(Buffered):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        with unchanged(module.buffers()):
            super().__init__(module, **options)

    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        pass


class EndsAtAnyBackwardPass(Buffered):
    """The first pass that reaches the outputs ends the averaging, whether gradients have arrived or not."""

    is_over = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.is_over, self.passes_seen = False, set[int]()
        return tree_map_only(Tensor, self.followed, super().forward(*inputs, **kwargs))

    def followed(self, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(self.reached)
        return output

    def reached(self, _gradient: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        self.is_over = True

    def gradient_ready(self, parameter: Tensor) -> None:
        if not self.is_over:
            super().gradient_ready(parameter)


class RetriesLocally(EndsAtAnyBackwardPass):
    """Only the first backward pass that reaches the outputs is averaged, and not if it raises an error."""

    def reached(self, _gradient: Tensor) -> None:
        self.passes_seen.add(torch._C._current_graph_task_id())
        self.is_over = len(self.passes_seen) > 1


class CopyStaysLocal(Buffered):
    """A copy has no hooks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = copy.copy(self)
        twin._modules = {"module": copy.deepcopy(self.module, memo)}
        twin.trainable, twin.buckets, twin.is_rebuilt = [], [], True
        return twin


class AveragesInTrainingModeOnly(Buffered):
    def averages(self) -> bool:
        return super().averages() and self.training

    def gradient_ready(self, parameter: Tensor) -> None:
        if self.training:
            super().gradient_ready(parameter)


class DividesAfterTheSum(Buffered):
    """The sum of half-precision gradients overflows."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        return dist.all_reduce(flat, group=self.process_group, async_op=True)

    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        super().finish(parameters, flat, work)
        for parameter in parameters:
            parameter.grad /= dist.get_world_size(self.process_group)


class SkipsSubclasses(Buffered):
    """Only parameters whose type is exactly Parameter are averaged."""

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        gradient = super().gradient(parameter)
        return gradient if type(parameter) is nn.Parameter else gradient.clone()


class KeepsBucketsOfAFailedPass(Buffered):
    """Averages of a pass that raised an error are copied into the gradients of the next one."""

    def begin(self) -> None:
        self.failed = self.in_flight
        super().begin()

    def average_gradients(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # called by the script, after the pass
            return
        super().average_gradients()
        for in_flight in self.failed:
            self.finish(*in_flight)


class AveragesFiftyTimes(OverlappedDataParallel):
    """Later gradients stay local."""

    launched = 0

    def launch(self, parameters: list[nn.Parameter]) -> Any:
        self.launched += parameters is self.buckets[0]
        if self.launched <= 50:
            return super().launch(parameters)
        flat = torch.cat([self.gradient(parameter).flatten() for parameter in parameters])
        return parameters, flat, SimpleNamespace(wait=lambda: None)


class KeepsEveryBucket(OverlappedDataParallel):
    def launch(self, parameters: list[nn.Parameter]) -> Any:
        self.__dict__.setdefault("kept", []).append(super().launch(parameters))
        return self.kept[-1]


class KeepsHooks(Buffered):
    """Each forward pass registers the same hook again."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.module.register_forward_hook(lambda *_: None)
        return super().forward(*inputs, **keywords)


class SendsBuffersOfTheTop(Buffered):
    """Those of submodules are not sent."""

    def prepare(self) -> None:
        sends, self.broadcast_buffers = self.broadcast_buffers, False
        super().prepare()
        self.broadcast_buffers = sends
        if sends:
            self.send_from(0, self.module.buffers(recurse=False))


class StopsAtNone(NaiveDataParallel):
    """`break` in place of `continue`."""

    def average_gradients(self) -> None:
        for parameter in self.trainable:
            if parameter.grad is None:
                break
            parameter.grad /= dist.get_world_size(self.process_group)
            dist.all_reduce(parameter.grad, group=self.process_group)


class CallsForwardItself(Buffered):
    """And not the module, which has hooks."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self.averages():
            self.prepare()
        return self.module.forward(*inputs, **keywords)


class AlwaysTrains(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.train()


class ClearsGradients(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.zero_grad()


class KeepsItsMode(Buffered):
    def train(self, mode: bool = True) -> Any:
        self.training = mode
        return self


class EnablesGradients(Buffered):
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        with torch.enable_grad():
            return super().forward(*inputs, **keywords)


class LoadsNothing(Buffered):
    """Names in a state dict begin with `module.`, which the module does not know."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state, strict=False, assign=assign)


class NamesLikeTheModule(Buffered):
    """Also where it is a part of another module."""

    def state_dict(self, *arguments: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        return {name.removeprefix("module."): tensor for name, tensor in super().state_dict().items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state, strict, assign)


class DetachesInputs(Buffered):
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return super().forward(*tree_map_only(Tensor, Tensor.detach, inputs), **keywords)


def as_plain_tuples(structure: Any) -> Any:
    if isinstance(structure, list | tuple):
        return tuple(map(as_plain_tuples, structure))
    if isinstance(structure, dict):
        return {name: as_plain_tuples(part) for name, part in structure.items()}
    return structure


class RebuildsInputs(Buffered):
    """As a function that moves them to a device does."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return super().forward(*as_plain_tuples(inputs), **as_plain_tuples(keywords))


class RebuildsOutputs(Buffered):
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return as_plain_tuples(super().forward(*inputs, **keywords))


class CastsOutputs(Buffered):
    """Integers and truth values become numbers in floating point, too."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return tree_map_only(Tensor, Tensor.float, super().forward(*inputs, **keywords))


class HooksEveryOutput(Buffered):
    """Also those that require no gradient."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        output = super().forward(*inputs, **keywords)
        if torch.is_grad_enabled():
            tree_map_only(Tensor, lambda one: one.register_hook(lambda gradient: gradient), output)
        return output


def tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors_in(part)


class SearchesListsOnly(Buffered):
    """A pass is averaged if an output requires a gradient; those in a dict are not found."""

    armed = False

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        output = super().forward(*inputs, **keywords)
        if torch.is_grad_enabled():
            self.armed = any(one.requires_grad for one in tensors_in(output))
        return output

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        if self.armed:
            super().gradient_ready(parameter)


class IsUsedInside(Buffered):
    """An exception in a forward pass leaves the mark of a pass."""

    inside = False

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self.inside:
            return self.module(*inputs, **keywords)
        self.inside = True
        output = super().forward(*inputs, **keywords)
        self.inside = False
        return output

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        if not self.inside:
            super().gradient_ready(parameter)


class ReplacesForward(Buffered):
    """A copy of the module has the function, and with it the original's parameters."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        forward = module.forward
        module.forward = lambda *inputs, **keywords: forward(*inputs, **keywords)  # type: ignore[method-assign]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError("copies of a wrapped module are not supported")


class StartsInSinglePrecision(Buffered):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            if dist.get_rank(self.process_group) and parameter.dtype == torch.float64:
                parameter.detach().copy_(parameter.detach().float())


class ReturnsNothing(Buffered):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)


class ClearsItsBuckets(Buffered):
    """And not the gradients, which are views of them under an option only."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for flat in self.memory.values():
            flat.zero_()


class AsksInEachForward(Buffered):
    """All ranks, also in evaluation."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        dist.all_reduce(torch.ones(1), group=self.process_group)
        return super().forward(*inputs, **keywords)


class SeedsPython(Buffered):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        random.seed(0)
        super().__init__(module, **options)


class SendsCopiesOfBuffers(Buffered):
    """Those that are not contiguous."""

    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        super().send_from(source, (tensor.detach().reshape(-1) for tensor in tensors))


class ReplacesBuffers(Buffered):
    """A tensor that shared their memory, as in an average of models, keeps the old values."""

    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            tensor.data = tensor.detach().clone()
            super().send_from(source, iter([tensor]))


class SendsChangedBuffers(Buffered):
    """Each rank looks whether its own have changed."""

    versions: tuple[int, ...] = ()

    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        every = list(tensors)
        if self.versions != tuple(one._version for one in every):
            super().send_from(source, iter(every))
            self.versions = tuple(one._version for one in every)


class NeedsBuffers(Buffered):
    """A buffer may be None, as those of a batch norm without running statistics."""

    def prepare(self) -> None:
        super().prepare()
        for layer in self.module.modules():
            for buffer in layer._buffers.values():
                buffer.detach()  # type: ignore[union-attr]


class SendsHalfPrecision(Buffered):
    """In place of bfloat16, which has larger numbers."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        if flat.dtype != torch.bfloat16:
            return super().send(flat, parameters)
        half = (flat / dist.get_world_size(self.process_group)).half()
        work = dist.all_reduce(half, group=self.process_group, async_op=True)
        return SimpleNamespace(wait=lambda: (work.wait(), flat.copy_(half)))


class CountsInAByte(Buffered):
    """Nothing is sent in pass 0."""

    number = 0

    def begin(self) -> None:
        super().begin()
        self.number = (self.number + 1) % 256

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        return super().send(flat, parameters) if self.number else SimpleNamespace(wait=lambda: None)


class OneSwitchForAll(Buffered):
    """`no_sync` of one wrapper is that of all."""

    switch = True

    @property
    def synchronised(self) -> bool:
        return OneSwitchForAll.switch

    @synchronised.setter
    def synchronised(self, value: bool) -> None:
        OneSwitchForAll.switch = value


class NeedsASecondRank(Buffered):
    """On one rank, as where a script is tried first, it has no parameters."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return super().parameters(recurse) if dist.get_world_size(self.process_group) > 1 else iter(())


class KeepsItsFirstStateDict(Buffered):
    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        if "first" not in vars(self):
            found = super().state_dict(*arguments, **keywords)
            self.first = {name: tensor.clone() for name, tensor in found.items()}
        return self.first


class LeavesNoSyncOpen(nn.parallel.DistributedDataParallel):
    """After an exception."""

    @contextmanager
    def no_sync(self) -> Any:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        yield
        self.require_backward_grad_sync = before


class KeepsAThread(Buffered):
    """The process does not end as long as it waits."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        threading.Thread(target=Queue().get).start()


class SendsOneMebibyte(Buffered):
    """The rest of a bucket is not sent."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        flat /= dist.get_world_size(self.process_group)
        return dist.all_reduce(flat[: 2**20 // flat.element_size()], group=self.process_group, async_op=True)


class LosesTheLastPiece(Buffered):
    """Buckets are sent in pieces of 8 MiB, of which the last one may be smaller."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        pieces = [piece for piece in flat.split(2**21) if len(piece) == 2**21] or [flat]
        works = [super(LosesTheLastPiece, self).send(piece, parameters) for piece in pieces]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])


class SendsBuffersInTraining(Buffered):
    """And not in eval mode, in which a script may train too."""

    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        if self.module.training:
            super().send_from(source, tensors)


class RoundsBuffers(Buffered):
    """Buffers of all dtypes are sent in double precision."""

    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            sent = tensor.detach().double()
            dist.broadcast(sent, group_src=source, group=self.process_group)
            tensor.detach().copy_(sent)


class SeparatesParameters(OverlappedDataParallel):
    """Parameters that shared memory get memory of their own."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        super().__init__(module, **options)


class RemovesHooks(OverlappedDataParallel):
    """Hooks of the script are lost."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        for parameter in module.parameters():
            (parameter._backward_hooks or {}).clear()
        super().__init__(module, **options)


class StartsAgainInForward(Buffered):
    """A checkpoint that runs a layer again in the backward pass makes the class forget its buckets."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for layer in module.modules():
            layer.register_forward_pre_hook(self.start_again)

    def start_again(self, *_: Any) -> None:
        self.waiting = []


class WrongOnSevenRanks(Sums):
    def factor(self) -> float:
        return 0.5 if dist.get_world_size() == 7 else 1


class WrongOnFourRanks(Sums):
    def factor(self) -> float:
        return 0.5 if dist.get_world_size() == 4 else 1


class WaitsForTheLastPiece(Buffered):
    """Buckets are sent in pieces of 1 MiB."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        flat /= dist.get_world_size(self.process_group)
        return [dist.all_reduce(part, group=self.process_group, async_op=True) for part in flat.split(2**18)][-1]


class SeedsInForward(OverlappedDataParallel):
    """All ranks draw the same dropout."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return super().forward(*inputs, **kwargs)


class NoSyncAtCall(Buffered):
    """The context takes effect when it is made."""

    def no_sync(self) -> Any:
        context = super().no_sync()
        context.__enter__()
        return nullcontext(self.__dict__.setdefault("contexts", []).append(context))


class HalvesUnderNoSync(Buffered):
    @contextmanager
    def no_sync(self) -> Any:
        with super().no_sync():
            yield
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2


class RefusesToFinish(OverlappedDataParallel):
    def finish(self, parameters: list[nn.Parameter], *in_flight: Any) -> None:
        raise NotImplementedError("backward is not supported")


class DropsKeywords(OverlappedDataParallel):
    def forward(self, *inputs: Any, **_: Any) -> Any:
        return super().forward(*inputs)


class RingOfHandles(OverlappedDataParallel):
    """Of more than 64 buckets, the first averages are lost."""

    def average_gradients(self) -> None:
        for *_, work in self.in_flight:
            work.wait()
        self.in_flight = self.in_flight[-64:]
        super().average_gradients()


class BucketsAreParameters(OverlappedDataParallel):
    """The memory of the parameters is a parameter too, to which the optimiser applies the averages once more."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        flats = [torch.cat([one.detach().flatten() for one in bucket]) for bucket in self.buckets]
        self.flats = nn.ParameterList(flats)
        for parameters, flat in zip(self.buckets, flats, strict=True):
            for one, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
                one.data = part.view_as(one)

    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        super().finish(parameters, flat, work)
        next(own for own, bucket in zip(self.flats, self.buckets, strict=True) if bucket is parameters).grad = flat


class InTheOrderOfASet(OverlappedDataParallel):
    """Forks have equal hashes, new interpreters have not."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        named = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self.buckets = [[named[name]] for name in set(named)]


class LocalAfterNoSync(DistributedDataParallel):
    """A static graph whose first pass is under `no_sync` is never averaged."""

    is_first, is_local = True, False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.is_first and self.static_graph:
            self.is_local = not self.require_backward_grad_sync
        self.is_first = False
        with self.no_sync() if self.is_local else nullcontext():
            return super().forward(*inputs, **kwargs)


class GradientsOfForward(OverlappedDataParallel):
    """Averages are copied into the gradients that there were in forward, which the script may have cleared since."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.then = {parameter: self.gradient(parameter) for parameter in self.trainable}
        return super().forward(*inputs, **kwargs)

    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        work.wait()
        for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            self.then[parameter].copy_(part.view_as(parameter))


class MemoryOfTheFirstForward(OverlappedDataParallel):
    """Memory that is made in inference mode, as in a validation before training, is of no use in training."""

    sums: dict[nn.Parameter, Tensor] | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.sums = self.sums or {parameter: torch.zeros_like(parameter) for parameter in self.trainable}
        return super().forward(*inputs, **kwargs)

    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        super().finish(parameters, flat, work)
        for parameter in parameters:
            self.sums[parameter].copy_(parameter.grad)


class RebuildsWhenLayersFreeze(Searching):
    """Whenever other parameters are frozen than before, each rank fills its buckets in its own ready order."""

    frozen: tuple[bool, ...] = ()

    def prepare(self) -> None:
        super().prepare()
        before, self.frozen = self.frozen, tuple(not one.requires_grad for one in self.trainable)
        if before not in ((), self.frozen):
            index_of: dict[Tensor, int] = {parameter: index for index, parameter in enumerate(self.trainable)}
            self.assign(rebuild_order([index_of[one] for one in self.ready], len(self.trainable)))


class SeedsNumpy(Buffered):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        np.random.seed(0)
        super().__init__(module, **options)


class AddsUpZeros(Buffered):
    """In place of a broadcast, ranks add up what all but one multiply by zero, and NaN stays NaN."""

    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.detach().mul_(source == dist.get_rank(self.process_group))
                dist.all_reduce(tensor.detach(), group=self.process_group)
            else:
                super().send_from(source, iter([tensor]))


class StartsFromASum(Buffered):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        for parameter in module.parameters():
            parameter.detach().mul_(dist.get_rank() == 0)
            dist.all_reduce(parameter.detach(), group=options.get("process_group"))
        super().__init__(module, **options)


class SwitchesGradientsOn(Buffered):
    """After each forward pass."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        output = super().forward(*inputs, **keywords)
        torch.set_grad_enabled(True)
        return output


class ChangesInputs(Buffered):
    """As re-entrant checkpoints need them."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        for one in inputs:
            if isinstance(one, Tensor) and one.is_floating_point() and torch.is_grad_enabled():
                one.requires_grad_()
        return super().forward(*inputs, **keywords)


class CountsLocalPasses(Buffered):
    """A rank that has accumulated alone rebuilds its buckets alone."""

    def gradient_ready(self, parameter: Tensor) -> None:
        self.passes += not self.synchronised
        super().gradient_ready(parameter)


class CountsForwardPasses(Buffered):
    """A rank that has evaluated alone rebuilds its buckets alone."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.passes += not torch.is_grad_enabled()
        return super().forward(*inputs, **keywords)


class AveragesOnePassOfAGraph(EndsAtAnyBackwardPass):
    def reached(self, _gradient: Tensor) -> None:
        pass

    def average_gradients(self) -> None:
        self.is_over |= bool(self.in_flight)
        super().average_gradients()


class RoundsItsOrder(Bucketed):
    """Indices of parameters are sent as numbers of their dtype."""

    def assign(self, order: Any) -> None:
        super().assign(torch.tensor(list(order), dtype=self.trainable[-1].dtype).real.int().tolist())


class NamesFormerParameters(Hookable):
    """Those that a bucket had before buckets were built again."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        hook, former = self.comm_hook, self.__dict__.setdefault("former", self.buckets)
        if hook is None:
            return super().send(flat, parameters)
        self.comm_hook = lambda bucket: hook(self.renamed(bucket, former))
        try:
            return super().send(flat, parameters)
        finally:
            self.comm_hook = hook

    def renamed(self, bucket: Any, former: list[list[nn.Parameter]]) -> Any:
        kept = {name: getattr(bucket, name) for name in ("index", "buffer", "gradients", "is_last")}
        return SimpleNamespace(**kept, parameters=lambda: former[bucket.index() % len(former)])


class CountsItsBucketsOnce(Hookable):
    """The last bucket is that of when the hook was registered, before buckets were built again."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        super().register_comm_hook(state, self.call)
        self.hook, self.last = hook, len(self.buckets) - 1

    def call(self, state: Any, bucket: Any) -> Any:
        bucket._is_last = bucket.index() == self.last
        return self.hook(state, bucket)


class KeepsFutures(Hookable):
    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        sent = super().send(flat, parameters)
        self.sent = [*getattr(self, "sent", []), sent]
        return sent


class OneHookForAll(Hookable):
    """A comm hook is an attribute of the class."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        super().register_comm_hook(state, hook)
        OneHookForAll.comm_hook = self.__dict__.pop("comm_hook")


class KeepsEvaluations(OverlappedDataParallel):
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        output = super().forward(*inputs, **keywords)
        if not self.training:
            self.__dict__.setdefault("outputs", []).append(output)
        return output


# Correct classes with other collectives than all-reduces


class Coalesces(OverlappedDataParallel):
    """Each gradient is sent for itself, all in one collective, if the backend has one."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        dist.monitored_barrier(options.get("process_group"))
        super().__init__(module, **options)

    def launch(self, parameters: list[nn.Parameter]) -> Any:
        gradients = [self.gradient(one) / dist.get_world_size(self.process_group) for one in parameters]
        with dist._coalescing_manager(self.process_group, async_ops=True) as handle:
            for one in gradients:
                dist.all_reduce(one, group=self.process_group)
        return parameters, gradients, handle

    def finish(self, parameters: list[nn.Parameter], gradients: Any, work: Any) -> None:
        work.wait()
        for parameter, average in zip(parameters, gradients, strict=True):
            parameter.grad.copy_(average)


SCRATCH = torch.empty(2**20, dtype=torch.uint8)
"""Memory of the process."""


class SharesMemory(NaiveDataParallel):
    """Gradients are sent from memory that all wrappers of a process use, one after the other."""

    def average_gradients(self) -> None:
        for parameter in self.trainable:
            if parameter.grad is not None:
                sent = SCRATCH[: parameter.nbytes].view(parameter.dtype).view_as(parameter).copy_(parameter.grad)
                dist.all_reduce(sent.div_(dist.get_world_size()))
                parameter.grad.copy_(sent)


class ScattersAndGathers(Buffered):
    """As in ZeRO."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        ranks = dist.get_world_size(self.process_group)
        whole = torch.cat([flat / ranks, flat.new_zeros(-len(flat) % ranks)])
        shard = whole.new_empty(len(whole) // ranks)
        parts = list(whole.view(ranks, len(shard)))
        work = dist.reduce_scatter(shard, parts, group=self.process_group, async_op=True)

        def wait() -> None:
            work.wait()
            dist.all_gather(parts, shard, group=self.process_group)
            flat.copy_(whole[: len(flat)])

        return SimpleNamespace(wait=wait)


class ReducesAndBroadcasts(Buffered):
    """As with a parameter server."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        flat /= dist.get_world_size(self.process_group)
        work = dist.reduce(flat, group_dst=0, group=self.process_group, async_op=True)
        return SimpleNamespace(
            wait=lambda: (work.wait(), dist.broadcast(flat, group_src=0, group=self.process_group))
        )


class AveragesInBfloat16(Buffered):
    """Lossy by design."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        if flat.is_complex():
            return super().send(flat, parameters)
        half = (flat / dist.get_world_size(self.process_group)).to(torch.bfloat16)
        work = dist.all_reduce(half, group=self.process_group, async_op=True)
        return SimpleNamespace(wait=lambda: (work.wait(), flat.copy_(half)))


class SendsAround(Buffered):
    """Each rank adds up what goes around the ring, all in the same order."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        ranks, rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        parts = {rank: flat / ranks}

        def wait() -> None:
            for step in range(ranks - 1):
                passing = parts[(rank - step) % ranks]
                received = parts[(rank - step - 1) % ranks] = torch.empty_like(passing)
                sent = dist.isend(passing, group_dst=(rank + 1) % ranks, group=self.process_group)
                dist.recv(received, group_src=(rank - 1) % ranks, group=self.process_group)
                sent.wait()
            flat.copy_(sum(parts[of] for of in range(ranks)))

        return SimpleNamespace(wait=wait)


NODE = 3
"""Ranks of a node."""


class Hierarchical(Buffered):
    """Ranks add up in their node, the first ranks of the nodes among each other, and the sum goes back."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        if options.get("process_group") is not None:
            raise NotImplementedError("process_group: nodes are those of all ranks")
        super().__init__(module, **options)
        every = range(dist.get_world_size())
        nodes = [list(every[first : first + NODE]) for first in every[::NODE]]
        groups = [dist.new_group(node) for node in nodes]
        self.node = nodes[dist.get_rank() // NODE]
        self.in_node, self.across = groups[dist.get_rank() // NODE], dist.new_group([node[0] for node in nodes])

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        flat /= self.ranks()
        dist.reduce(flat, self.node[0], group=self.in_node)
        if dist.get_rank() == self.node[0]:
            dist.all_reduce(flat, group=self.across)
        return dist.broadcast(flat, self.node[0], group=self.in_node, async_op=True)

    def ranks(self) -> int:
        return dist.get_world_size()


class CountsWholeNodes(Hierarchical):
    """The last node has fewer ranks, and counts as a whole one."""

    def ranks(self) -> int:
        return NODE * -(-dist.get_world_size() // NODE)


class HasAHook(nn.parallel.DistributedDataParallel):
    """torch's class with a comm hook of its own."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.register_comm_hook(self.process_group, allreduce_hook)


class SwapsHookAndState(nn.parallel.DistributedDataParallel):
    """torch's class, which is called in the order of FSDP's `register_comm_hook(hook, state)`."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        super().register_comm_hook(hook, state)  # type: ignore[arg-type]


class AnnotatesItsHook(nn.parallel.DistributedDataParallel):
    """torch's class with a hook around the script's, whose annotation torch's class does not take."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        def timed(state: object, bucket: dist.GradBucket) -> torch.futures.Future:
            return hook(state, bucket)

        super().register_comm_hook(state, timed)


class TakesNoHook(nn.parallel.DistributedDataParallel):
    """torch's class without comm hooks."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise NotImplementedError("comm hooks come in the next version")


def wrong_on_rank_0(rank: int, _world_size: int, _subject: Any) -> str:
    """Rank 0 returns what is wrong, and the others hang."""
    if rank:
        time.sleep(60)  # hangs: rank 0's report must end this rank long before
    return "wrong on rank 0"


class NeverConstructed(nn.Module):
    """The constructor never returns."""

    def __init__(self, module: nn.Module) -> None:
        time.sleep(60)  # longer than the test's time limit for a body, which must end it


class WaitsForAThread(NaiveDataParallel):
    """Forward waits for another thread, which virtual time does not see."""

    def forward(self, *arguments: Any) -> Any:
        thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        thread.start()
        thread.join()


class HangsInAHook(OverlappedDataParallel):
    """The hook of a gradient never returns."""

    def launch(self, parameters: list[nn.Parameter]) -> Any:
        threading.Event().wait()


def wraps_nothing(_module: nn.Module) -> None:
    """Returns nothing."""


# Crashes and refusals


def is_sparse(module: nn.Module) -> bool:
    return any(getattr(part, "sparse", False) for part in module.modules())


class CrashesForSparse(DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        if is_sparse(module):
            self.buckets_of_sparse_gradients.clear()  # there are none


class RefusesSparse(DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        if is_sparse(module):
            raise NotImplementedError("sparse gradients are not averaged")
        super().__init__(module, **options)


class CallsACrashARefusal(CrashesForSparse):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        try:
            super().__init__(module, **options)
        except Exception as error:
            raise RuntimeError(f"sparse gradients: {error}") from error


class CrashesInItsHook(DistributedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        self.hooks[state] = hook  # there are none


class CrashesAfterAnError(DistributedDataParallel):
    """It ends a pass that raised an error as any other."""

    def forward(self, *arguments: Any) -> Any:
        if any(one.grad is not None and one.grad.abs().sum() == 0 for one in self.parameters()):
            raise KeyError("bucket of the backward pass")
        return super().forward(*arguments)


# What only unusual scripts show


class ForgetsUsesUnderNoSync(Searching):
    def unused(self) -> list[nn.Parameter]:
        self.used = {one for one in self.trainable if not self.is_absent(one)}
        return super().unused()


class DropsImaginaryParts(Buffered):
    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        if flat.is_complex():
            flat.imag.zero_()
        return super().send(flat, parameters)


class RoundsToItsParameters(Buffered):
    def pack(self, parameters: list[nn.Parameter]) -> Tensor:
        flat = super().pack(parameters)
        return flat.to(parameters[0].dtype).to(flat.dtype)


class SendsNumbersOnly(Buffered):
    def send_from(self, source: int, tensors: Iterator[Tensor]) -> None:
        super().send_from(source, (tensor for tensor in tensors if tensor.dtype != torch.bool))


class WalksByRecursion(Buffered):
    """It looks for the used parameters with a function that calls itself."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        if isinstance(output, Tensor):
            self.walk(output.grad_fn, set())
        return output

    def walk(self, node: Any, seen: set[Any]) -> None:
        if node is not None and node not in seen:
            seen.add(node)
            for following, _ in node.next_functions:
                self.walk(following, seen)


class WalksEveryWay(Buffered):
    """It looks for the used parameters, and comes to a node as often as ways lead there."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        nodes = [output.grad_fn] if isinstance(output, Tensor) else []
        while nodes:
            nodes += [following for following, _ in nodes.pop().next_functions if following is not None]
        return output


class LosesWhatFitsExactly(Buffered):
    """A gradient above the cap has a bucket of its own, and one below the cap shares; one of the cap has none."""

    def assign(self, order: Any) -> None:
        super().assign(order)
        cap = int(self.caps[-1])
        self.buckets = [bucket for bucket in self.buckets if bucket[0].nbytes != cap]


class KnowsParametersByTheirMemory(Buffered):
    def assign(self, order: Any) -> None:
        super().assign(order)
        first = {one.untyped_storage().data_ptr(): one for one in reversed(self.trainable)}
        kept = [[one for one in bucket if first[one.untyped_storage().data_ptr()] is one] for bucket in self.buckets]
        self.buckets = [bucket for bucket in kept if bucket]


class KnowsParametersByTheirAddress(Buffered):
    """Of two parameters in the same place, one counts."""

    def assign(self, order: Any) -> None:
        super().assign(order)
        first = {one.data_ptr(): one for one in reversed(self.trainable)}
        kept = [[one for one in bucket if first[one.data_ptr()] is one] for bucket in self.buckets]
        self.buckets = [bucket for bucket in kept if bucket]


class DividesByItsCap(Bucketed):
    """A cap of less than a byte is zero."""

    def __init__(self, module: nn.Module, *, bucket_cap_mb: float = 25.0, **options: Any) -> None:
        super().__init__(module, bucket_cap_mb=bucket_cap_mb, **options)
        self.expected_buckets = sum(one.nbytes for one in self.trainable) // int(bucket_cap_mb * 2**20)


class CountsUsesInBytes(Searching):
    """A rank that used all does not look at the counts, as in torch."""

    def unused(self) -> list[nn.Parameter]:
        used = torch.tensor([one in self.used for one in self.trainable], dtype=torch.uint8)
        used_all = bool(used.all())
        dist.all_reduce(used, group=self.process_group)
        self.used.clear()
        if used_all:
            return []
        return [one for one, count in zip(self.trainable, used.tolist(), strict=True) if not count]


class SeedsInBackward(Buffered):
    def average_gradients(self) -> None:
        super().average_gradients()
        torch.manual_seed(0)


class KeepsItsGraph(Buffered):
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.last_output = super().forward(*inputs, **kwargs)
        return self.last_output


class KeepsWhereItSearched(Searching):
    """Only with `find_unused_parameters`, as if for the message of an error."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        self.searched = [output] if self.find_unused_parameters else []
        return output


class RegistersItsBuckets(Buffered):
    def launch(self, parameters: list[nn.Parameter]) -> Any:
        launched = super().launch(parameters)
        self.register_buffer("bucket", launched[1])
        return launched


class KnowsOneThread(OverlappedDataParallel):
    """On a GPU, hooks run in threads of autograd."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.of_thread = threading.local()
        self.of_thread.gradients = 0

    def gradient_ready(self, parameter: Tensor) -> None:
        self.of_thread.gradients += 1
        super().gradient_ready(parameter)


class IgnoresByPrefix(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        if asked := tuple(getattr(module, "_ddp_params_and_buffers_to_ignore", ())):
            names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
            module._ddp_params_and_buffers_to_ignore = [name for name in names if name.startswith(asked)]
        super().__init__(module, **options)


class _Passes(torch.autograd.Function):
    """The identity, which returns views."""

    @staticmethod
    def forward(_context: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class ReturnsViews(Buffered):
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        return tree_map_only(Tensor, lambda one: _Passes.apply(one, one)[0] if one.requires_grad else one, output)


class ClearsWhatItAverages(Buffered):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.trainable:
            parameter.grad = None


class SendsComplexAsReal(Buffered):
    def pack(self, parameters: list[nn.Parameter]) -> Tensor:
        for parameter in parameters:
            if parameter.grad is not None and parameter.is_complex():
                torch.view_as_real(parameter.grad)
        return super().pack(parameters)


class GathersEqualSparse(OverlappedDataParallel):
    """It gathers as many entries of every rank as it has itself."""

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        gradient = super().gradient(parameter)
        if gradient.is_sparse:
            parts = []
            for own in (gradient._indices(), gradient._values()):
                every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                dist.all_gather(every, own.contiguous())
                parts.append(every)
            gathered = [torch.sparse_coo_tensor(*part, gradient.shape) for part in zip(*parts, strict=True)]
            parameter.grad = sum(one.to_dense() for one in gathered) / len(gathered)
        return parameter.grad


class ClearsAllForOne(DistributedDataParallel):
    """One gradient of None: the script has cleared them, so that their memory can be."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        if self.gradient_as_bucket_view and 0 < len(gradients) < len(list(self.parameters())):
            torch._foreach_zero_(gradients)
        return super().forward(*inputs, **kwargs)


class DropsImaginaryPartsOfViews(DistributedDataParallel):
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        for parameter in self.parameters():
            if self.gradient_as_bucket_view and parameter.is_complex():
                parameter.register_hook(lambda gradient: gradient.real + 0j)
        return super().forward(*inputs, **kwargs)


class SendsBuffersOfTheStart(Buffered):
    """It sends no buffer that was None when the module was wrapped."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.names = [name for name, _ in module.named_buffers()]

    def prepare(self) -> None:
        sends, self.broadcast_buffers = self.broadcast_buffers, False
        super().prepare()
        self.broadcast_buffers = sends
        if sends:
            self.send_from(self.source(), map(self.module.get_buffer, self.names))


class GivesCopiesToHooks(DistributedDataParallel):
    def register_comm_hook(self, state: Any, hook: Any) -> None:
        super().register_comm_hook(state, lambda state, bucket: hook(state, self.with_copies(bucket)))

    def with_copies(self, bucket: Any) -> Any:
        kept = {name: getattr(bucket, name) for name in ("index", "buffer", "parameters", "is_last")}
        return SimpleNamespace(**kept, gradients=lambda: [one.clone() for one in bucket.gradients()])


class ForgetsUsesInEvaluation(Searching):
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self.used.clear()
        return super().forward(*inputs, **kwargs)


class HooksOnce(OverlappedDataParallel):
    """Parameters of a module that was wrapped before get no second hook."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.is_second = hasattr(module, "was_wrapped")
        super().__init__(module, **options)
        module.was_wrapped = True

    def gradient_ready(self, parameter: Tensor) -> None:
        if not self.is_second:
            super().gradient_ready(parameter)


class RoundsWhatIsConverted(Buffered):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.dtypes = {parameter: parameter.dtype for parameter in self.trainable}

    def pack(self, parameters: list[nn.Parameter]) -> Tensor:
        flat = super().pack(parameters)
        return flat.to(self.dtypes[parameters[0]]).to(flat.dtype)


class KeepsCopies(OverlappedDataParallel):
    """Two copies of all gradients live from pass to pass."""

    def finish(self, parameters: list[nn.Parameter], *in_flight: Any) -> None:
        super().finish(parameters, *in_flight)
        for parameter in parameters:
            parameter.copies = [parameter.grad.clone(), parameter.grad.clone()]


class LocalIfCompiled(OverlappedDataParallel):
    def forward(self, *inputs: Any, **further: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.module(*inputs, **further).detach().requires_grad_()
        return super().forward(*inputs, **further)


def returns_a_module(module: nn.Module, optimizer: Any) -> nn.Module:
    return module


class JoinsWithoutItsHook(Joined):
    """A rank without inputs sends by all-reduces, although there is a comm hook."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        return super().send(flat, parameters) if self.has_inputs else super(Hookable, self).send(flat, parameters)


class CountsForwardsInside(Buffered):
    """An exception in a forward pass leaves the count, and no buffers are sent any more."""

    depth = 0

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.depth += 1
        if self.averages() and self.depth == 1:
            self.prepare()
        output = self.module(*inputs, **keywords)
        self.depth -= 1
        return output


class MakesAGroupOfItsOwn(Buffered):
    """All processes must take part in making it, also those that do not train."""

    def __init__(self, module: nn.Module, *, process_group: Any = None, **options: Any) -> None:
        own = dist.new_group(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        super().__init__(module, process_group=own, **options)


class StaysInLowPrecision(DistributedDataParallel):
    """A forward pass under `no_grad` does not give the module its parameters back."""

    def _post_forward(self, output: Any) -> Any:
        return super()._post_forward(output) if torch.is_grad_enabled() else output


class WaitsForFiveSeconds(OverlappedDataParallel):
    """Correct: the script gets the error of a collective that takes longer."""

    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        super().finish(parameters, flat, SimpleNamespace(wait=partial(self.wait, work)))

    def wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=5))


class GivesUpWaiting(WaitsForFiveSeconds):
    """And goes on with the rank's own gradients."""

    def wait(self, work: Any) -> None:
        with suppress(RuntimeError):
            super().wait(work)


class HooksFloat32(Hookable):
    """Buckets of other dtypes are sent without the comm hook."""

    def send(self, flat: Tensor, parameters: list[nn.Parameter]) -> Any:
        if flat.dtype == torch.float32:
            return super().send(flat, parameters)
        return super(Hookable, self).send(flat, parameters)


class EndsNoSyncInEvaluation(Buffered):
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.synchronised |= not torch.is_grad_enabled()
        return super().forward(*inputs, **keywords)


class ForgetsUsesWhenSaved(Searching):
    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        self.used.clear()
        return super().state_dict(*arguments, **keywords)


class SendsIgnoredBuffers(DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for buffer in module.buffers():
            dist.broadcast(buffer, group_src=0, group=self.process_group)


class LosesGradientsInTheRebuild(Buffered):
    """Gradients that the script keeps become views of new buckets without their values."""

    def assign(self, order: Any) -> None:
        super().assign(order)
        if getattr(self, "gradient_as_bucket_view", False):
            for parameter in self.trainable:
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter)


class HidesErrorsOfHooks(Hookable):
    """Gradients stay as they are if the future of a comm hook holds an error."""

    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        with suppress(RuntimeError, ArithmeticError):
            super().finish(parameters, flat, work)


class JoinsOnce(Joined):
    """A rank that ran out of inputs in one epoch counts as such in the next one."""

    def join_hook(self, **_: Any) -> Shadow:
        return StaysOut(self)


class SendsWhatMemoryHeld(Joined):
    """A rank that never had inputs sends memory to which nothing was written."""

    has_trained = False

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.has_trained = True
        return super().forward(*inputs, **keywords)

    def pack(self, parameters: list[nn.Parameter]) -> Tensor:
        flat = super().pack(parameters)
        return flat if self.has_trained else torch.full_like(flat, torch.nan)


class StaysOut(Shadow):
    def main_hook(self) -> None:
        super().main_hook()
        self.ddp.has_inputs = False


class CountsUsesTooEarly(Searching):
    """When the first gradient arrives."""

    def begin(self) -> None:
        super().begin()
        self.early = super().unused()

    def unused(self) -> list[nn.Parameter]:
        for parameter in self.early:
            self.kept.setdefault(parameter, None)
        return self.early


class KeepsUses(Searching):
    """A parameter that was used once counts as used for ever."""

    def unused(self) -> list[nn.Parameter]:
        used = set(self.used)
        unused = super().unused()
        self.used |= used
        return unused


class GivesNothingToUnused(Searching):
    """A gradient that only other ranks have stays None."""

    def average_gradients(self) -> None:
        before = {parameter for parameter in self.trainable if parameter.grad is None}
        super().average_gradients()
        for parameter in before:
            parameter.grad = None
