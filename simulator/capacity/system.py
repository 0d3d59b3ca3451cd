"""System: a model on GPUs of one kind and one network, whose iterations are predicted for any number of GPUs.

Each prediction is made once, because limits, needs and changes share several.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...reference.trace import Trace
from ..cost_terms import Inputs
from ..predicted_iteration import Prediction
from ..prediction import predict
from ..schedule.policy import Policy
from ..workload.default_gpu_costs import Assumed, completed
from ..workload.trace_synthesis import with_batch
from ..workload.variation import Straggler

Band = tuple[float, float]
"""Both ends of an interval that holds nine in ten true values."""


@dataclass(frozen=True)
class System:
    """A model on GPUs of one kind and one network.

    Attributes:
        name: Name of the system.
        trace: Recorded or synthesised iterations of one GPU or several.
        given: The user's inputs of predictions.
        stragglers: Slow ranks.
        measured_ns: Measured median iteration times by number of GPUs.
        measured_policy: Settings of the measured runs. None: those of `given`.
        assume: Whether costs that were not given take their usual values; see `assume_gpu`.
        rebatched: Returns the trace with a multiple of its batch. None: see `trace_synthesis.with_batch`.
    """

    name: str
    trace: Trace
    given: Inputs
    stragglers: Sequence[Straggler] = ()
    measured_ns: Mapping[int, int] | None = None
    measured_policy: Policy | None = None
    assume: bool = True
    rebatched: Callable[[float], Trace] | None = None
    _known: list[tuple[tuple[object, ...], Prediction]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def with_batch(self, multiple: float) -> Trace | None:
        """Return the trace with this multiple of the batch; None: it was recorded with communication."""
        if self.rebatched is not None:
            return self.rebatched(multiple)
        return with_batch(self.trace, multiple) if self.trace.workload.source == "module" else None

    @cached_property
    def used(self) -> Inputs:
        """The inputs, completed by the usual costs of the GPU."""
        return self.given._replace(fabric=self._completed.fabric, variation=self._completed.variation)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed about the GPU; one sentence each."""
        return self._completed.sentences

    @cached_property
    def _completed(self) -> Assumed:
        fabric, variation, _ = self.given
        return completed(self.trace, fabric, variation, assume=self.assume, cuda_graph=False)  # `predict` replays

    def at(self, world_size: int) -> Prediction:
        """Predict an iteration, corrected by the measured ones."""
        return self.changed(world_size, self.used)

    def changed(
        self,
        world_size: int,
        inputs: Inputs,
        *,
        trace: Trace | None = None,
        stragglers: Sequence[Straggler] | None = None,
    ) -> Prediction:
        """Predict an iteration with other inputs; measured iterations are those of the unchanged system."""
        slow = self.stragglers if stragglers is None else stragglers
        return self._anchored(world_size, self._predicted(world_size, inputs, trace or self.trace, slow))

    def _predicted(
        self, world_size: int, inputs: Inputs, trace: Trace, stragglers: Sequence[Straggler]
    ) -> Prediction:
        asked = world_size, among(stragglers, world_size), trace, inputs  # fabrics have no hash
        for about, known in self._known:
            if about == asked:
                return known
        made = predict(
            trace,
            inputs.fabric,
            world_size=world_size,
            policy=inputs.policy,
            variation=inputs.variation,
            stragglers=asked[1],
            assume=False,
        )
        self._known.append((asked, made))
        return made

    def _anchored(self, world_size: int, prediction: Prediction) -> Prediction:
        if not self.measured_ns:
            return prediction
        inputs = self.used._replace(policy=self.measured_policy or self.used.policy)
        few = {ranks: self._predicted(ranks, inputs, self.trace, ()) for ranks in {1, *self.measured_ns}}
        return prediction.anchored(world_size, self.measured_ns, few)  # no rank of these was slow on purpose


def among(stragglers: Sequence[Straggler], world_size: int) -> Sequence[Straggler]:
    """Return the slow ranks that exist on this number of GPUs."""
    return [one for one in stragglers if one.rank is None or one.rank < world_size]
