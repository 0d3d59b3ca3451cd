"""The collectives that training launches: how many bytes each one sends, and how many are in flight.

Pure functions over ints. The reducer, the comm hooks and the simulator call the same functions, so predicted and real
messages cannot differ. `bucketing` assigns the gradients to buckets; the hooks below determine what a bucket sends.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from math import isqrt, prod
from typing import NamedTuple, TypeVar

from .bucketing import MIB, assign_buckets

GLOO_THREADS = 2
"""Collectives of one process group that torch's Gloo runs at a time."""

# Bookkeeping

READY_ORDER_BYTES = 8
"""Size of a parameter index in the ready order that rank 0 broadcasts before the rebuild."""
USED_MAP_BYTES = 4
"""Size of a parameter's entry in the map of used parameters, which is all-reduced (torch: `local_used_map`)."""
JOIN_COUNT_BYTES = 4
"""Size, under Join, of a count of ranks: of those with inputs, in torch's `Join`, and of those that average."""
JOIN_RANK_BYTES = 8
"""Size, under Join, of the number of the rank whose buffers or model all ranks receive."""

# Broadcast of parameters and buffers

PIECE_BYTES = 250 * MIB
"""Size of a piece (torch: `broadcast_bucket_size`)."""
PIECES_IN_FLIGHT = 2
"""Pieces that are sent at the same time; bounds the memory of the flat copies, whatever the model's size."""

Piece = TypeVar("Piece")


def send_in_pieces(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    *,
    launch: Callable[[list[int]], Piece],
    finish: Callable[[Piece], None],
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Launch tensors in pieces of about `piece_bytes`, and finish each piece before too many are in flight.

    Args:
        sizes_bytes: Size of each tensor.
        keys: Key of each tensor: its dtype and device. Tensors in one piece have equal keys.
        launch: Sends the tensors with these indices; returns the piece in flight.
        finish: Waits for a piece.
        piece_bytes: A piece is complete when its size reaches this number.
    """
    in_flight: deque[Piece] = deque()
    for indices in assign_buckets(sizes_bytes, [piece_bytes], keys=keys):
        if len(in_flight) == PIECES_IN_FLIGHT:
            finish(in_flight.popleft())
        in_flight.append(launch(indices))
    while in_flight:
        finish(in_flight.popleft())


# PowerSGD

MIN_COMPRESSION_RATE = 2.0
"""Default of PowerSGD's `min_compression_rate`."""


class LowRankFactors(NamedTuple):
    """The shapes of a matrix M of [rows, columns] and of P and Q, which are sent instead: M is about P Q^T."""

    rows: int
    columns: int
    rank: int

    @property
    def p_shape(self) -> tuple[int, int]:
        """Shape of P, which the first collective sends."""
        return self.rows, self.rank

    @property
    def q_shape(self) -> tuple[int, int]:
        """Shape of Q, which the second collective sends."""
        return self.columns, self.rank


def low_rank_factors(rows: int, columns: int, max_rank: int) -> LowRankFactors:
    """Shapes of the factors of a matrix; they have at most `max_rank` columns."""
    return LowRankFactors(rows, columns, min(rows, columns, max_rank))


def factors_of_gradient(
    shape: Sequence[int], max_rank: int, min_compression_rate: float, *, strides: Sequence[int] | None = None
) -> LowRankFactors | None:
    """Shapes of the factors that `power_sgd` sends instead of a gradient; None: it sends the gradient as it is.

    A gradient is compressed if it is no vector and has more than `min_compression_rate` times as many elements as P
    and Q together.

    Args:
        shape: Shape of the parameter.
        max_rank: Largest number of columns of P and Q.
        min_compression_rate: See above.
        strides: See `rows_and_columns`.
    """
    if len(shape) < 2:
        return None
    rows, columns = rows_and_columns(shape, strides)
    factors = low_rank_factors(rows, columns, max_rank)
    worth = (rows + columns) * factors.rank * min_compression_rate < rows * columns
    return factors if worth else None


def rows_and_columns(shape: Sequence[int], strides: Sequence[int] | None = None) -> tuple[int, int]:
    """The shape of a parameter as a matrix: the outermost dimension in memory becomes the rows.

    Args:
        shape: Shape of the parameter.
        strides: Its strides in memory. None: the first dimension is the outermost.
    """
    elements = prod(shape)
    if not elements:
        return 0, 0
    rows = max(zip(strides or range(len(shape), 0, -1), shape, strict=True), default=(1, 1))[1]
    return rows, elements // rows


def square_side(elements: int) -> int:
    """Side of the smallest square matrix that holds a bucket of so many elements, for `batched_power_sgd`."""
    root = isqrt(elements)
    return root + (root * root < elements)


# Quantisation

CHANNEL_ELEMENTS = 512
"""Default number of elements that share a scale in `quantize_per_channel`."""
FLOAT32_BYTES = 4


def channel_shape(elements: int, channel_elements: int | None) -> tuple[int, int]:
    """Number of channels of a bucket, and elements of each, which share a scale; the last channel is filled up.

    Args:
        elements: Elements of the bucket, at least one.
        channel_elements: Elements of a channel. None: all elements share a scale.
    """
    if channel_elements is None:
        return 1, elements
    return -(-elements // channel_elements), channel_elements


def quantized_parts_bytes(channels: int, channel_elements: int) -> tuple[int, int, int]:
    """Bytes of the three parts of a quantised bucket: a scale and a zero point per channel, a level per element."""
    return channels * FLOAT32_BYTES, channels * FLOAT32_BYTES, channels * channel_elements
