"""Memory of NVIDIA's RetinaNet in MLPerf Training v5.0 and v5.1: counted bytes, and the peaks in its logs.

The model is that of `published_models`; what it keeps follows NVIDIA's code (mlcommons/training_results_v4.0 at
62f111b7, NVIDIA/benchmarks/ssd/implementations/pytorch). Four things there hold memory that
`published_models.retinanet` does not have:

- *Masks.* The fused kernels of frozen norm and ReLU keep a mask of one byte an element, beside the output that the
  next convolution keeps (model/nvfuser_fn.py).
- *Loss.* The logits of all levels are joined, and the fused focal loss keeps their gradient. The backward pass joins
  the parts of this gradient once more, and copies that of each level (model/retinanet.py, model/focal_loss.py).
- *CUDA graph.* While a step is captured, the features, logits and boxes of the step before it still exist, and those
  of the captured step stay (model_capture.py).
- *Weights.* Adam has float32 weights and averages beside the 16-bit weights; the capture copies both kinds.

The logs' `max_memory_usage` is taken as torch's `max_memory_allocated` in 10^9 bytes: an image more adds 0.610 GB in
the logs, and 0.605 GB by the count; 2^30 bytes would be 8 % more than the count. Memory of DALI, NCCL and CUDA is not
torch's. Workspaces of cuDNN are torch's, and are not counted; they depend on the GPU: 32 images took 19.5 GB on H200
and 20.5 GB on B200.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function

from ddplab.memory_counter import held_by_a_step
from ddplab.reference.parameters import trainable_parameters
from ddplab.simulator.capacity.memory import WORKSPACE_BYTES

from .published_models import FrozenNormBottleneck, RetinaNet

RESULTS = Path(__file__).parent / "data" / "mlperf_retinanet.csv"
CLASSES, BOX = 264, 4


class _MaskedRelu(Function):
    """ReLU that keeps a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        masked: Tensor = gradients[0] * ctx.saved_tensors[0]
        return masked


class _MaskedAddRelu(Function):
    """ReLU of a sum that keeps a mask; its two gradients are two tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shortcut: Tensor) -> Tensor:
        out = (x + shortcut).relu_()
        ctx.save_for_backward(out > 0)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        masked = gradients[0] * ctx.saved_tensors[0]
        return masked.clone(), masked


class _FusedFocalLoss(Function):
    """A loss whose forward pass computes the gradient and keeps it; its value is of no interest here."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(logits))
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        gradient: Tensor = ctx.saved_tensors[0]
        return gradient.mul_(1)


class _CopiedGradient(Function):
    """Identity whose backward pass copies the gradient, so that it is contiguous."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone(memory_format=torch.contiguous_format)


masked_relu: Callable[[Tensor], Tensor] = _MaskedRelu.apply
masked_add_relu: Callable[[Tensor, Tensor], Tensor] = _MaskedAddRelu.apply
fused_focal_loss: Callable[[Tensor], Tensor] = _FusedFocalLoss.apply
with_copied_gradient: Callable[[Tensor], Tensor] = _CopiedGradient.apply


class _FusedBottleneck(FrozenNormBottleneck):
    def forward(self, x: Tensor) -> Tensor:
        y = masked_relu(nn.Conv2d.forward(self.conv2, self.conv1(x)))
        return masked_add_relu(self.conv3(y), self.downsample(x))


class _FusedRetinaNet(RetinaNet):
    block = _FusedBottleneck

    def outputs(self, images: Tensor) -> list[Tensor]:
        """Return the levels of the pyramid, and logits and boxes of all anchors."""
        levels = self.pyramid(images)
        classification, regression = self.heads
        return [*levels, self._joined(classification, CLASSES, levels), self._joined(regression, BOX, levels)]

    def _joined(self, head: nn.Module, values: int, levels: list[Tensor]) -> Tensor:
        places = (with_copied_gradient(head(one)).unflatten(1, (-1, values)) for one in levels)
        return torch.cat([one.permute(0, 3, 4, 1, 2).reshape(len(one), -1, values) for one in places], 1)


class Count(NamedTuple):
    """Bytes of one GPU: forward and backward, what was left from the last step, and what stays from step to step."""

    step: int
    last_outputs: int
    weights: int

    @property
    def peak(self) -> int:
        """The peak, with the workspace of the libraries."""
        return sum(self) + WORKSPACE_BYTES


def count(batch: int) -> Count:
    """Count the bytes of NVIDIA's step on a batch."""
    outputs: list[Tensor] = []

    def loss(model: nn.Module) -> Tensor:
        outputs.extend(model.outputs(images.half()))  # type: ignore[operator]
        *_, logits, boxes = outputs
        of_images = [fused_focal_loss(one) for one in logits.chunk(batch)]
        foreground, targets = torch.zeros(boxes.shape[:2], dtype=torch.bool), torch.zeros(boxes.shape)
        distance = torch.norm(boxes * foreground[:, :, None] - targets, 1, dim=[1, 2])
        total: Tensor = torch.stack(of_images).sum() + distance.sum()
        return total

    with FakeTensorMode():
        default, images = torch.get_default_dtype(), torch.randn(batch, 3, 800, 800)
        torch.set_default_dtype(torch.float16)
        try:
            module = _FusedRetinaNet(CLASSES)
        finally:
            torch.set_default_dtype(default)
        held = held_by_a_step(module, loss)
    every = sum(one.numel() for one in module.parameters())
    trained = sum(one.numel() for one in trainable_parameters(module).values())
    # 16-bit weights, buckets (gradients are views), Adam's float32 weights and averages, and copies of both weights
    weights = 2 * every + 2 * trained + 12 * trained + 2 * every + 4 * trained
    return Count(held.peak_bytes + held.batch_bytes, sum(one.nbytes for one in outputs), weights)


def logged_peaks() -> list[tuple[str, int, float]]:
    """Return GPU, batch per GPU and logged peak in bytes, of all results that have one."""
    with RESULTS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["max_memory_gb"]]
    return [(row["gpu"], int(row["batch_per_gpu"]), float(row["max_memory_gb"]) * 1e9) for row in rows]
