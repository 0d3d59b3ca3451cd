"""Scale model: run emulated devices slowly and with small tensors, so that many of them fit one machine.

Everything that takes time is slowed down by the same factor, the *dilation*, and everything that has bytes is made
smaller by the same factor, the *byte scale*. What happens in an iteration then stays the same, apart from the unit
of time. Dilation of time was introduced by Gupta et al., "To Infinity and Beyond: Time-Warped Network Emulation"
(NSDI 2006).
"""

import math
from dataclasses import dataclass, replace

from ddplab.prediction_errors import Configuration, ValidationRow
from ddplab.reference.files.value_ranges import MILLION
from ddplab.reference.trace import Buffer, Iteration, Parameter, RankTrace, Trace
from ddplab.simulator.workload.compute_times import end_of_computation_ns

from .virtual_links import Uplinks


@dataclass(frozen=True, kw_only=True)
class ScaleModel:
    """How a scale model differs from the original.

    Attributes:
        dilation: Time in the model per time in the original; above 0.
        byte_scale: Bytes in the model per byte in the original; above 0.

    Raises:
        ValueError: A factor is below a millionth or above a million.
    """

    dilation: float = 1.0
    byte_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("dilation", "byte_scale"):
            if not 1 / MILLION <= (value := getattr(self, name)) <= MILLION:
                raise ValueError(f"{name}: expected a factor from {1 / MILLION:g} to {MILLION}, got {value:g}")

    def rates(self, of_links: float, uplinks: Uplinks | None = None) -> tuple[float, Uplinks | None]:
        """Return the rates of links and uplinks in the model."""
        factor = self.byte_scale / self.dilation
        return of_links * factor, uplinks and uplinks._replace(rate=uplinks.rate * factor)

    def configuration(self, original: Configuration) -> Configuration:
        """Return a configuration in the model."""
        cap_mb = original.cap_mb
        return original if isinstance(cap_mb, str) else replace(original, cap_mb=cap_mb * self.byte_scale)

    def original_ns(self, in_model_ns: float) -> int:
        """Return a time in the original."""
        return round(in_model_ns / self.dilation)

    def original_row(self, in_model: ValidationRow) -> ValidationRow:
        """Return a row of a report with times of the original."""
        ns = self.original_ns
        return replace(
            in_model,
            turns=tuple(turn._replace(times_ns=tuple(map(ns, turn.times_ns))) for turn in in_model.turns),
            measured_ns=ns(in_model.measured_ns),
            quartiles_ns=(ns(in_model.quartiles_ns[0]), ns(in_model.quartiles_ns[1])),
            predicted_ns=ns(in_model.predicted_ns),
            interval_ns=(ns(in_model.interval_ns[0]), ns(in_model.interval_ns[1])),
        )

    def trace(self, original: Trace, iterations: int) -> Trace:
        """Return the trace of the model's computation.

        The result has at most the first `iterations`, and no communication, because the emulated device only
        computes: backward passes end with their computation. The largest dimension of each tensor is scaled (the rows
        of one with sparse gradients), to at least 1.
        """
        waits = original.workload.source != "module"
        workload = original.workload.model_copy(
            update={
                "source": "module",
                "parameters": tuple(map(self._parameter, original.workload.parameters)),
                "buffers": tuple(map(self._buffer, original.workload.buffers)),
            }
        )
        kept = min(iterations, *(len(rank.iterations) for rank in original.ranks))
        ranks = []
        for rank in original.ranks:
            scaled: list[Iteration] = []
            for iteration in rank.iterations[:kept]:
                start_ns = scaled[-1].end_ns if scaled else 0
                scaled.append(self._iteration(iteration, start_ns, with_communication=waits))
            ranks.append(RankTrace(rank=rank.rank, iterations=tuple(scaled)))
        return Trace(workload=workload, ranks=tuple(ranks))

    def _parameter(self, parameter: Parameter) -> Parameter:
        if not parameter.size_bytes:
            return parameter
        shape = list(parameter.shape)
        largest = 0 if parameter.sparse else max(range(len(shape)), key=shape.__getitem__, default=None)
        if largest is not None:
            shape[largest] = max(1, round(shape[largest] * self.byte_scale))
        item = parameter.size_bytes // math.prod(parameter.shape)
        return parameter.model_copy(update={"shape": tuple(shape), "size_bytes": item * math.prod(shape)})

    def _buffer(self, buffer: Buffer) -> Buffer:
        unit = math.gcd(buffer.size_bytes, LARGEST_ELEMENT_BYTES)  # a multiple of the size of one element
        scaled = max(1, round(buffer.size_bytes * self.byte_scale / unit)) * unit if unit else 0
        return buffer.model_copy(update={"size_bytes": scaled})

    def _iteration(self, recorded: Iteration, start_ns: int, *, with_communication: bool) -> Iteration:
        """Return an iteration of the model that starts at `start_ns`, without the time that a rank only waited."""

        def scaled(moment: int) -> int:
            return start_ns + round((moment - recorded.forward_start_ns) * self.dilation)

        ready = tuple(None if moment is None else scaled(moment) for moment in recorded.ready_ns)
        end = scaled(end_of_computation_ns(recorded, with_communication=with_communication))
        return Iteration(
            forward_start_ns=start_ns,
            forward_end_ns=scaled(recorded.forward_end_ns),
            backward_start_ns=scaled(recorded.backward_start_ns),
            backward_end_ns=end,
            end_ns=end + round((recorded.end_ns - recorded.backward_end_ns) * self.dilation),
            synchronized=False,
            ready_ns=ready,
        )


ORIGINAL = ScaleModel()
"""A model in the original scale."""
LARGEST_ELEMENT_BYTES = 16
"""Size of an element of complex128; the sizes of all other elements are divisors of this."""
