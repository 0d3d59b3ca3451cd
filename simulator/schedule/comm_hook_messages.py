"""Comm hooks: the messages that each hook sends for a bucket, and the time it computes; one class per hook.

The classes model the hooks of `ddplab.reference.comm_hooks`. Message sizes follow from the shapes of the parameters
by `ddplab.reference.message_sizes`, which the hooks call too. Computing times are linear in the bytes of the
gradients; they are measured (`ddplab calibrate --hook NAME`) or given by the user.
"""

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from ...reference import message_sizes as collectives
from ...reference.trace import Parameter
from ..fabric.processor_costs import HookCost, Linear

Transport = Literal["all_reduce", "all_gather", "broadcast"]


class Message(NamedTuple):
    """The collectives of one bucket: one, or two if the second depends on the first (PowerSGD)."""

    transport: Transport
    first_bytes: int
    second_bytes: int | None = None


INDEX_BYTES = 8
"""Size of a row index of a sparse gradient."""


class CommHook(HookCost):
    """No hook: each bucket's gradients are all-reduced unchanged. Subclasses model the other hooks.

    The three costs apply to one bucket and depend on the bytes of its gradients.
    """

    takes_sparse: ClassVar[bool] = True  #: whether the hook supports sparse gradients
    name: str = "none"  #: name in tables, no unit; chosen by the user
    decompress: Linear = Linear()  #: computation after the last collective, ns; from `calibrate --hook`

    def message(self, parameters: Sequence[Parameter], sparse_density: float = 1.0) -> Message | None:
        """Return the message of a bucket of these parameters, in its order; None if the hook sends nothing.

        `sparse_density`: fraction of a sparse gradient's rows that a batch touches.

        Raises:
            ValueError: A gradient is sparse and the hook does not support sparse gradients.
        """
        if not any(parameter.sparse for parameter in parameters):
            return self.dense_message(parameters)
        sparse = parameters[0]  # alone in its bucket
        if not self.takes_sparse:
            raise ValueError(
                f"hook: {self.name} does not support sparse gradients, and that of {sparse.name} is sparse; use the "
                "hook `none`, or make the embedding dense (sparse=False)"
            )
        rows = sparse.touched_rows(sparse_density)  # rows and indices are gathered from all ranks
        return Message("all_gather", rows * (_row_bytes(sparse) + INDEX_BYTES))

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """Return the message of a bucket of dense gradients."""
        return Message("all_reduce", sum(parameter.size_bytes for parameter in parameters))

    def charged(self, measured: Sequence[HookCost], world_size: int) -> Self:
        """Return the hook with the costs measured for its name, unless the hook has costs already.

        `measured` is `Processor.hooks` of a fabric. With the number of ranks, `decompress` may grow.
        """
        costs = self.measured_in(measured)
        if costs is None or self.has_costs:
            return self
        decompress = costs.decompress.times(self.gathered(world_size))
        update = {"compress": costs.compress, "recompress": costs.recompress, "decompress": decompress}
        return self.model_copy(update=update)

    @property
    def has_costs(self) -> bool:
        """Whether any cost was given."""
        return not self.compress == self.recompress == self.decompress == Linear()

    def measured_in(self, measured: Sequence[HookCost]) -> HookCost | None:
        """Return the costs measured for a hook of this name, or with rank 1 for its name; None: not measured."""
        return next((cost for cost in measured if self.name in (cost.name, f"{cost.name}:1")), None)

    def gathered(self, _world_size: int) -> int:
        """Return the number of ranks whose gradients each rank decompresses."""
        return 1


class Noop(CommHook):
    """`noop`: each rank keeps its own gradients, so nothing is sent."""

    name: str = "noop"

    def message(self, parameters: Sequence[Parameter], sparse_density: float = 1.0) -> Message | None:
        """None: the hook sends nothing."""
        return None


class HalfPrecision(CommHook):
    """`compress(dtype)` around another hook; without one, `fp16_compress` and `bf16_compress`.

    Gloo cannot add sparse half-precision gradients.
    """

    takes_sparse = False
    name: str = "fp16"
    of: CommHook = CommHook()  #: hook that gets the half-precision gradients, a hook; argument of `compress`

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """Return the inner hook's message for 2-byte elements."""
        halved = [parameter.model_copy(update={"size_bytes": 2 * _elements(parameter)}) for parameter in parameters]
        return self.of.message(halved)

    def gathered(self, world_size: int) -> int:
        """Return the number of ranks that the inner hook gathers from."""
        return self.of.gathered(world_size)


