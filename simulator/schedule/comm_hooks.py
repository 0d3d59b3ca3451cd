"""Comm hooks: the messages that each hook sends for a bucket, and the time that it computes; one class a hook.

The classes model the hooks of `reference.comm_hooks`. Message sizes follow from the shapes of the parameters by the
formulas of the hooks; a test compares them with the bytes that the real hooks send. Computing times are measured
(`ddplab calibrate --hook NAME`) or given by the user, by bytes of gradients.
"""

from collections.abc import Callable, Sequence
from math import ceil, prod, sqrt
from typing import Literal, NamedTuple, NoReturn, Self

from pydantic import Field

from reference.files import Settings
from reference.trace import Parameter

from ..fabric.processor import HookCost, Linear

Transport = Literal["all_reduce", "all_gather", "broadcast"]


class Message(NamedTuple):
    """The collectives of one bucket: one, or two where the second depends on the first (PowerSGD)."""

    transport: Transport
    first_bytes: int
    second_bytes: int | None = None


FLOAT32_BYTES = 4
INDEX_BYTES = 8
"""Size of a row index of a sparse gradient."""
CHANNEL_ELEMENTS = 512
"""Elements that share a scale, as in `reference.comm_hooks.quantization`."""


class CommHook(Settings):
    """No hook: each bucket's gradients are all-reduced unchanged. Subclasses model the other hooks.

    The three costs are those of one bucket, by bytes of its gradients.
    """

    name: str = Field(default="none", description="name in tables, no unit; the user's")
    compress: Linear = Field(default=Linear(), description="before the first collective, ns; from `calibrate --hook`")
    recompress: Linear = Field(default=Linear(), description="between two collectives, ns; from `calibrate --hook`")
    decompress: Linear = Field(default=Linear(), description="after the last collective, ns; from `calibrate --hook`")

    def message(self, parameters: Sequence[Parameter], sparse_density: float = 1.0) -> Message | None:
        """Message of a bucket of these parameters; None: the hook sends nothing.

        Args:
            parameters: The bucket's parameters, in the bucket's order.
            sparse_density: Fraction of a sparse gradient's rows that a batch touches.

        Raises:
            ValueError: A sparse gradient, which the hook cannot take.
        """
        if any(parameter.sparse for parameter in parameters):
            return self.sparse_message(parameters[0], sparse_density)
        return self.dense_message(parameters)

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """Message of a bucket of dense gradients."""
        return Message("all_reduce", sum(parameter.size_bytes for parameter in parameters))

    def sparse_message(self, parameter: Parameter, density: float) -> Message | None:
        """Message of a bucket of one sparse gradient: rows and their indices, which Gloo gathers from all ranks."""
        rows = touched_rows(parameter, density)
        return Message("all_gather", rows * (_row_bytes(parameter) + INDEX_BYTES))

    def charged(self, measured: Sequence[HookCost], world_size: int) -> Self:
        """The hook with the costs measured for its name, unless it has costs of its own.

        Args:
            measured: Costs of a fabric's processor. A name without a rank also fits a hook of rank 1.
            world_size: Number of ranks, with which `decompress` may grow.
        """
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
        """Whether the user gave costs."""
        return not self.compress == self.recompress == self.decompress == Linear()

    @property
    def is_free(self) -> bool:
        """Whether the hook never computes anything."""
        return type(self) is CommHook

    def measured_in(self, measured: Sequence[HookCost]) -> HookCost | None:
        """The costs measured for a hook of this name; None: not measured."""
        return next((cost for cost in measured if self.name in (cost.name, f"{cost.name}:1")), None)

    def growth(self, _measured: int, _world_size: int) -> float:
        """Ratio of the time to decompress on `world_size` ranks to the time on the `measured` number of ranks."""
        return 1.0


class Noop(CommHook):
    """Each rank keeps its own gradients: an iteration without communication, but with everything else."""

    name: str = "noop"

    @property
    def is_free(self) -> bool:
        """Always: there is nothing to compute."""
        return True

    def message(self, parameters: Sequence[Parameter], sparse_density: float = 1.0) -> Message | None:
        """None: the hook sends nothing."""
        return None


