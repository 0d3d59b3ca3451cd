"""The main job, end to end: two real models, predicted and then trained, the answers side by side."""

from collections.abc import Sequence
from pathlib import Path

from reference.bucketing import Order
from reference.launch import Progress, RankPool
from reference.trace import Trace

from .answers.plots import validation_figure
from .fabric import Fabric
from .foretell import predict_one
from .report import Configuration, Report, model_folder
from .validate import validate

MODELS = ("resnet50", "mlp")
CAPS_MB = (0.5, 1.0, 5.0, 25.0)
ORDERS: tuple[Order, ...] = ("ready", "reverse", "forward")
SINGLE = Configuration(float("inf"), "ready")  # in one bucket, order plays no part
CONFIGURATIONS = [Configuration(cap, order) for cap in CAPS_MB for order in ORDERS] + [SINGLE]
SHOWN = Configuration(25.0, "ready")


def demo(
    out: Path, *, models: Sequence[str] = MODELS, world_size: int = 2, repeat: int = 3, on_progress: Progress
) -> Report:
    """Validate each model on real ranks; leaves tables, figure, timelines and traces in `out`.

    Raises:
        RankError: A rank failed.
    """
    with RankPool(world_size) as pool:
        report = validate(pool, models, CONFIGURATIONS, out=out, repeat=repeat, on_progress=on_progress)
    validation_figure(report.to_frame()).savefig(out / "demo.png", dpi=120)
    for model in models:
        _save_timeline(model_folder(out, model), world_size)
    return report


def _save_timeline(folder: Path, world_size: int) -> None:
    trace = Trace.load(folder / "trace.json.gz")
    prediction = predict_one(trace, Fabric.load(folder / "fabric.json"), SHOWN, world_size)
    prediction.save_perfetto(folder / "perfetto.json")
