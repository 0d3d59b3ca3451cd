"""Case files of training: `inputs` is all that a prediction knows, `truth` what it is held against."""

from typing import Literal, Self

from pydantic import Field, model_validator

from reference.schema import Schema

from .all_reduce_case import Gpus, MeasuredTable, Name, Positive


class Sourced(Schema):
    """A constant, and where it comes from."""

    value: float = Positive
    source: str = Field(
        min_length=1, description="paper, file of a repository, data sheet; never the truth of a case"
    )


class Repeat(Schema):
    """A deeper model: one of the recorded model's blocks, so many times more."""

    block: str = Name
    times: int = Field(ge=1)


class OneGpu(Schema):
    """DDP on one GPU, where nothing is sent."""

    bucket_mb: float = Positive
    per_s: int = Field(ge=1, description="examples a second, cut to a whole number")


class Model(Schema):
    """A model that was trained: when its gradients are ready, and how fast one GPU is."""

    name: str = Name
    gradients: str = Field(description="a file in validation/data")
    repeat: Repeat | None = None
    no_ddp_per_s: int = Field(ge=1, description="examples a second without DDP, cut to a whole number")
    one_gpu: tuple[OneGpu, ...] = Field(min_length=1)


class Link(Schema):
    """A level of links, innermost first; see `simulator.fabric.topology`."""

    name: str = Name
    members: int | None = Field(default=None, ge=1)
    latency_us: float = Field(ge=0, allow_inf_nan=False)
    gb_per_s: float = Positive
    source: str = Name


class IterationInputs(Schema):
    """All that a prediction of iterations knows."""

    batch: int = Field(ge=1, description="examples a GPU and iteration")
    models: tuple[Model, ...] = Field(min_length=1)
    tables: tuple[MeasuredTable, ...] = ()
    links: tuple[Link, ...] = Field(default=(), description="for numbers of GPUs without a table")
    compute_slowdown: Sourced
    gpu_spread: Sourced = Field(description="standard deviation of the speeds of equal GPUs, a fraction")


class TrainedIteration(Schema):
    """A measured iteration."""

    model: str = Name
    bucket_mb: float = Positive
    gpus: int = Gpus
    per_s: int = Field(ge=1, description="examples a second of one GPU, cut to a whole number")


class IterationsCase(Schema):
    """Iterations of torch's DDP on several numbers of GPUs, with several bucket sizes."""

    kind: Literal["iterations"]
    name: str = Name
    source: str = Name
    inputs: IterationInputs
    truth: tuple[TrainedIteration, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_what_is_asked(self) -> Self:
        known = {(model.name, one.bucket_mb) for model in self.inputs.models for one in model.one_gpu}
        for number, row in enumerate(self.truth):
            if (row.model, row.bucket_mb) not in known:
                raise ValueError(
                    f"truth[{number}]: expected a model and bucket size of inputs.models, "
                    f"got {row.model} at {row.bucket_mb:g} MB"
                )
        return self


class Throughput(Schema):
    """Training as a whole."""

    gpus: int = Gpus
    per_s: float = Field(gt=0, allow_inf_nan=False, description="samples a second of all GPUs")
    spread: float = Field(ge=0, description="published spread of it, samples a second")


class MergingFigures(Schema):
    """What the merging rule takes an all-reduce to cost; a setting of the job."""

    gpus: int = Gpus
    start_up_us: float = Positive
    ns_per_byte: float = Positive


class Merging(Schema):
    """How the job merged its gradients."""

    below_elements: int = Field(ge=0, description="groups smaller than that are merged in any case")
    figures: tuple[MergingFigures, ...] = Field(min_length=1)
    source: str = Name


class ScheduleInputs(Schema):
    """All that a prediction of schedules knows."""

    gradients: str = Field(description="a file in validation/data")
    samples: int = Field(ge=1, description="samples a GPU and iteration")
    one_gpu_per_s: float = Positive
    node_gpus: int = Gpus
    no_overlap: tuple[Throughput, ...] = Field(min_length=1, description="one all-reduce after the backward pass")
    hop_us: Sourced = Field(description="latency of a hop of a ring over several nodes")
    hop_inside_us: Sourced = Field(description="latency of a hop of a ring inside a node")
    compute_slowdown: Sourced
    copy_us: Sourced = Field(description="what merging costs a gradient, on the GPU that computes")
    merging: Merging


class TrainedSchedule(Throughput):
    """A measured schedule."""

    schedule: Literal["per tensor", "merged"]


class SchedulesCase(Schema):
    """Three ways to send the gradients of one job."""

    kind: Literal["schedules"]
    name: str = Name
    source: str = Name
    inputs: ScheduleInputs
    truth: tuple[TrainedSchedule, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_what_is_asked(self) -> Self:
        calibrated = [row.gpus for row in self.inputs.no_overlap]
        settings = [row.gpus for row in self.inputs.merging.figures]
        for number, row in enumerate(self.truth):
            for field, known in (("no_overlap", calibrated), ("merging.figures", settings)):
                if row.gpus not in known:
                    raise ValueError(f"truth[{number}].gpus: expected one of inputs.{field}, {known}, got {row.gpus}")
        return self
