"""Both real reducers in virtual time, with the rule's caps beside torch's default.

`python -m validation.confirmed_caps` chooses twenty trainings on 16 GPUs from `data/bucket_caps.csv` where the rule
of docs/bucket_size.md promises at least 5 %, and as many where it promises less, and runs ddplab's reducer and
torch's class with both, in a scale model: tensors and caps have a sixteenth of their bytes, each of which takes 16
times as long. It fails if the rule's caps are slower than the default in more than one in ten of the former, or
slower by `NOISE` where any gain is promised.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from ddplab.cli.terminal_output import show_table
from ddplab.emulation.emulate import emulate, emulated_fabric
from ddplab.reference.bucketing import DEFAULT_BUCKET_CAP_MB, DEFAULT_FIRST_BUCKET_MB
from ddplab.simulator import Fabric
from ddplab.simulator.fabric import Timing
from ddplab.simulator.tuning.bucket_plan import DEFAULT

from .bucket_cap_study import Row, described, rows_of_table
from .scale_model import ScaleModel

GPUS = 16
CASES = 20
OF_ONE = 3
"""Cases with one model, and on one system, at most."""
SCALE = ScaleModel(byte_scale=1 / 16)
"""So that the gradients of 16 ranks fit the memory of a laptop."""
PROMISED = 0.05
NOISE = 0.005
RULE = "rule x 1"
SIZES = [round(2 ** (power / 4)) for power in range(24, 132)]
"""Bytes of the all-reduces in the scale model's table, to 8 GB."""


def promised(row: Row) -> float:
    """The part of the default's time that the rule saves, as predicted."""
    return 1 - float(row[RULE]) / float(row[DEFAULT])


def chosen(rows: Sequence[Row], *, promising: bool) -> list[Row]:
    """Return cases, those with the largest and the smallest promises in turn."""
    some = [row for row in rows if row["gpus"] == str(GPUS) and (promised(row) >= PROMISED) == promising]
    some.sort(key=promised)
    used, cases = Counter[str](), list[Row]()
    while some and len(cases) < CASES:
        row = some.pop(-(len(cases) % 2))
        if max(used[row["model"]], used[row["system"]]) < OF_ONE:
            used.update((row["model"], row["system"]))
            cases.append(row)
    return cases


def scaled(fabric: Fabric) -> Fabric:
    """Return all-reduces and copies of the fabric for tensors in the scale model."""
    times = [
        Timing(world_size=GPUS, size_bytes=size, ns=fabric.all_reduce_ns(round(size / SCALE.byte_scale), GPUS))
        for size in SIZES
    ]
    pack, copy_out = (
        cost.model_copy(update={"ns_per_byte": cost.ns_per_byte / SCALE.byte_scale})
        for cost in (fabric.processor.pack, fabric.processor.copy_out)
    )
    costs = fabric.processor.model_copy(update={"pack": pack, "copy_out": copy_out})
    return Fabric(all_reduce=tuple(times), processor=costs)


def gains(row: Row) -> dict[str, float]:
    """Run both reducers; return what part of the default's time the rule's caps save, by class."""
    search, inputs = described(row)
    trace, fabric = SCALE.trace(inputs.trace, iterations=1), scaled(inputs.fabric)
    found = {}
    for reducer in ("ddplab", "torch"):
        costs = emulated_fabric(fabric, reducer)
        default_ns, rule_ns = (
            emulate(
                trace,
                costs,
                reducer=reducer,
                world_size=GPUS,
                assume=False,
                bucket_cap_mb_list=tuple(cap * SCALE.byte_scale for cap in caps_mb),
                broadcast_buffers=False,
            ).iteration_ns
            for caps_mb in ((DEFAULT_FIRST_BUCKET_MB, DEFAULT_BUCKET_CAP_MB), search.rule_caps_mb)
        )
        found[reducer] = 1 - rule_ns / default_ns
    return found


def main() -> None:
    """Run all cases, and print a row for each."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, missed, slower = rows_of_table(), list[str](), list[str]()
    for promising in (True, False):
        cells = []
        cases = chosen(rows, promising=promising)
        with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool:  # which gives the memory back
            results = list(pool.map(gains, cases))
        for row, found in zip(cases, results, strict=True):
            name = f"{row['model']} on {row['system']}"
            missed += [name] if promising and min(found.values()) <= 0 else []
            slower += [name] if promised(row) > 0 and min(found.values()) < -NOISE else []
            gained = {reducer: f"{gain:.1%}" for reducer, gain in found.items()}
            cells.append({"name": name, "promised": f"{promised(row):.1%}", **gained})
        show_table(cells, f"gain over {DEFAULT} in virtual time, on {GPUS} ranks")
    print(
        f"slower: {len(missed)} of {CASES} with {PROMISED:.0%} promised; slower than promised: {len(slower)} of all"
    )
    if len(missed) > CASES / 10 or slower:
        sys.exit(f"missed: {'; '.join({*missed, *slower})}")


if __name__ == "__main__":
    main()
