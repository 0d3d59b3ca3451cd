"""Measure the data of the figures on real ranks: most of an hour on an otherwise idle machine.

Writes to `figures/data`; run `make figures` afterwards.
"""

import argparse
import csv
from collections.abc import Callable, Sequence
from io import StringIO
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from ddplab import DistributedDataParallel, RankPool, Trace, models, record
from ddplab.cli.terminal_output import progress
from ddplab.operation_counter import measure_operations
from ddplab.reference.files.writing import write_atomically
from ddplab.simulator.workload.roofline import find_device
from ddplab.simulator.workload.trace_synthesis import synthesize
from tutorials.messages import time_in_pieces

from . import bucket_sizes, emulated_runs, overlap, scaling, skipped_synchronization
from .drawing import DATA

TOTAL_BYTES = 16 * 2**20
MESSAGES_BYTES = [2**power for power in range(12, 25)]
REPEATS = 9
EVERY = (1, 2, 4, 8)
STEPS = 400
INPUTS, WIDTH, CLASSES, BATCH = 32, 128, 10, 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements named on the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", choices=[*MEASUREMENTS, []], help="measurements to run; default: all")
    for name in options.parse_args(arguments).names or MEASUREMENTS:
        MEASUREMENTS[name]()
        print(f"measured: {name}")


def messages() -> None:
    """Write `gloo_messages.csv`: time to all-reduce the same bytes in messages of each size."""
    with RankPool(2) as pool:
        rows = [
            (size, median(pool.run(time_in_pieces, TOTAL_BYTES, size, REPEATS)[0]) / 1e6) for size in MESSAGES_BYTES
        ]
    _write_csv("gloo_messages.csv", ("message_bytes", "median_ms"), [(size, f"{ms:.3f}") for size, ms in rows])


def losses() -> None:
    """Write `skipped_losses.csv`: the loss of each iteration, by the number of iterations between averages."""
    with RankPool(2) as pool:
        by_every = {every: pool.run(train_skipping, every)[0] for every in EVERY}
    rows = [(every, step, f"{loss:.5f}") for every, of_run in by_every.items() for step, loss in enumerate(of_run)]
    _write_csv("skipped_losses.csv", ("sync_every", "iteration", "loss"), rows)


def train_skipping(rank: int, world_size: int, every: int) -> list[float]:
    """Train a classifier of random inputs, with one optimiser step for each synchronisation.

    Returns:
        The loss of each iteration, averaged over the ranks.
    """
    torch.manual_seed(0)
    teacher = torch.randn(INPUTS, CLASSES)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    inputs_of_rank = torch.Generator().manual_seed(100 + rank)
    losses = []
    for step in range(STEPS):
        inputs = torch.randn(BATCH, INPUTS, generator=inputs_of_rank)
        labels = (inputs @ teacher).argmax(1)
        is_last = (step + 1) % every == 0
        if is_last:
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
            (loss / every).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(inputs), labels)
                (loss / every).backward()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / world_size).tolist()


def anatomy() -> None:
    """Write `anatomy.json.gz`: a trace of one iteration of ResNet-18 with our reducer."""
    with RankPool(2) as pool:
        recorded = pool.run(record_reducer, "resnet18", 5.0, 4)[0]
    last = tuple(rank.model_copy(update={"iterations": rank.iterations[-1:]}) for rank in recorded.ranks)
    recorded.model_copy(update={"ranks": last}).save(DATA / "anatomy.json.gz")


def record_reducer(_rank: int, _world_size: int, model: str, cap_mb: float, iterations: int) -> Trace:
    """Record whole iterations, including the optimiser step."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    with record(ddp, model=model) as recording:
        for _ in range(iterations):
            optimizer.zero_grad()
            loss_fn(ddp).backward()
            optimizer.step()
    return recording.trace


def bert() -> None:
    """Write `bert_large.json.gz`, a synthesised trace; no time is measured."""
    synthesize(measure_operations("figures.bert:large"), find_device("v100-fp32")).save(DATA / "bert_large.json.gz")


def emulated() -> None:
    """Write `emulated_v100s.csv`: the real reducer's iteration in virtual time, for all runs of the paper's figures.

    Up to half an hour and 12 GB of memory; other load on the machine does not change the table.
    """
    figures = (overlap, bucket_sizes, scaling, skipped_synchronization)
    runs = list(dict.fromkeys(run for figure in figures for run in figure.runs()))
    with progress() as on_progress:
        rows = []
        for number, run in enumerate(runs):
            on_progress("virtual time", number, len(runs))
            rows.append([*emulated_runs.cells(run), run.emulate().iteration_ns])
    _write_csv(emulated_runs.PATH.name, (*emulated_runs.Run._fields, "iteration_ns"), rows)


MEASUREMENTS: dict[str, Callable[[], None]] = {
    "messages": messages,
    "losses": losses,
    "anatomy": anatomy,
    "bert": bert,
    "emulated": emulated,
}


def _write_csv(name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_atomically(DATA / name, text.getvalue().encode())


if __name__ == "__main__":
    main()
