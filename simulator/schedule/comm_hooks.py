"""What comm hooks send and compute: the cost side of `reference.hooks`, one class a hook.

Bytes follow from shapes by the formulas of the hooks themselves; a test compares them with what the real ones send.
What a hook computes is measured (`ddplab calibrate --hook NAME`) or told, by bytes of gradients.
"""

from collections.abc import Callable, Sequence
from math import ceil, prod, sqrt
from typing import NoReturn, Self

from pydantic import Field

from reference.schema import Settings
from reference.trace import Parameter

from ..fabric.processor import HookCost, Linear
from .schedule import Message

FLOAT32_BYTES = 4
INDEX_BYTES = 8
"""Of the number of a row."""
CHANNEL_ELEMENTS = 512
"""Elements that share a scale, as in `reference.comm_hooks.quantization`."""


class CommHook(Settings):
    """No hook: a bucket's gradients are all-reduced as they are. Other hooks say otherwise.

    The three costs are those of one bucket, by bytes of its gradients.
    """

    name: str = Field(default="none", description="what tables call it, no unit; the user's")
    compress: Linear = Field(default=Linear(), description="before the first collective, ns; from `calibrate --hook`")
    recompress: Linear = Field(default=Linear(), description="between two collectives, ns; from `calibrate --hook`")
    decompress: Linear = Field(default=Linear(), description="after the last collective, ns; from `calibrate --hook`")

    def message(self, parameters: Sequence[Parameter], sparse_density: float = 1.0) -> Message | None:
        """What a bucket of these parameters sends; None: nothing.

        Args:
            parameters: Of one bucket, in its order.
            sparse_density: The part of a sparse gradient's rows that is there.

        Raises:
            ValueError: A sparse gradient, which the hook cannot take.
        """
        if any(parameter.sparse for parameter in parameters):
            return self.sparse_message(parameters[0], sparse_density)
        return self.dense_message(parameters)

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """What a bucket of dense gradients sends."""
        return Message("all_reduce", sum(parameter.size_bytes for parameter in parameters))

    def sparse_message(self, parameter: Parameter, density: float) -> Message | None:
        """What the bucket of one sparse gradient sends: rows and their numbers, which Gloo gathers from all ranks."""
        rows = touched_rows(parameter, density)
        return Message("all_gather", rows * (_row_bytes(parameter) + INDEX_BYTES))

    def charged(self, measured: Sequence[HookCost], world_size: int) -> Self:
        """With the costs that were measured of a hook of this name (rank 1: also without), unless it has its own."""
        costs = self.measured_in(measured)
        if costs is None or self.has_costs:
            return self
        return self.model_copy(
            update={
                "compress": costs.compress,
                "recompress": costs.recompress,
                "decompress": costs.decompress.times(self.growth(costs.world_size, world_size)),
            }
        )

    @property
    def has_costs(self) -> bool:
        """Whether it was told what it computes."""
        return not self.compress == self.recompress == self.decompress == Linear()

    @property
    def is_free(self) -> bool:
        """Whether it computes nothing by its nature."""
        return type(self) is CommHook

    def measured_in(self, measured: Sequence[HookCost]) -> HookCost | None:
        """The costs that were measured of a hook of this name; None: there are none."""
        return next((cost for cost in measured if self.name in (cost.name, f"{cost.name}:1")), None)

    def growth(self, _measured: int, _world_size: int) -> float:
        """How many times as much it decompresses on `world_size` ranks as on those that were measured."""
        return 1.0


class Noop(CommHook):
    """Keeps each rank's gradients: what the iteration costs without communication, but with everything else."""

    name: str = "noop"

    @property
    def is_free(self) -> bool:
        """It is."""
        return True

    def message(self, parameters: Sequence[Parameter], sparse_density: float = 1.0) -> Message | None:
        """Nothing."""
        return None


class HalfPrecision(CommHook):
    """`compress(dtype)` of another hook; of none: `fp16_compress` and `bf16_compress`."""

    name: str = "fp16"
    of: CommHook = Field(default=CommHook(), description="what gets the halved gradients, a hook; the argument")

    def message(self, parameters: Sequence[Parameter], sparse_density: float = 1.0) -> Message | None:
        """What the other hook sends of gradients of two bytes an element; Gloo adds up no sparse ones of those."""
        if sparse := [parameter for parameter in parameters if parameter.sparse]:
            _refuse_sparse(self, sparse[0])
        halved = [parameter.model_copy(update={"size_bytes": 2 * _elements(parameter)}) for parameter in parameters]
        return self.of.message(halved, sparse_density)

    def growth(self, measured: int, world_size: int) -> float:
        """As the other hook's."""
        return self.of.growth(measured, world_size)


