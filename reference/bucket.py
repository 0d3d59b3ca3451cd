"""One bucket: a flat buffer, one view a parameter, and how far along it is."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Bucket:
    """Gradients that travel together in one all-reduce.

    An iteration takes it through four steps: `put` once per parameter (it is *ready* after the last),
    `launch`, `wait`, `copy_out`; `reset` begins the next. The bucket owns its buffer; parameters keep
    gradients of their own, which `put` reads and `copy_out` overwrites.

    Attributes:
        indices: Parameter index of each slot.
        parameters: The parameters themselves, slot by slot; all of one dtype on one device.
        buffer: Flat tensor of the bucket's size; the all-reduce works in place on it.
        views: Slot by slot a view of `buffer` with its parameter's shape and memory format.
    """

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        self.indices = tuple(indices)
        self.parameters = list(parameters)
        first = self.parameters[0]
        self.buffer = torch.empty(
            sum(parameter.numel() for parameter in self.parameters), dtype=first.dtype, device=first.device
        )
        self.views = _views(self.buffer, self.parameters)
        self._work: dist.Work | None = None
        self.reset()

    def __repr__(self) -> str:
        return f"Bucket(parameters {list(self.indices)}, {self.size_bytes} bytes, {len(self.pending_slots)} pending)"

    @property
    def size_bytes(self) -> int:
        """Bytes that its all-reduce moves."""
        return self.buffer.numel() * self.buffer.element_size()

    @property
    def ready(self) -> bool:
        """Whether every gradient has been put."""
        return not self.pending_slots

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.pending_slots = set(range(len(self.parameters)))

    def put(self, slot: int, scale: float) -> None:
        """Copy the gradient of the slot's parameter into its view, multiplied by `scale`; same shape and dtype."""
        gradient = self.parameters[slot].grad
        assert gradient is not None
        torch.mul(gradient, scale, out=self.views[slot])
        self.pending_slots.remove(slot)

    def launch(self, group: dist.ProcessGroup) -> dist.Work:
        """Issue the all-reduce of the sum over `group`; returns at once."""
        self._work = dist.all_reduce(self.buffer, group=group, async_op=True)
        assert self._work is not None
        return self._work

    def wait(self) -> None:
        """Block until the sum is in the buffer (on CUDA: make the current stream wait)."""
        assert self._work is not None
        self._work.wait()
        self._work = None

    def copy_out(self) -> None:
        """Overwrite the parameters' gradients with what the buffer holds."""
        gradients = [parameter.grad for parameter in self.parameters]
        torch._foreach_copy_(gradients, self.views)  # type: ignore[arg-type]  # put has seen that none is None


def _views(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of `buffer`, each with its parameter's shape and memory format: copies run at full speed."""
    views = []
    offset = 0
    for parameter in parameters:
        strides = torch.empty_like(parameter, device="meta").stride()  # dense, whatever the parameter's are
        views.append(buffer.as_strided(parameter.size(), strides, offset))
        offset += parameter.numel()
    return views
