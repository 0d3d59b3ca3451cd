"""Data-parallel classes with one mistake each, and correct ones as others write them, to be tried by conformance."""

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Bucketed(nn.Module):
    """Correct: buckets of at most the cap, launched in order as their gradients become ready."""

    def __init__(self, module: nn.Module, bucket_size_mb: float) -> None:
        super().__init__()
        self.module = module
        self.start_equal()
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            held = self.buckets[-1]
            size = sum(one.nbytes for one in held) + parameter.nbytes
            if held and (size > bucket_size_mb * 2**20 or held[0].dtype != parameter.dtype):
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self.bucket_of = {id(one): number for number, bucket in enumerate(self.buckets) for one in bucket}
        self.begin()
        for bucket in self.buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def start_equal(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def begin(self) -> None:
        self.missing, self.launched = [len(bucket) for bucket in self.buckets], 0
        self.running: list[tuple[Any, Tensor, list[nn.Parameter]]] = []

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[id(parameter)]] -= 1
        while self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.launch(self.launched)
            self.launched += 1

    def launch(self, number: int) -> None:
        bucket = self.buckets[number]
        flat = torch.cat([one.grad.flatten() for one in bucket]) / self.divisor()
        self.running.append((dist.all_reduce(flat, async_op=True), flat, bucket))

    def divisor(self) -> float:
        return dist.get_world_size()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        for work, flat, bucket in self.running:
            self.wait(work)
            for parameter, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                parameter.grad = part.view_as(parameter).clone()
        self.begin()

    def wait(self, work: Any) -> None:
        work.wait()


class Sums(Bucketed):
    def divisor(self) -> float:
        return 1


class DividesByTwo(Bucketed):
    def divisor(self) -> float:
        return 2


class DoesNotWait(Bucketed):
    def wait(self, work: Any) -> None:
        pass


class KeepsItsLastBucket(Bucketed):
    def finish_gradient_synchronization(self) -> None:
        for work, *_ in self.running[-1:]:
            work.wait()
        self.running = self.running[:-1]
        super().finish_gradient_synchronization()


class OnlyRankZeroIsRight(Bucketed):
    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        if dist.get_rank():
            for bucket in self.buckets:
                for parameter in bucket:
                    parameter.grad *= 0.5


class StartsUnequal(Bucketed):
    def start_equal(self) -> None:
        pass


class LaunchesAsReady(Bucketed):
    """Ranks whose gradients become ready in different orders launch different buckets."""

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        number = self.bucket_of[id(parameter)]
        self.missing[number] -= 1
        if not self.missing[number]:
            self.launch(number)


class LaunchesAtTheEnd(Bucketed):
    def gradient_ready(self, parameter: nn.Parameter) -> None:
        pass

    def finish_gradient_synchronization(self) -> None:
        for number in range(len(self.buckets)):
            self.launch(number)
        super().finish_gradient_synchronization()


class Flat(Bucketed):
    """Correct, but all gradients are in one all-reduce."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 1e9)


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> nn.Module:
    """As in the adapters of CS336's assignment."""
    return Bucketed(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: Any, optimizer: Any) -> None:
    ddp_model.finish_gradient_synchronization()


def make_ddp(module: nn.Module, bucket_cap_mb: float) -> nn.Module:
    return Bucketed(module, bucket_cap_mb)


def finish(wrapped: Any) -> None:
    wrapped.finish_gradient_synchronization()