class HalfPrecision(CommHook):
    """`compress(dtype)` of another hook; of none: `fp16_compress` and `bf16_compress`."""

    name: str = "fp16"
    of: CommHook = Field(default=CommHook(), description="hook that gets the halved gradients, a hook; the argument")

    def message(self, parameters: Sequence[Parameter], sparse_density: float = 1.0) -> Message | None:
        """Message of the inner hook for gradients of two bytes an element; Gloo cannot add sparse ones."""
        if sparse := [parameter for parameter in parameters if parameter.sparse]:
            _refuse_sparse(self, sparse[0])
        halved = [parameter.model_copy(update={"size_bytes": 2 * _elements(parameter)}) for parameter in parameters]
        return self.of.message(halved, sparse_density)

    def growth(self, measured: int, world_size: int) -> float:
        """Growth of the inner hook."""
        return self.of.growth(measured, world_size)


class Quantized(CommHook):
    """`quantize_per_tensor` and `quantize_per_channel`: a byte an element, 8 bytes a channel.

    Every rank gathers the gradients of all ranks and dequantises them.
    """

    name: str = "quantize_per_tensor"
    channel_elements: int | None = Field(
        default=None,
        ge=1,
        description="elements that share a scale, a count, None: a bucket's; the hook's argument",
    )

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """Levels, scales and zero points, for whole channels."""
        elements = sum(map(_elements, parameters))
        if not elements:
            return None
        channel = self.channel_elements or elements
        channels = -(-elements // channel)
        return Message("all_gather", channels * (channel + 2 * FLOAT32_BYTES))

    def sparse_message(self, parameter: Parameter, density: float) -> Message | None:
        """Raise ValueError: the hook takes dense gradients only."""
        return _refuse_sparse(self, parameter)

    def growth(self, measured: int, world_size: int) -> float:
        """Proportional to the number of ranks."""
        return world_size / measured


class PowerSGD(CommHook):
    """`power_sgd`: first P and all uncompressed gradients, then Q (Vogels et al. 2019, Algorithm 1)."""

    name: str = "power_sgd:1"
    matrix_approximation_rank: int = Field(
        default=1, ge=1, description="columns of P and Q, a count; PowerSGDState's argument"
    )
    min_compression_rate: float = Field(
        default=2.0, gt=0, description="least ratio of elements that pays, a factor; PowerSGDState's argument"
    )

    def sparse_message(self, parameter: Parameter, density: float) -> Message | None:
        """Raise ValueError: the hook takes dense gradients only."""
        return _refuse_sparse(self, parameter)

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """(rows + columns) * rank elements for each matrix that compression makes small enough."""
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
    """`batched_power_sgd`: the bucket as one square matrix, approximated with at most as many columns as it has."""

    name: str = "batched_power_sgd:1"

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """P, then Q, of the smallest square matrix that holds all elements."""
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
"""Constructors by the name that `named_hook` takes; the argument is the rank of an approximation."""


def named_hook(name: str) -> CommHook:
    """Make a hook from its name.

    Args:
        name: One of `HOOKS`; both PowerSGD hooks take a rank, as in `power_sgd:4`. The prefix `fp16+` or `bf16+`
            converts gradients to half precision first, as in `fp16+power_sgd:4`.

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
    """Bytes of a gradient's values; row indices of a sparse gradient not included."""
    if not parameter.sparse:
        return parameter.size_bytes
    return touched_rows(parameter, sparse_density) * _row_bytes(parameter)


def touched_rows(parameter: Parameter, density: float) -> int:
    """Number of rows that a sparse gradient holds."""
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
    """Matrix shape as in `reference.comm_hooks.powersgd`, if the first dimension is outermost in memory."""
    elements = _elements(parameter)
    rows = parameter.shape[0] if parameter.shape else 1
    return (rows, elements // rows) if elements else (0, 0)
