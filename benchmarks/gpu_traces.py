"""Traces of training on this device, recorded and profiled in the same iterations, and how far both agree.

Each model trains on one rank: as a plain module, under our DistributedDataParallel and under torch's. The files of
torch's profiler are too large to keep; what is kept is the trace that `ddplab import kineto` makes of them.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ddplab import Trace, import_profile, models, record, run_ranks
from ddplab.reference.launch import rank_device
from ddplab.reference.recorder import described_parameters
from ddplab.reference.trace import Iteration

from .pairs import arguments, parse, save
from .recorder import PLAIN, WRAPPERS

WARM_UP = 5
"""Iterations before the recording: the rebuild of the buckets, and the choice of algorithms for convolutions."""


def record_beside_profiler(model: nn.Module, step: Callable[[], None], steps: int, path: Path | str) -> Trace:
    """Record training steps that torch's profiler watches too; the profiler writes to `path`.

    Args:
        model: The module that `step` trains, data-parallel or not; the default process group must exist.
        step: One forward and backward pass with what follows.
        steps: Number of steps.
        path: A name that ends in `.json`.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with (
        record(model, process_group=dist.group.WORLD) as recording,
        profile(activities=activities, record_shapes=True, schedule=lambda _: ProfilerAction.RECORD) as profiler,
    ):
        for _ in range(steps):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return recording.trace


def agreement(recorded: Trace, imported: Trace) -> dict[str, float]:
    """Return how far two traces of the same steps of one rank differ, as fractions of an iteration.

    Ready times and ends of all-reduces count from the start of their iteration, in the order of their times. The
    first and the last step are left out, because the profiler starts and ends beside them.

    Returns:
        Medians over the steps: of the iteration, of a ready time, of the last ready time, and, if both traces have
        buckets, of the end of an all-reduce; and the largest difference of any ready time.

    Raises:
        ValueError: The traces do not have the same steps, at least three, with the same gradients.
    """
    pairs = list(zip(recorded.ranks[0].iterations, imported.ranks[0].iterations, strict=True))[1:-1]
    if not pairs:
        raise ValueError("expected at least 3 steps, because the first and the last are left out")

    def apart(read: Callable[[Iteration], list[int]]) -> list[list[float]]:
        return [
            [abs(a - b) / theirs.duration_ns for a, b in zip(read(mine), read(theirs), strict=True)]
            for mine, theirs in pairs
        ]

    ready = apart(lambda one: sorted(ns - one.forward_start_ns for ns in one.ready_ns if ns is not None))
    found = {
        "iteration": median(chain(*apart(lambda one: [one.duration_ns]))),
        "ready": median(chain(*ready)),
        "last ready": median(differences[-1] for differences in ready),
        "ready, largest": max(chain(*ready)),
    }
    if recorded.layouts and imported.layouts:
        done = apart(lambda one: sorted(bucket.done_ns - one.forward_start_ns for bucket in one.buckets))
        found["all-reduce done"] = median(chain(*done))
    return found


JUDGED = ("iteration", "ready", "last ready")
"""Which of these must be within the limit; a single one of hundreds of ready times need not."""


def trace_model(_rank: int, _world_size: int, model: str, batch: int | None, steps: int, out: str) -> dict[str, dict]:
    """Record a model under each wrapper, and write the traces to a folder; returns the agreements by wrapper.

    The files are called `MODEL_batchN_WRAPPER_recorded.json.gz` and `..._imported.json.gz`. Without a batch size, the
    model has its own.
    """
    agreements = {}
    for wrapper, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        make = models.resolve(model)
        with rank_device():
            module, loss_fn = make() if batch is None else make(batch=batch)
        size = getattr(loss_fn, "batch", None)
        wrapped = module if wrapper == PLAIN else wrap(module)  # its parameters keep their names
        step = partial(_step, wrapped, loss_fn, torch.optim.SGD(module.parameters(), lr=1e-3))
        for _ in range(WARM_UP):
            step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            recorded = record_beside_profiler(wrapped, step, steps, path)
            parameters = described_parameters(module)
            imported = import_profile([path], parameters=parameters, model=model).trace
        workload = recorded.workload.model_copy(update={"model": model, "batch": size})
        name = f"{model}_batch{size}_{wrapper}"
        recorded.model_copy(update={"workload": workload}).save(Path(out) / f"{name}_recorded.json.gz")
        imported.save(Path(out) / f"{name}_imported.json.gz")
        times_ms = {
            source: median(one.duration_ns for one in trace.ranks[0].iterations[1:-1]) / 1e6
            for source, trace in (("recorded_ms", recorded), ("imported_ms", imported))
        }
        agreements[name] = agreement(recorded, imported) | times_ms
        del wrapped, module, loss_fn, step
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return agreements


def _step(wrapped: nn.Module, loss_fn: models.Loss, optimizer: torch.optim.Optimizer) -> None:
    loss_fn(wrapped).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Print one line for each trace; exit with one line if recording and profile of one differ by too much."""
    parser = arguments(__doc__, "resnet50")
    parser.add_argument("--batches", nargs="+", type=int, help="batch sizes (default: that of the model)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--within", type=float, default=0.01, help="largest difference, as a fraction of an iteration"
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu_traces"))
    options = parse(parser)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    print(__doc__)
    for model in options.models:
        for batch in options.batches or [None]:
            what = (model, batch, options.steps, str(options.out))
            (of_model,) = run_ranks(trace_model, 1, *what, backend=options.backend)
            found |= of_model
            save(options.json, found)
            for name, values in of_model.items():
                print(f"{name:40} " + ", ".join(f"{word} {value:.4g}" for word, value in values.items()), flush=True)
    apart = [
        f"{name}: {word} differs by {values[word]:.2%}"
        for name, values in found.items()
        for word in JUDGED
        if values[word] > options.within
    ]
    if apart:
        sys.exit(f"recording and profile differ by more than {options.within:.0%}: {'; '.join(apart)}")


if __name__ == "__main__":
    main()
