"""The collectives that training launches: how many bytes each one sends, and how many are in flight.

Pure functions over ints. The reducer, the comm hooks and the simulator call the same functions, so predicted and real
messages cannot differ.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from math import isqrt, prod
from typing import TypeVar

from .bucketing import MIB, assign_buckets

GLOO_THREADS = 2
"""Collectives of one process group that torch's Gloo runs at a time."""
PIECE_BYTES = 250 * MIB
"""Size of the pieces in which tensors are broadcast (torch: `broadcast_bucket_size`)."""
PIECES_IN_FLIGHT = 2
"""Pieces that are broadcast at the same time; bounds the memory of the flat copies, whatever the model's size."""
READY_ORDER_BYTES = 8
"""Size of a parameter index in the ready order that rank 0 broadcasts before the rebuild."""
USED_MAP_BYTES = 4
"""Size of a parameter's entry in the map of used parameters, which is all-reduced (torch: `local_used_map`)."""
JOIN_COUNT_BYTES = 4
"""Size, under Join, of a count of ranks: of those with inputs, in torch's `Join`, and of those that average."""
JOIN_RANK_BYTES = 8
"""Size, under Join, of the number of the rank whose buffers or model all ranks receive."""
MIN_COMPRESSION_RATE = 2.0
"""Default of PowerSGD: a matrix is compressed if it has more than this many times the elements of P and Q."""
CHANNEL_ELEMENTS = 512
"""Default of per-channel quantisation: elements that share a scale."""
FLOAT32_BYTES = 4

_assign_pieces = lru_cache(maxsize=16)(assign_buckets)  # each forward pass sends the same buffers
Piece = TypeVar("Piece")
Shape = tuple[int, int]


def send_in_pieces(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    launch: Callable[[list[int]], Piece],
    finish: Callable[[Piece], None],
) -> None:
    """Call `launch` with the tensors of each piece, all of one key, and `finish` before too many are in flight."""
    in_flight: deque[Piece] = deque()
    for indices in _assign_pieces(tuple(sizes_bytes), (PIECE_BYTES,), keys=tuple(keys)):
        if len(in_flight) == PIECES_IN_FLIGHT:
            finish(in_flight.popleft())
        in_flight.append(launch(indices))
    while in_flight:
        finish(in_flight.popleft())


def factors(rows: int, columns: int, max_rank: int) -> tuple[Shape, Shape]:
    """Shapes of PowerSGD's P, [rows, rank], and Q, [columns, rank], for a matrix M of [rows, columns]."""
    rank = min(rows, columns, max_rank)
    return (rows, rank), (columns, rank)


def factors_of_gradient(
    shape: Sequence[int], max_rank: int, min_compression_rate: float, strides: Sequence[int] | None = None
) -> tuple[Shape, Shape] | None:
    """Shapes of the P and Q that `power_sgd` sends instead of a gradient; None: it sends the gradient as it is."""
    if len(shape) < 2:
        return None
    rows, columns = rows_and_columns(shape, strides)
    p, q = factors(rows, columns, max_rank)
    return (p, q) if (prod(p) + prod(q)) * min_compression_rate < rows * columns else None


def rows_and_columns(shape: Sequence[int], strides: Sequence[int] | None = None) -> Shape:
    """A parameter as a matrix: the outermost dimension in memory, by default the first, becomes the rows."""
    if not (elements := prod(shape)):
        return 0, 0
    rows = max(zip(strides or range(len(shape), 0, -1), shape, strict=True), default=(1, 1))[1]
    return rows, elements // rows


def square_side(elements: int) -> int:
    """Side of the smallest square matrix that holds a bucket of so many elements, for `batched_power_sgd`."""
    root = isqrt(elements)
    return root + (root * root < elements)


def channel_shape(elements: int, channel_elements: int | None) -> Shape:
    """Number of channels of a quantised bucket, and elements of each: `channel_elements`, or all if that is None."""
    channel_elements = channel_elements or elements
    return -(-elements // channel_elements), channel_elements  # the last channel is filled up


def quantized_parts_bytes(channels: int, channel_elements: int) -> tuple[int, int, int]:
    """Bytes of a quantised bucket's three parts: a scale and a zero point per channel, then a level per element."""
    return channels * FLOAT32_BYTES, channels * FLOAT32_BYTES, channels * channel_elements
