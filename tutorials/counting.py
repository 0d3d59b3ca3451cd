"""Counts a rank's all-reduces in torch's process group, whichever code issues them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


@contextmanager
def all_reduces() -> Iterator[list[int]]:
    """Collect the bytes of each all-reduce that this rank issues within the `with` block, in launch order."""
    sent = []
    real: Any = dist.ProcessGroup.allreduce

    def counted(group: dist.ProcessGroup, tensors: Sequence[Tensor], *arguments: Any) -> Any:
        sent.append(sum(tensor.nbytes for tensor in tensors))
        return real(group, tensors, *arguments)

    with mock.patch.object(dist.ProcessGroup, "allreduce", counted):
        yield sent