class Quantized(CommHook):
    """`quantize_per_tensor` and `quantize_per_channel`: a byte an element, 8 a channel.

    All ranks' are gathered, and each rank dequantises them all.
    """

    name: str = "quantize_per_tensor"
    channel_elements: int | None = Field(
        default=None,
        ge=1,
        description="elements that share a scale, a count, None: a bucket's; the hook's argument",
    )

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """Levels, scales and zeros, of whole channels."""
        elements = sum(map(_elements, parameters))
        if not elements:
            return None
        channel = self.channel_elements or elements
        channels = -(-elements // channel)
        return Message("all_gather", channels * (channel + 2 * FLOAT32_BYTES))

    def sparse_message(self, parameter: Parameter, density: float) -> Message | None:
        """See `_refuse_sparse`."""
        return _refuse_sparse(self, parameter)

    def growth(self, measured: int, world_size: int) -> float:
        """In proportion to the ranks."""
        return world_size / measured


class PowerSGD(CommHook):
    """`power_sgd`: P and what is not worth compressing, then Q (Vogels et al. 2019, Algorithm 1)."""

    name: str = "power_sgd:1"
    matrix_approximation_rank: int = Field(
        default=1, ge=1, description="columns of P and Q, a count; PowerSGDState's argument"
    )
    min_compression_rate: float = Field(
        default=2.0, gt=0, description="least ratio of elements that pays, a factor; PowerSGDState's argument"
    )

    def sparse_message(self, parameter: Parameter, density: float) -> Message | None:
        """See `_refuse_sparse`."""
        return _refuse_sparse(self, parameter)

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """(rows + columns) * rank elements for each matrix that is worth it."""
        first = second = 0
        for parameter in parameters:
            rows, columns = _rows_and_columns(parameter)
            rank = min(rows, columns, self.matrix_approximation_rank)
            bytes_each = parameter.size_bytes // max(1, _elements(parameter))
            sent = (rows + columns) * rank
            if len(parameter.shape) > 1 and sent * self.min_compression_rate < rows * columns:
                first += rows * rank * bytes_each
                second += columns * rank * bytes_each
            else:
                first += parameter.size_bytes
        return Message("all_reduce", first, second or None)


class BatchedPowerSGD(PowerSGD):
    """`batched_power_sgd`: the bucket as one square matrix, never more columns than it has."""

    name: str = "batched_power_sgd:1"

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """P, then Q, of the smallest square that takes all elements."""
        elements = sum(map(_elements, parameters))
        side = ceil(sqrt(elements))
        sent = side * min(side, self.matrix_approximation_rank)
        bytes_each = sum(parameter.size_bytes for parameter in parameters) // max(1, elements)
        return Message("all_reduce", sent * bytes_each, sent * bytes_each)


NO_HOOK = CommHook()
HALVES = ("fp16", "bf16")
HOOKS: dict[str, Callable[[int], CommHook]] = {
    "none": lambda _rank: NO_HOOK,
    "noop": lambda _rank: Noop(),
    "fp16": lambda _rank: HalfPrecision(name="fp16"),
    "bf16": lambda _rank: HalfPrecision(name="bf16"),
    "quantize_per_tensor": lambda _rank: Quantized(),
    "quantize_per_channel": lambda _rank: Quantized(name="quantize_per_channel", channel_elements=CHANNEL_ELEMENTS),
    "power_sgd": lambda rank: PowerSGD(name=f"power_sgd:{rank}", matrix_approximation_rank=rank),
    "batched_power_sgd": lambda rank: BatchedPowerSGD(
        name=f"batched_power_sgd:{rank}", matrix_approximation_rank=rank
    ),
}
"""By the name that `named_hook` takes; the number is the rank of an approximation."""


def named_hook(name: str) -> CommHook:
    """A hook by its name: one of `HOOKS`, the two PowerSGDs with their rank as in `power_sgd:4`.

    With `fp16+` or `bf16+` before it, it gets its gradients in half precision, as in `fp16+power_sgd:4`.

    Raises:
        ValueError: No such hook, or a rank that is not a positive integer.
    """
    dtype, plus, inner = name.partition("+")
    if plus and dtype in HALVES:
        return HalfPrecision(name=name, of=named_hook(inner))
    word, colon, rank = name.partition(":")
    takes_rank = word.endswith("power_sgd")
    if word not in HOOKS or (colon and not (takes_rank and rank.isdecimal() and int(rank))):
        raise ValueError(f"hook: expected one of {', '.join(HOOKS)}, power_sgd:RANK, or fp16+ANOTHER; got {name!r}")
    return HOOKS[word](int(rank or 1))


def gradient_bytes(parameter: Parameter, sparse_density: float) -> int:
    """Bytes of a gradient's numbers."""
    if not parameter.sparse:
        return parameter.size_bytes
    return touched_rows(parameter, sparse_density) * _row_bytes(parameter)


def touched_rows(parameter: Parameter, density: float) -> int:
    """Rows of a sparse gradient."""
    return ceil(parameter.shape[0] * density)


def _row_bytes(parameter: Parameter) -> int:
    return parameter.size_bytes // max(1, parameter.shape[0])


def _refuse_sparse(hook: CommHook, parameter: Parameter) -> NoReturn:
    raise ValueError(
        f"hook: {hook.name} takes no sparse gradients, and {parameter.name} has them; use none, or "
        "make the embedding dense (sparse=False)"
    )


def _elements(parameter: Parameter) -> int:
    return prod(parameter.shape)


def _rows_and_columns(parameter: Parameter) -> tuple[int, int]:
    """As `reference.comm_hooks.powersgd` sees it, for parameters whose first dimension is outermost in memory."""
    elements = _elements(parameter)
    rows = parameter.shape[0] if parameter.shape else 1
    return (rows, elements // rows) if elements else (0, 0)
