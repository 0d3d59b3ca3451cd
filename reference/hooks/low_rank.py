"""The linear algebra of low-rank approximation, and when it pays."""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from math import ceil, sqrt

import torch
from torch import Tensor


def worth_compressing(rows: int, columns: int, rank: int, min_compression_rate: float) -> bool:
    """Whether P and Q have fewer elements than the matrix, by more than the rate."""
    return (rows + columns) * rank * min_compression_rate < rows * columns


def orthogonalize(stack: Tensor, epsilon: float = 0.0) -> Tensor:
    """An orthonormal basis for the columns of each matrix; shape [count, rows, rank].

    Args:
        stack: Of the same shape; at least as many rows as columns.
        epsilon: Added to the length of every column before dividing by it, by Gram and Schmidt's method. Zero:
            Householder's, which needs none: columns of zeros become unit vectors.
    """
    precise = stack.float() if stack.dtype in (torch.float16, torch.bfloat16) else stack
    if not epsilon:
        householder: Tensor = torch.linalg.qr(precise).Q
        return householder.to(stack.dtype)
    basis = precise.clone()
    for i in range(basis.shape[2]):
        column = basis[:, :, i : i + 1]
        column /= column.norm(dim=1, keepdim=True) + epsilon
        later = basis[:, :, i + 1 :]
        later -= column @ (column.mH @ later)
    return basis.to(stack.dtype)


def random_q(columns: int, rank: int, seed: str, *, like: Tensor) -> Tensor:
    """Standard normal numbers that depend on the seed alone; shape [columns, rank]."""
    generator = torch.Generator().manual_seed(int.from_bytes(sha256(seed.encode()).digest()[:8]))
    return torch.randn(columns, rank, generator=generator).to(like.device, like.dtype)


def square(flat: Tensor) -> Tensor:
    """The numbers of `flat` and then zeros, in the smallest square matrix that takes them."""
    side = ceil(sqrt(flat.numel()))
    return torch.nn.functional.pad(flat, (0, side * side - flat.numel())).view(side, side)


def stacks(shapes: Sequence[tuple[int, ...]], *, batched: bool) -> list[list[int]]:
    """Which matrices to multiply together: those of one shape, or each by itself."""
    found = defaultdict(list)
    for i, shape in enumerate(shapes):
        found[shape if batched else i].append(i)
    return list(found.values())


def rows_and_columns(parameter: Tensor) -> tuple[int, int]:
    """The shape of a parameter as a matrix, its outermost dimension in memory making the rows."""
    if not parameter.numel():
        return 0, 0
    rows = max(zip(parameter.stride(), parameter.shape, strict=True), default=(1, 1))[1]
    return rows, parameter.numel() // rows
