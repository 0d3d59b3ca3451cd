"""Case files: published measurements, split into the inputs of a prediction and the truth it is compared with.

One TOML file in `validation/cases` is one case, and its field `kind` selects the class here that defines all other
fields: `AllReduceCase` for part (a) of the score, `IterationsCase` for (b), `SchedulesCase` for (c), `ScalingCase`
for (d), `BucketCapsCase` for (e), `WeakScalingCase` for (i). Every constant carries its source.
"""

import json
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ddplab.reference.files.reading import Schema, first_problem
from ddplab.simulator.fabric import TopologyFile

Positive = Field(gt=0, allow_inf_nan=False)
Gpus = Field(ge=1, description="number of GPUs, one rank each")
Name = Field(min_length=1)
ADDED_LATER = Field(
    default=False, description="whether the constants of the simulator were set before the case existed"
)


class MeasuredTable(Schema):
    """Measured all-reduce times on one number of GPUs, as nccl-tests prints them (out of place)."""

    gpus: int = Field(ge=2)
    bytes: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=2, description="message sizes, increasing")
    us: tuple[Annotated[float, Positive], ...] = Field(description="microseconds, one time for each size")

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        if len(self.us) != len(self.bytes):
            raise ValueError(f"us: expected {len(self.bytes)} times, one for each of bytes, got {len(self.us)}")
        if any(small >= large for small, large in pairwise(self.bytes)):
            raise ValueError(f"bytes: expected increasing sizes, got {list(self.bytes)}")
        return self


class Question(Schema):
    """One prediction task: the tables that are inputs, and the tables to predict."""

    title: str = Name
    fit: tuple[int, ...] = Field(description="numbers of GPUs whose tables are inputs; empty: the links alone are")
    predict: tuple[int, ...] = Field(min_length=1, description="numbers of GPUs whose tables are the truth")
    topology: TopologyFile | None = Field(
        default=None, description="the links, as in a topology file; absent: all links are equal"
    )
    truth_below_bytes: int | None = Field(
        default=None, ge=1, description="larger messages are an input, so they are not compared; absent: none is"
    )
    counts: bool = Field(default=True, description="false: shown, but not compared with the limit")

    @model_validator(mode="after")
    def _predicts_more_gpus(self) -> Self:
        if not self.fit and self.topology is None:
            raise ValueError("fit: expected numbers of GPUs or, in topology, links, got neither")
        if self.fit and min(self.predict) <= max(self.fit):
            raise ValueError(f"predict: expected more GPUs than the {max(self.fit)} in fit, got {min(self.predict)}")
        return self


