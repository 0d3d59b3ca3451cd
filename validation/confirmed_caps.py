"""Both real reducers in virtual time, with the rule's caps beside torch's default.

`python -m validation.confirmed_caps` chooses twenty trainings on 16 GPUs from `data/bucket_caps.csv` where the rule
of docs/bucket_size.md promises at least 5 %, and as many where it promises less, and runs ddplab's reducer and
torch's class with both. It fails if the rule's caps are slower than the default in more than one in ten of the
former, or anywhere by more than `NOISE`.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from ddplab.cli.terminal_output import show_table
from ddplab.emulation.emulate import emulate, emulated_fabric
from ddplab.simulator.tuning.bucket_plan import DEFAULT

from .bucket_cap_study import Row, described, rows_of_table

GPUS = 16
CASES = 20
OF_ONE = 3
"""Cases with one model, and on one system, at most."""
MOST_MB = 700
"""Gradients of a rank, so that 16 ranks fit the memory of a laptop."""
PROMISED = 0.05
NOISE = 0.005
RULE = "rule x 1"


def promised(row: Row) -> float:
    """The part of the default's time that the rule saves, as predicted."""
    return 1 - float(row[RULE]) / float(row[DEFAULT])


def chosen(rows: Sequence[Row], *, promising: bool) -> list[Row]:
    """Return cases, those with the largest and the smallest promises in turn."""
    some = [row for row in rows if row["gpus"] == str(GPUS) and float(row["gradients MB"]) <= MOST_MB]
    some = sorted((row for row in some if (promised(row) >= PROMISED) == promising), key=promised)
    used, cases = Counter[str](), list[Row]()
    while some and len(cases) < CASES:
        row = some.pop(-(len(cases) % 2))
        if max(used[row["model"]], used[row["system"]]) < OF_ONE:
            used.update((row["model"], row["system"]))
            cases.append(row)
    return cases


def gains(row: Row) -> dict[str, float]:
    """Run both reducers; return what part of the default's time the rule's caps save, by class."""
    search, inputs = described(row)
    found = {}
    for reducer in ("ddplab", "torch"):
        costs = emulated_fabric(inputs.fabric, reducer)
        policies = [inputs.policy.model_copy(update=one) for one in (
            {"bucket_cap_mb": None}, {"bucket_cap_mb": None, "bucket_cap_mb_list": search.rule_caps_mb}
        )]  # fmt: skip
        default, rule = (
            emulate(inputs.trace, costs, reducer=reducer, world_size=GPUS, policy=policy, assume=False).iteration_ns
            for policy in policies
        )
        found[reducer] = 1 - rule / default
    return found


def main() -> None:
    """Run all cases, and print a row for each."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, missed, slower = rows_of_table(), list[str](), list[str]()
    for promising in (True, False):
        cells = []
        for row in chosen(rows, promising=promising):
            name, found = f"{row['model']} on {row['system']}", gains(row)
            missed += [name] if promising and min(found.values()) <= 0 else []
            slower += [name] if min(found.values()) < -NOISE else []
            gained = {reducer: f"{gain:.1%}" for reducer, gain in found.items()}
            cells.append({"name": name, "promised": f"{promised(row):.1%}", **gained})
        show_table(cells, f"gain over {DEFAULT} in virtual time, on {GPUS} ranks")
    print(f"slower than the default: {len(missed)} where 5 % is promised, {len(slower)} by over {NOISE:.1%} in all")
    if len(missed) > CASES / 10 or slower:
        sys.exit(f"missed: {'; '.join({*missed, *slower})}")


if __name__ == "__main__":
    main()
