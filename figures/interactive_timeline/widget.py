"""The widget for notebooks: the kernel answers every question of the reader with `simulator.predict`."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ddplab.reference.bucketing import Order
from ddplab.reference.files.reading import in_one_line
from ddplab.reference.trace import Trace
from ddplab.simulator.fabric import Fabric
from ddplab.simulator.predicted_iteration import Prediction

from .browser_code import script, style
from .simulate_choices import EVERY_CHOICE, Choices, InteractiveIteration, Question, Start

try:
    import anywidget
    import traitlets
except ImportError:
    raise ImportError("InteractiveTimeline needs anywidget; run `pip install 'ddplab[tutorials]'`") from None


def default_fabric(gbit_per_s: float) -> Fabric:
    """Return a ring with 20 microseconds a hop; copies and launches are free."""
    return Fabric.from_alpha_beta(alpha_ns=20_000, bytes_per_s=gbit_per_s * 1e9 / 8)


class InteractiveTimeline(anywidget.AnyWidget):
    """One iteration of data-parallel training, whose bucket boundaries the reader can drag.

    Args:
        trace: Recorded iterations; of each rank, the one of median duration is shown.
        fabric: Returns the fabric for a bandwidth in Gbit/s.
        title: Name of the model. None: the one in the trace.
        bucket_cap_mb: Bucket cap at the start, in MiB.
        gbit_per_s: Bandwidth at the start, in Gbit/s.
        world_size: Number of ranks at the start.
        order: Order in which parameters fill buckets at the start: "ready", "reverse" or "forward".
        choices: Values that the reader can choose. Start values that are missing are added.

    Attributes:
        plan: The buckets that are shown, as `simulator.predict` takes them: parameter indices by bucket.
        prediction: The prediction for everything that is chosen.

    Raises:
        ImportError: anywidget is not installed.
        ValueError: A start value is invalid, or does not fit the trace or the fabric.
    """

    _esm = script()
    _css = style()
    data = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        trace: Trace,
        fabric: Callable[[float], Fabric] = default_fabric,
        *,
        title: str | None = None,
        bucket_cap_mb: float = 25,
        gbit_per_s: float = 25,
        world_size: int = 16,
        order: Order = "ready",
        choices: Choices = EVERY_CHOICE,
    ) -> None:
        start = Start(bucket_cap_mb, gbit_per_s, world_size, order)
        self._iteration = InteractiveIteration(
            trace, fabric, title=in_one_line(title or trace.workload.model), choices=choices, start=start
        )
        self._answered = lru_cache(maxsize=2)(self._answer)  # the start layout is in every question
        first = self._iteration.first_question
        self.plan = first.plan
        self.prediction, answer = self._answered(first)
        super().__init__(data=self._iteration.document() | {"answer": answer})
        self.on_msg(self._reply)

    def __repr__(self) -> str:
        buckets = "one bucket" if len(self.plan) == 1 else f"{len(self.plan)} buckets"
        return (
            f"InteractiveTimeline of {self._iteration.title}: {buckets}, iteration "
            f"{self.prediction.iteration_ns / 1e6:.1f} ms, exposed communication "
            f"{self.prediction.exposed_comm_ns / 1e6:.1f} ms"
        )

    def _reply(self, _widget: object, message: dict[str, Any], _buffers: object) -> None:
        """Answer a question about a layout and the start layout; an error is answered with its first line."""
        about = {"id": message.get("id")}
        try:
            document = message.get("question", {})
            question = Question.of(document)
            prediction, answer = self._answered(question)
            _, start = self._answered(Question.of(document | {"plan": document.get("start", question.plan)}))
        except Exception as error:  # noqa: BLE001  # the fabric is a function of the user, who reads the error in the widget
            self.send({**about, "error": f"{type(error).__name__}: {error}".splitlines()[0]})
            return
        self.plan, self.prediction = question.plan, prediction
        self.send({**about, "answer": answer, "start": start})

    def _answer(self, question: Question) -> tuple[Prediction, dict[str, object]]:
        prediction = self._iteration.predict(question)
        return prediction, self._iteration.answer(question, prediction)