class AllReduceCase(Schema):
    """All-reduce tables of one system; each question splits them into inputs and truth."""

    kind: Literal["all_reduce"]
    name: str = Name
    source: str = Name
    from_bytes: int = Field(default=262_144, ge=0, description="smaller messages are shown, but do not count")
    added_later: bool = ADDED_LATER
    gpus_per_node: int = Field(default=8, ge=1, description="GPUs of one node")
    tables: tuple[MeasuredTable, ...] = Field(min_length=1)
    questions: tuple[Question, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _questions_have_tables(self) -> Self:
        measured = [table.gpus for table in self.tables]
        if len(set(measured)) < len(measured):
            raise ValueError(f"tables: expected one table for each number of GPUs, got {measured}")
        titles = [question.title for question in self.questions]
        if len(set(titles)) < len(titles):
            raise ValueError(f"questions: expected different titles, got {titles}")
        for number, question in enumerate(self.questions):
            for gpus in (*question.fit, *question.predict):
                if gpus not in measured:
                    raise ValueError(f"questions[{number}]: expected tables of {measured} GPUs, got {gpus}")
        return self


class SourcedValue(Schema):
    """A constant and its source."""

    value: float = Positive
    source: str = Field(
        min_length=1, description="a paper, a file of a repository or a data sheet; never the truth of a case"
    )


class RepeatedBlock(Schema):
    """Turns the recorded model into a deeper one: a block of it, repeated."""

    block: str = Name
    times: int = Field(ge=1, description="additional copies of the block")


class OneGpuSpeed(Schema):
    """Speed of DDP on one GPU, without communication."""

    bucket_mb: float = Positive
    per_s: int = Field(ge=1, description="examples a second, rounded down to a whole number")


class Model(Schema):
    """A trained model: its ready times and its speed on one GPU."""

    name: str = Name
    gradients: str = Field(description="ready times: name of a file in validation/data")
    repeat: RepeatedBlock | None = None
    no_ddp_per_s: int = Field(ge=1, description="examples a second without DDP, rounded down to a whole number")
    one_gpu: tuple[OneGpuSpeed, ...] = Field(min_length=1)


class Link(Schema):
    """One level of links, innermost first; see `simulator.fabric.topology`."""

    name: str = Name
    members: int | None = Field(default=None, ge=1)
    latency_us: float = Field(ge=0, allow_inf_nan=False)
    gb_per_s: float = Positive
    source: str = Name


class IterationInputs(Schema):
    """All inputs for predicting iterations."""

    batch: int = Field(ge=1, description="examples on each GPU in an iteration")
    models: tuple[Model, ...] = Field(min_length=1)
    tables: tuple[MeasuredTable, ...] = ()
    links: tuple[Link, ...] = Field(default=(), description="for numbers of GPUs without a table")
    compute_slowdown: SourcedValue
    gpu_spread: SourcedValue = Field(description="standard deviation of the speeds of equal GPUs, as a fraction")


class MeasuredIteration(Schema):
    """Measured speed of one model with one bucket cap on one number of GPUs."""

    model: str = Name
    bucket_mb: float = Positive
    gpus: int = Gpus
    per_s: int = Field(ge=1, description="examples a second on one GPU, rounded down to a whole number")


class IterationsCase(Schema):
    """Iterations of torch's DDP with several bucket caps on several numbers of GPUs."""

    kind: Literal["iterations"]
    name: str = Name
    source: str = Name
    inputs: IterationInputs
    truth: tuple[MeasuredIteration, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _truth_has_inputs(self) -> Self:
        known = {(model.name, one.bucket_mb) for model in self.inputs.models for one in model.one_gpu}
        for number, row in enumerate(self.truth):
            if (row.model, row.bucket_mb) not in known:
                raise ValueError(
                    f"truth[{number}]: expected a model and bucket size of inputs.models, "
                    f"got {row.model} at {row.bucket_mb:g} MB"
                )
        return self


class Throughput(Schema):
    """Measured throughput of a training run on all its GPUs together."""

    gpus: int = Gpus
    per_s: float = Field(gt=0, allow_inf_nan=False, description="samples a second on all GPUs together")
    spread: float = Field(ge=0, allow_inf_nan=False, description="its published spread, samples a second")


class MergingCosts(Schema):
    """Cost of an all-reduce as configured for the merging rule of the measured training run."""

    gpus: int = Gpus
    start_up_us: float = Positive
    ns_per_byte: float = Positive


class MergingRule(Schema):
    """How the measured training run merged its gradients."""

    below_elements: int = Field(ge=0, description="smaller groups are merged in any case")
    figures: tuple[MergingCosts, ...] = Field(min_length=1)
    source: str = Name


class ScheduleInputs(Schema):
    """All inputs for predicting schedules."""

    gradients: str = Field(description="ready times: name of a file in validation/data")
    samples: int = Field(ge=1, description="samples on each GPU in an iteration")
    one_gpu_per_s: float = Positive
    node_gpus: int = Gpus
    no_overlap: tuple[Throughput, ...] = Field(min_length=1, description="one all-reduce after the backward pass")
    hop_us: SourcedValue = Field(description="latency of one hop of a ring over several nodes")
    hop_inside_us: SourcedValue = Field(description="latency of one hop of a ring inside a node")
    compute_slowdown: SourcedValue
    copy_us: SourcedValue = Field(description="time on the GPU to merge one gradient")
    merging: MergingRule


class MeasuredSchedule(Throughput):
    """Measured throughput of one schedule."""

    schedule: Literal["per tensor", "merged"]


class SchedulesCase(Schema):
    """Three schedules for the gradients of one training run: no overlap (an input), per tensor, merged."""

    kind: Literal["schedules"]
    name: str = Name
    source: str = Name
    inputs: ScheduleInputs
    truth: tuple[MeasuredSchedule, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _truth_has_inputs(self) -> Self:
        calibrated = [row.gpus for row in self.inputs.no_overlap]
        settings = [row.gpus for row in self.inputs.merging.figures]
        for number, row in enumerate(self.truth):
            for field, known in (("no_overlap", calibrated), ("merging.figures", settings)):
                if row.gpus not in known:
                    raise ValueError(f"truth[{number}].gpus: expected one of inputs.{field}, {known}, got {row.gpus}")
        return self


class NodeRate(Schema):
    """Bus bandwidth of large all-reduces inside a node, by the number of GPUs that take part."""

    gpus: int = Gpus
    gb_per_s: float = Positive


class Node(Schema):
    """A node of equal GPUs."""

    name: str = Name
    memory_gb_per_s: float = Field(gt=0, allow_inf_nan=False, description="memory bandwidth of a GPU, data sheet")
    rates: tuple[NodeRate, ...] = Field(default=(), description="of its links, one for each number of GPUs")
    tables: tuple[MeasuredTable, ...] = Field(default=(), description="measured all-reduces, instead of rates")
    source: str = Name


class NodeInputs(Schema):
    """Constants for predicting iterations on the GPUs of one node."""

    nodes: tuple[Node, ...] = Field(min_length=1)
    link_efficiency: SourcedValue = Field(description="part of a data sheet's rate that all-reduces reach")
    hop_us: SourcedValue = Field(description="latency of one hop of a ring inside a node")

    @model_validator(mode="after")
    def _nodes_have_one_kind_of_figures(self) -> Self:
        for node in self.nodes:
            if bool(node.rates) == bool(node.tables):
                raise ValueError(f"nodes.{node.name}: expected either rates or tables, got both or neither")
        return self

    def node(self, name: str) -> Node:
        """The node of this name.

        Raises:
            ValueError: There is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise ValueError(f"node: expected one of {', '.join(node.name for node in self.nodes)}, got {name}")


class OneGpuRun(Schema):
    """Training on one GPU without data parallelism."""

    name: str = Name
    node: str = Name
    model: str = Field(description="module:callable, as for --model, with the batch of the training")
    tflops: float = Field(gt=0, allow_inf_nan=False, description="peak rate in the precision used, data sheet")
    samples: float = Field(gt=0, allow_inf_nan=False, description="samples (or tokens) on each GPU in an iteration")
    per_s: float = Field(gt=0, allow_inf_nan=False, description="samples (or tokens) a second on one GPU")


class ScalingInputs(NodeInputs):
    """All inputs for predicting the speed on several GPUs from that on one."""

    one_gpu: tuple[OneGpuRun, ...] = Field(min_length=1)


class MeasuredScaling(Schema):
    """Measured speed of the training of one name in `one_gpu` on several GPUs together."""

    run: str = Name
    gpus: int = Field(ge=2)
    per_s: float = Positive


class ScalingCase(Schema):
    """torch's DDP on the GPUs of one node, compared with one of its GPUs."""

    kind: Literal["scaling"]
    name: str = Name
    source: str = Name
    inputs: ScalingInputs
    truth: tuple[MeasuredScaling, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _truth_has_inputs(self) -> Self:
        known = [run.name for run in self.inputs.one_gpu]
        if len(set(known)) < len(known):
            raise ValueError(f"inputs.one_gpu: expected different names, got {known}")
        for run in self.inputs.one_gpu:
            self.inputs.node(run.node)
        for number, row in enumerate(self.truth):
            if row.run not in known:
                raise ValueError(f"truth[{number}].run: expected one of inputs.one_gpu, {known}, got {row.run}")
        return self


class WeakScalingRun(Schema):
    """Training on one GPU without data parallelism, and how it is made data-parallel."""

    name: str = Name
    model: str = Field(description="module:callable, as for --model, with the batch of the training")
    tflops: float = Field(gt=0, allow_inf_nan=False, description="peak rate in the precision used, data sheet")
    bucket_mb: float | None = Field(default=None, gt=0, description="bucket cap; absent: torch's default, 25 after 1")
    ms: float = Field(gt=0, allow_inf_nan=False, description="iteration on `gpus` GPUs")
    gpus: int = Field(default=1, ge=1, description="number of GPUs of the known iteration")
    optimizer_ms: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="part of it after the backward pass; absent: SGD's"
    )
    broadcast_buffers: bool = Field(default=True, description="whether DDP broadcasts buffers")


class WeakScalingInputs(Schema):
    """All inputs for predicting iterations on several GPUs: what a buyer knows."""

    gpu: str = Field(min_length=1, description="the GPU's name, by which its usual costs are known")
    memory_gb_per_s: float = Field(gt=0, allow_inf_nan=False, description="memory bandwidth of a GPU, data sheet")
    topology: TopologyFile
    runs: tuple[WeakScalingRun, ...] = Field(min_length=1)


class MeasuredWeakScaling(Schema):
    """Measured iterations of one run on several GPUs, each with the batch of one."""

    run: str = Name
    gpus: int = Field(ge=2)
    ms: tuple[Annotated[float, Positive], ...] = Field(min_length=1, description="median of each repetition")


class WeakScalingCase(Schema):
    """Data-parallel training on several GPUs and nodes, predicted by the documented commands."""

    kind: Literal["weak_scaling"]
    name: str = Name
    source: str = Name
    added_later: bool = ADDED_LATER
    inputs: WeakScalingInputs
    truth: tuple[MeasuredWeakScaling, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _truth_has_inputs(self) -> Self:
        known = {run.name: run.gpus for run in self.inputs.runs}
        for number, row in enumerate(self.truth):
            if row.run not in known:
                raise ValueError(f"truth[{number}].run: expected one of inputs.runs, {list(known)}, got {row.run}")
            if row.gpus <= known[row.run]:
                raise ValueError(
                    f"truth[{number}].gpus: expected more than the {known[row.run]} of {row.run}, got {row.gpus}"
                )
        return self


class BucketRule(Schema):
    """A reducer of several GPUs that was run with several bucket caps."""

    name: str = Name
    node: str = Name
    gpus: int = Field(ge=2)
    model: str = Field(description="module:callable, as for --model, with the batch of the training")
    tflops: float = Field(gt=0, allow_inf_nan=False, description="peak rate in the precision used, data sheet")
    rule: Literal["at most the cap", "reaches the cap"] = Field(
        description="when a bucket is full: before the gradient that would exceed the cap, or (torch) after the one "
        "that reaches it"
    )
    compute_ms: float = Field(gt=0, allow_inf_nan=False, description="iteration without communication")
    optimizer_ms: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="part of it after the backward pass; absent: SGD's"
    )
    source: str = Name


class BucketCapsInputs(NodeInputs):
    """All inputs for predicting the effect of the bucket cap."""

    reducers: tuple[BucketRule, ...] = Field(min_length=1)


class MeasuredCap(Schema):
    """Measured iteration of a reducer with one bucket cap."""

    reducer: str = Name
    cap_mb: float = Positive
    ms: float = Positive
    spread_ms: float = Field(ge=0, allow_inf_nan=False, description="published standard deviation; 0: not published")


class BucketCapsCase(Schema):
    """Iterations of reducers with several bucket caps."""

    kind: Literal["bucket_caps"]
    name: str = Name
    source: str = Name
    inputs: BucketCapsInputs
    truth: tuple[MeasuredCap, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _truth_has_inputs(self) -> Self:
        known = [reducer.name for reducer in self.inputs.reducers]
        for reducer in self.inputs.reducers:
            self.inputs.node(reducer.node)
        for number, row in enumerate(self.truth):
            if row.reducer not in known:
                raise ValueError(
                    f"truth[{number}].reducer: expected one of inputs.reducers, {known}, got {row.reducer}"
                )
        return self


Case = AllReduceCase | IterationsCase | SchedulesCase | ScalingCase | BucketCapsCase | WeakScalingCase
KINDS: dict[str, type[Case]] = {
    "all_reduce": AllReduceCase,
    "iterations": IterationsCase,
    "schedules": SchedulesCase,
    "scaling": ScalingCase,
    "bucket_caps": BucketCapsCase,
    "weak_scaling": WeakScalingCase,
}
ADVICE = "see validation/README.md"


def load_case(path: Path) -> Case:
    """Read and check a case file.

    Raises:
        ValueError: The file is missing, is not TOML or is not a valid case. The message is one line with file, field
            and reason.
    """
    try:
        written = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}; {ADVICE}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}; {ADVICE}") from None
    kind = written.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{path}: kind: expected one of {', '.join(KINDS)}, got {kind!r}; {ADVICE}")
    try:
        return KINDS[kind].model_validate_json(json.dumps(written, default=str))
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}; {ADVICE}") from None