class Quantized(CommHook):
    """`quantize_per_tensor` and `quantize_per_channel`: 1 byte per element and 8 bytes per channel.

    Every rank gathers the gradients of all ranks and dequantises them.
    """

    takes_sparse = False
    name: str = "quantize_per_tensor"
    channel_elements: int | None = Field(default=None, ge=1)
    """elements that share a scale, a count (None: all elements of the bucket); argument of the hook"""

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """Return the message of levels, scales and zero points; the last channel is filled up."""
        elements = sum(map(_elements, parameters))
        if not elements:
            return None
        shape = collectives.channel_shape(elements, self.channel_elements)
        return Message("all_gather", sum(collectives.quantized_parts_bytes(*shape)))

    def gathered(self, world_size: int) -> int:
        """Return the number of ranks, because each rank dequantises the gradients of all ranks."""
        return world_size


class PowerSGD(CommHook):
    """`power_sgd`: sends P and all uncompressed gradients, then Q (Vogels et al. 2019, Algorithm 1)."""

    takes_sparse = False
    name: str = "power_sgd:1"
    matrix_approximation_rank: int = Field(default=1, ge=1)  #: columns of P and Q, a count; PowerSGDState's argument
    min_compression_rate: float = Field(default=collectives.MIN_COMPRESSION_RATE, gt=0)
    """least compression rate at which a matrix is compressed, a factor; PowerSGDState's argument"""

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """Return the message: P and the gradients that are not compressed, then Q."""
        limits = self.matrix_approximation_rank, self.min_compression_rate
        first = second = 0
        for parameter in parameters:
            if found := collectives.factors_of_gradient(parameter.shape, *limits):
                p_bytes, q_bytes = (prod(shape) * _element_bytes([parameter]) for shape in found)
                first += p_bytes
                second += q_bytes
            else:
                first += parameter.size_bytes
        return Message("all_reduce", first, second or None)


class BatchedPowerSGD(PowerSGD):
    """`batched_power_sgd`: treats the whole bucket as one square matrix."""

    name: str = "batched_power_sgd:1"

    def dense_message(self, parameters: Sequence[Parameter]) -> Message | None:
        """Return the message: P, then Q, of the smallest square matrix that holds all elements."""
        side = collectives.square_side(sum(map(_elements, parameters)))
        found = collectives.factors(side, side, self.matrix_approximation_rank)
        return Message("all_reduce", *(prod(shape) * _element_bytes(parameters) for shape in found))


NO_HOOK = CommHook()
HALVES = ("fp16", "bf16")
HOOKS = {
    "none": NO_HOOK,
    "noop": Noop(),
    "fp16": HalfPrecision(),
    "bf16": HalfPrecision(name="bf16"),
    "quantize_per_tensor": Quantized(),
    "quantize_per_channel": Quantized(name="quantize_per_channel", channel_elements=collectives.CHANNEL_ELEMENTS),
    "power_sgd": PowerSGD(),
    "batched_power_sgd": BatchedPowerSGD(),
}
"""The hooks by name, those of PowerSGD with an approximation rank of 1."""


def named_hook(name: str) -> CommHook:
    """Make a hook from its name.

    Args:
        name: One of `HOOKS`; both PowerSGD hooks take a rank, as in `power_sgd:4`. The prefix `fp16+` or `bf16+`
            converts gradients to half precision first, as in `fp16+power_sgd:4`.

    Raises:
        ValueError: There is no such hook, or the rank is not a positive integer.
    """
    dtype, plus, inner = name.partition("+")
    if plus and dtype in HALVES:
        return HalfPrecision(name=name, of=named_hook(inner))
    word, colon, rank = name.partition(":")
    if word not in HOOKS or (colon and not (word.endswith("power_sgd") and rank.isdecimal() and int(rank))):
        raise ValueError(f"hook: expected one of {', '.join(HOOKS)}, power_sgd:RANK, or fp16+ANOTHER; got {name!r}")
    named = {"name": f"{word}:{int(rank)}", "matrix_approximation_rank": int(rank)} if rank else {}
    return HOOKS[word].model_copy(update=named)


def gradient_bytes(parameters: Sequence[Parameter], sparse_density: float) -> list[int]:
    """Return the bytes of each gradient's values, without the row indices of a sparse gradient."""
    return [
        one.touched_rows(sparse_density) * _row_bytes(one) if one.sparse else one.size_bytes for one in parameters
    ]


def _row_bytes(parameter: Parameter) -> int:
    return parameter.size_bytes // max(1, parameter.shape[0])


def _elements(parameter: Parameter) -> int:
    return prod(parameter.shape)


def _element_bytes(parameters: Sequence[Parameter]) -> int:
    return sum(one.size_bytes for one in parameters) // max(1, sum(map(_elements, parameters)))
