"""The catalogue beside measurements: times are inside the intervals as often as stated, and logs give the rates."""

import csv
from collections import defaultdict
from math import exp, log
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from ddplab.simulator import Fabric
from ddplab.simulator.catalogue import load_fabric, read_catalogue
from validation import part_i_weak_scaling
from validation.cases import load_case

VALIDATION = Path(__file__).parents[1]
LISTED = read_catalogue()
NODES = sorted(LISTED.nodes)
LEAST_BYTES = 262_144
"""As in part (a) of the score: buckets are larger."""
SYSTEMS = {
    "dgx-1-v100": ["vTrain V100"],
    "dgx-a100": ["vTrain A100"],
    "aws-p4d": ["AWS p4d"],
    "azure-nd-a100": ["Azure ND A100 v4"],
    "azure-ndm-a100": ["Azure NDm A100 v4"],
    "oci-bm-gpu4": ["Oracle BM.GPU4"],
    "polaris": ["Polaris, A100"],
    "dgx-h100": ["Nebius H100", "H100 cluster (xxrjun)"],
    "isambard-ai": ["Isambard-AI"],
    "alps": ["Alps"],
}
"""Measured systems of each node; those of dgx-1-v100, dgx-a100 and dgx-h100 are of the same build."""
TRAINED = {
    "dgx-1-v100": "dgx_v100",
    "csc-puhti": "csc_puhti",
    "dgx-a100": "lambda_a100",
    "juwels-booster": "juwels_a100",
    "horeka": "horeka_a100",
    "csc-mahti": "csc_mahti",
    "isambard-ai": "isambard_gh200",
}
"""The case of part (i) of the score for each node on which training was measured."""


def measured_tables() -> dict[str, dict[int, dict[int, float]]]:
    """Microseconds by system, GPUs and bytes: medians of the published values."""
    values = defaultdict(list)
    with (VALIDATION / "data" / "nccl_all_reduces.csv").open() as rows:
        for row in csv.DictReader(rows):
            values[row["system"], int(row["gpus"]), int(row["bytes"])].append(float(row["us"]))
    for name in ("polaris_a100", "xxrjun_h100", "echo_a100"):
        case = load_case(VALIDATION / "cases" / f"all_reduce_{name}.toml")
        for table in case.tables:
            for size, us in zip(table.bytes, table.us, strict=True):
                values[case.name, table.gpus, size] = [us]
    for gpus in (4, 40):
        log_file = VALIDATION / "data" / f"isambard_nccl_{gpus}gpus.log"
        for row in Fabric.from_nccl_tests(f"{gpus}:{log_file}").all_reduce:
            values["Isambard-AI", gpus, row.size_bytes].append(row.ns / 1e3)
    tables = defaultdict(lambda: defaultdict(dict))
    for (system, gpus, size), us in values.items():
        tables[system][gpus][size] = median(us)
    return tables


TABLES = measured_tables()


def all_reduces_inside(name: str) -> str:
    fabric, inside = load_fabric(name), []
    for gpus, table in ((n, table) for system in SYSTEMS[name] for n, table in TABLES[system].items()):
        sizes = np.array([size for size in table if size >= LEAST_BYTES])
        measured_ns = np.array([1e3 * table[size] for size in sizes.tolist()])
        slower_by = measured_ns / fabric.all_reduce_costs_ns(sizes, gpus)
        faster, slower = 1 + fabric.relative_errors(sizes, gpus)
        inside += ((1 / faster <= slower_by) & (slower_by <= slower)).tolist()
    return f"{sum(inside)} of {len(inside)}"


def iterations_inside(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Predict the measured iterations as the score does, but over the links of the catalogue."""
    monkeypatch.setattr(part_i_weak_scaling, "topology_of", lambda _: LISTED.topology(name))
    monkeypatch.setattr(part_i_weak_scaling, "_predicted_once", part_i_weak_scaling._predicted_once.__wrapped__)
    case = load_case(VALIDATION / "cases" / f"weak_scaling_{TRAINED[name]}.toml")
    rows = part_i_weak_scaling.score(case).rows
    inside = [row.interval_ns[0] <= row.measured_ns <= row.interval_ns[1] for row in rows]
    return f"{sum(inside)} of {len(inside)}"


@pytest.mark.parametrize("name", NODES)
def test_measured_times_lie_inside_the_interval_as_often_as_the_catalogue_states(name, monkeypatch):
    stated = LISTED.nodes[name].inside
    assert stated.get("all_reduces") == (all_reduces_inside(name) if name in SYSTEMS else None)
    assert stated.get("iterations") == (iterations_inside(name, monkeypatch) if name in TRAINED else None)


LOGGED = {
    ("dgx-1-v100", "nvlink"): ("vTrain V100", {2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, None: 8}),
    ("azure-nd-a100", "nvlink"): ("Azure ND A100 v4", {2: 2, 4: 4, None: 8}),
    ("azure-nd-a100", "network"): ("Azure ND A100 v4", {None: 128}),
    ("azure-ndm-a100", "network"): ("Azure NDm A100 v4", {2: 16}),
    ("aws-p4d", "network"): ("AWS p4d", {2: 16}),
    ("oci-bm-gpu4", "network"): ("Oracle BM.GPU4", {2: 16}),
    ("polaris", "network"): ("Polaris, A100", {None: 32}),
    ("dgx-h100", "network"): ("H100 cluster (xxrjun)", {None: 80}),
    ("isambard-ai", "nvlink"): ("Isambard-AI", {None: 4}),
    ("isambard-ai", "network"): ("Isambard-AI", {None: 40}),
    ("alps", "nvlink"): ("Alps", {None: 4}),
    ("alps", "network"): ("Alps", {2: 8, None: 64}),
}
"""System and number of GPUs whose measured 1 GiB gives the part that is reached, by members in use (None: all)."""


@pytest.mark.parametrize(("name", "kind"), LOGGED)
def test_the_part_that_is_reached_is_that_of_the_log(name, kind):
    system, by_members = LOGGED[name, kind]
    link = LISTED.nodes[name].links[kind]
    for members, gpus in by_members.items():
        reached = link.reached if members is None else link.reached_by_members[members]
        bus_gb_per_s = 2 * (gpus - 1) / gpus * 2**30 / TABLES[system][gpus][2**30] / 1e3
        assert reached.part == pytest.approx(bus_gb_per_s * 1e9 / link.rate.bytes_per_s, rel=0.03)


def test_networks_without_a_log_reach_the_mean_of_those_with_one():
    parts = [
        LISTED.nodes[name].links["network"].reached.part
        for name in ("azure-nd-a100", "alps", "isambard-ai", "polaris", "dgx-h100")
    ]
    mean = exp(sum(map(log, parts)) / len(parts))
    borrowed = [
        one.links["network"].reached.part
        for one in LISTED.nodes.values()
        if one.links["network"].reached.source == "several"
    ]
    assert borrowed
    assert set(borrowed) == {round(mean, 2)}
