"""Data-parallel classes with one mistake each, and correct ones as others write them, to be tried by conformance."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
