"""The catalogue: figures have sources, entries predict, and measured times are inside as often as stated."""

import csv
import re
from collections import defaultdict
from math import exp, log
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from reference.files.reading import one_line_errors, parse_yaml
from simulator import Fabric, assume_gpu, predict
from simulator.catalogue import Catalogue, load_fabric, read_catalogue
from simulator.fabric import TopologyFile, save_topology
from simulator.workload.roofline import data_sheets, find_device, with_precision
from validation import part_i_weak_scaling
from validation.cases import load_case

from ..strategies import iteration, trace_of

VALIDATION = Path(__file__).parents[2] / "validation"
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
        off = np.abs(np.log(fabric.all_reduce_costs_ns(sizes, gpus) / measured_ns))
        inside += (off <= np.log1p(fabric.relative_errors(sizes, gpus))).tolist()
    return f"{sum(inside)} of {len(inside)}"


def iterations_inside(name: str, tmp_path: Path) -> str:
    """Predict the measured iterations as the score does, but over the links of the catalogue."""
    save_topology(LISTED.topology(name), tmp_path / "links.yaml")
    links = TopologyFile.model_validate(parse_yaml((tmp_path / "links.yaml").read_text()))
    case = load_case(VALIDATION / "cases" / f"weak_scaling_{TRAINED[name]}.toml")
    case = case.model_copy(update={"inputs": case.inputs.model_copy(update={"topology": links})})
    rows = part_i_weak_scaling.score(case).rows
    inside = [row.interval_ns[0] <= row.measured_ns <= row.interval_ns[1] for row in rows]
    return f"{sum(inside)} of {len(inside)}"


@pytest.mark.parametrize("name", NODES)
def test_measured_all_reduces_lie_inside_the_interval_as_often_as_the_catalogue_states(name):
    stated = LISTED.nodes[name].inside.get("all_reduces")
    assert stated == (all_reduces_inside(name) if name in SYSTEMS else None)


@pytest.mark.parametrize("name", NODES)
def test_measured_iterations_lie_inside_the_interval_as_often_as_the_catalogue_states(name, tmp_path):
    stated = LISTED.nodes[name].inside.get("iterations")
    assert stated == (iterations_inside(name, tmp_path) if name in TRAINED else None)


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


@pytest.mark.parametrize("name", [*NODES, *LISTED.devices])
def test_every_figure_has_a_source_and_a_date(name):
    figures = LISTED.figures(name)
    assert figures
    for value, source in figures.values():
        assert any(character.isdigit() for character in value)
        assert source.title
        assert source.date.startswith("20")


@pytest.mark.parametrize("name", NODES)
def test_every_node_predicts(name):
    """From a part of a node to many: with more GPUs, an iteration does not become shorter than its computation."""
    node, fabric = LISTED.nodes[name], load_fabric(name)
    trace = trace_of(
        [[iteration(10**7, tuple(10**7 + n * 10**6 for n in range(1, 17)), 28 * 10**6, 10**6)]], [2**22] * 16
    )
    device_name = LISTED.devices[node.device].product
    trace = trace.model_copy(update={"workload": trace.workload.model_copy(update={"device_name": device_name})})
    costs, variation, sentences = assume_gpu(trace, fabric)
    assert sentences
    gpus = node.links["nvlink"].members
    for world_size in (2, gpus, 2 * gpus, 64 * gpus):
        predicted = predict(trace, costs, world_size=world_size, variation=variation)
        low, high = predicted.interval_ns
        assert trace.ranks[0].iterations[0].duration_ns < predicted.iteration_ns
        assert low < predicted.iteration_ns < high


def test_a_node_is_found_by_name_and_other_fabrics_in_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = load_fabric("dgx-a100")
    assert named == Fabric.from_topology(LISTED.topology("dgx-a100"))
    assert "NVIDIA DGX A100" in named.source
    save_topology(named.topology, "links.yaml")
    assert load_fabric("links.yaml").topology.levels == named.topology.levels
    other = Fabric.from_alpha_beta(alpha_ns=1, bytes_per_s=1e9)
    other.save("dgx-a100")
    assert load_fabric("dgx-a100") == other


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dgx", "near: dgx-1-v100, dgx-a100, dgx-h100"),
        ("aws-p4", "near: aws-p4d"),
        ("Isambard-AI", "near: isambard-ai"),
        ("zzz", "expected a file or a name that `ddplab show` lists, got 'zzz'"),
    ],
)
def test_a_wrong_name_is_one_line_with_near_matches(name, says):
    with pytest.raises(ValueError, match="expected a file or a name") as caught:
        load_fabric(name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data["sources"].pop("several"), "sources: expected one for each figure"),
        (lambda data: data["sources"].update(more={"title": "t", "date": "2020"}), "['more']"),
        (lambda data: data["sources"]["nccl"].update(date="yesterday"), "sources.nccl.date"),
        (lambda data: data["nodes"]["alps"].update(device="x"), "nodes.alps.device: expected the name of a device"),
        (lambda data: data["nodes"]["alps"]["links"]["nvlink"]["rate"].pop("source"), "rate.source: field required"),
    ],
)
def test_a_figure_without_source_is_refused(change, says):
    data = LISTED.model_dump(exclude_none=True)
    change(data)
    with pytest.raises(ValueError, match=re.escape(says)), one_line_errors():
        Catalogue.model_validate(data)


# Devices


def test_a_device_takes_the_precision_of_the_model():
    assert with_precision("h100", "float32") == "h100-tf32"
    assert with_precision("h100", "bfloat16") == "h100-bf16"
    assert with_precision("v100", "float32") == "v100-fp32"
    assert with_precision("v100", "float16") == "v100-fp16"
    for name in ("h100-fp32", "mine.json"):
        assert with_precision(name, "float32") == name
    with pytest.raises(ValueError, match=r"expected a precision of v100 \(v100-fp32, v100-fp16\) for .* bfloat16"):
        with_precision("v100", "bfloat16")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h10", "near: h100, h100-fp32"),
        ("h100", "has h100-fp32, h100-tf32"),
        ("l4", "got 'l4', of which the catalogue has none"),
    ],
)
def test_a_wrong_device_is_one_line(name, says):
    with pytest.raises(ValueError, match=r"^device: expected") as caught:
        find_device(name)
    assert says in str(caught.value)


BEFORE = {
    "v100": (900e9, {"fp32": 15.7e12, "fp16": 125e12}),
    "a100-40gb": (1555e9, {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}),
    "a100-80gb": (2039e9, {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}),
    "h100": (3.35e12, {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12}),
}
"""Data sheets from before the catalogue; committed traces were made with them."""


def test_data_sheets_are_those_from_before_the_catalogue():
    for name, (bytes_per_s, rates) in BEFORE.items():
        for precision, flops_per_s in rates.items():
            sheet = data_sheets()[f"{name}-{precision}"]
            assert (sheet.bytes_per_s, sheet.flops_per_s) == (bytes_per_s, flops_per_s)