class _AtTheEnd(torch.autograd.Function):
    """The identity, in whose backward pass a call is queued for the end of the pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.call)
        return gradients[0], None


class Small(nn.Module):
    """Correct: averages at the end of the backward pass, broadcasts buffers in synchronised forward passes only."""

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        *,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module, self.process_group, self.broadcast_buffers = module, process_group, broadcast_buffers
        self.synchronised = True
        self.trainable = [one for one in module.parameters() if one.requires_grad]
        self.buckets = self.fill(int(bucket_cap_mb * 2**20))
        self.expected: list[set[int]] | None = None
        self.running: list[Any] = []
        self.send(list(module.parameters()))
        if broadcast_buffers:
            self.send(list(module.buffers()))
        for index, parameter in enumerate(self.trainable):
            parameter.register_post_accumulate_grad_hook(lambda _parameter, index=index: self.arrived(index))

    def fill(self, cap_bytes: int) -> list[list[int]]:
        buckets: list[list[int]] = [[]]
        for index in reversed(range(len(self.trainable))):
            parameter = self.trainable[index]
            held = [self.trainable[one] for one in buckets[-1]]
            too_large = sum(one.nbytes for one in held) + parameter.nbytes > cap_bytes
            if held and (too_large or held[0].dtype != parameter.dtype):
                buckets.append([])
            buckets[-1].append(index)
        return buckets

    def source(self) -> int:
        return dist.get_global_rank(self.process_group, 0) if self.process_group else 0

    def send(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, self.source(), group=self.process_group)
            with torch.no_grad():
                tensor.data.copy_(whole)

    def are_parameters(self, tensors: list[Tensor]) -> bool:
        return any(isinstance(one, nn.Parameter) for one in tensors)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.synchronised = self.synchronised, False
        try:
            yield
        finally:
            self.synchronised = before

    def averages(self) -> bool:
        return self.synchronised and torch.is_grad_enabled()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self.averages():
            return self.module(*inputs, **kwargs)
        if self.broadcast_buffers:
            self.send(list(self.module.buffers()))
        self.forget_failed_pass()
        self.expected = [set(bucket) for bucket in self.buckets]
        return tree_map_only(Tensor, self.followed, self.module(*inputs, **kwargs))

    def forget_failed_pass(self) -> None:
        for work, *_ in self.running:
            work.wait()
        self.running = []

    def followed(self, output: Tensor) -> Tensor:
        return _AtTheEnd.apply(output, self.backward_ends) if output.requires_grad else output  # type: ignore[no-any-return, no-untyped-call]

    def arrived(self, index: int) -> None:
        if self.expected is None:
            return
        for missing in self.expected:
            missing.discard(index)
        while len(self.running) < len(self.buckets) and not self.expected[len(self.running)]:
            bucket = [self.trainable[one] for one in self.buckets[len(self.running)]]
            flat = torch.cat([self.packed(one) for one in bucket])
            self.running.append((dist.all_reduce(flat, group=self.process_group, async_op=True), flat, bucket))

    def packed(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.flatten() / dist.get_world_size(self.process_group)

    def unpacked(self, parameter: nn.Parameter, part: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(part.view(parameter.shape))

    def backward_ends(self) -> None:
        if len(self.running) == len(self.buckets):
            self.expected = None
            self.finish_running()

    def finish_running(self) -> None:
        for work, flat, bucket in self.running:
            work.wait()
            for parameter, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                if parameter.grad is not None:
                    self.unpacked(parameter, part)
        self.running = []


class CopiesOutInMemoryOrder(Small):
    """Parameters that are not contiguous get a permutation of their averages."""

    def unpacked(self, parameter: nn.Parameter, part: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(part.as_strided(parameter.shape, parameter.grad.stride()))


class SendsBuffersFromRankZero(Small):
    """A group without rank 0 gets no buffers, or those of another group."""

    def send(self, tensors: list[Tensor]) -> None:
        has_rank_zero = self.process_group is None or 0 in dist.get_process_group_ranks(self.process_group)
        if has_rank_zero or self.are_parameters(tensors):
            super().send(tensors)


class EndsAtAnyBackwardPass(Small):
    """The first pass that reaches the outputs ends the averaging, whether gradients have arrived or not."""

    def backward_ends(self) -> None:
        self.expected = None
        self.finish_running()


class CopySharesReducer(Small):
    """The hooks of a copy's parameters are those of the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = copy.copy(self)
        twin._modules = {"module": copy.deepcopy(self.module, memo)}
        for index, parameter in enumerate(twin.module.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _parameter, index=index: self.arrived(index))
        return twin


class AveragesInTrainingModeOnly(Small):
    def averages(self) -> bool:
        return super().averages() and self.training


class DividesAfterTheSum(Small):
    """The sum of half-precision gradients overflows."""

    def packed(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.flatten()

    def unpacked(self, parameter: nn.Parameter, part: Tensor) -> None:
        super().unpacked(parameter, part / dist.get_world_size(self.process_group))


class NeverSendsBuffers(Small):
    def send(self, tensors: list[Tensor]) -> None:
        if self.are_parameters(tensors):
            super().send(tensors)


class SkipsSubclasses(Small):
    """Only parameters whose type is exactly Parameter are averaged."""

    def fill(self, cap_bytes: int) -> list[list[int]]:
        self.trainable = [one for one in self.trainable if type(one) is nn.Parameter]
        return super().fill(cap_bytes)


class CopyStaysLocal(Small):
    """A copy has no hooks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = copy.copy(self)
        twin._modules = {"module": copy.deepcopy(self.module, memo)}
        twin.trainable, twin.buckets = [], []
        return twin


class KeepsBucketsOfAFailedPass(Small):
    """Averages of a pass that raised an error are copied into the gradients of the next one."""

    def forget_failed_pass(self) -> None:
        pass


class RetriesLocally(Small):
    """Only the first backward pass that reaches the outputs is averaged, and not if it raises an error."""

    def followed(self, output: Tensor) -> Tensor:
        self.passes: set[int] = set()
        if output.requires_grad:
            output.register_hook(self.begins)
        return super().followed(output)

    def begins(self, _gradient: Tensor) -> None:
        self.passes.add(torch._C._current_graph_task_id())
        if len(self.passes) > 1:
            self.expected = None


def wrong_on_rank_0(rank: int, _world_size: int, _subject: Any) -> str:
    """Rank 0 returns what is wrong, and the others hang."""
    if rank:
        time.sleep(60)
    return "wrong on rank 0"


class NeverConstructed(Small):
    """The constructor never returns."""

    def __init__(self, module: nn.Module) -> None:
        time.sleep(60)


class WaitsForAThread(Small):
    """Forward waits for another thread, which virtual time does not see."""

    def forward(self, *arguments: Any) -> Any:
        thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        thread.start()
        thread.join()


def wraps_nothing(_module: nn.Module) -> None:
    """Returns nothing."""
