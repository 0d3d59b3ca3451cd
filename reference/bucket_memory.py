"""The memory of a bucket: a buffer, aligned to the cache lines of a CPU, and a view of it for each parameter."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

CACHE_LINE_BYTES = 64


def aligned_buffer(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """An uninitialised flat buffer for the parameters' gradients, aligned to a CPU's cache lines, and its views."""
    first, elements = parameters[0], [parameter.numel() for parameter in parameters]
    lead = lead_in(elements, CACHE_LINE_BYTES // first.element_size()) if first.device.type == "cpu" else 0
    buffer = torch.empty(lead + sum(elements), dtype=first.dtype, device=first.device)[lead:]
    return buffer, views_of(buffer, parameters)


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of `flat`, each with its parameter's shape and memory format: copies are then fast."""
    flat = flat.contiguous()
    views = []
    offset = flat.storage_offset()
    for parameter in parameters:
        strides = torch.empty_like(parameter, device="meta").stride()  # dense, whatever the parameter's are
        views.append(flat.as_strided(parameter.size(), strides, offset))
        offset += parameter.numel()
    return views


def lead_in(elements: Iterable[int], line: int) -> int:
    """Elements to leave free before a buffer so that most of its bytes lie in slots that begin at a cache line.

    If a buffer starts at a cache line, one slot of odd size, such as a classifier's 1000 biases, shifts all slots
    after it off the cache lines, and copying into those slots takes half as long again.
    """
    aligned: Counter[int] = Counter({0: 0})  # elements of the slots that would begin at a line, by lead-in
    for begin, end in pairwise(accumulate(elements, initial=0)):
        aligned[-begin % line] += end - begin
    return max(aligned, key=lambda lead: (aligned[lead], -lead))
