"""The catalogue: figures have sources, and entries predict."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.files.reading import one_line_errors
from ddplab.simulator import Fabric, assume_gpu, predict
from ddplab.simulator.catalogue import Catalogue, Rate, load_fabric, read_catalogue
from ddplab.simulator.workload.roofline import PRECISIONS, data_sheets, find_device, with_precision

from ..explore import examples
from ..topology_files import save_topology
from .changed_traces import gpu_trace

LISTED = read_catalogue()
NODES = sorted(LISTED.nodes)


@pytest.mark.parametrize("name", NODES)
def test_every_node_predicts(name):
    """From a part of a node to many: with more GPUs, an iteration does not become shorter than its computation."""
    node, fabric = LISTED.nodes[name], load_fabric(name)
    trace = gpu_trace(LISTED.devices[node.device].product)
    costs, variation, sentences = assume_gpu(trace, fabric)
    assert sentences
    gpus = node.links["nvlink"].members
    for world_size in (2, 64 * gpus):
        predicted = predict(trace, costs, world_size=world_size, variation=variation)
        low, high = predicted.interval_ns
        assert trace.ranks[0].iterations[0].duration_ns < predicted.iteration_ns
        assert low < predicted.iteration_ns < high


@pytest.mark.parametrize("name", NODES)
def test_a_network_of_the_nodes_own_rate_is_its_own(name):
    if (own := LISTED.nodes[name].links.get("network")) is not None:
        rate = Rate(gb_per_s=own.rate.bytes_per_s / 1e9, source="")
        assert LISTED.topology(name, network=rate).levels == LISTED.topology(name).levels
        slower = Rate(gb_per_s=own.rate.bytes_per_s / 2e9, source="")
        assert (
            LISTED.topology(name, network=slower).levels[-1].bytes_per_s
            < LISTED.topology(name).levels[-1].bytes_per_s
        )


@examples(12)
@given(
    st.sampled_from([name for name in NODES if "network" in LISTED.nodes[name].links]),
    st.lists(st.floats(0.05, 4), min_size=1, max_size=3),
    st.sampled_from([2, 4, 64]),
)
def test_a_faster_network_of_a_node_is_never_predicted_slower(name, multiples, nodes):
    """The rate of the catalogue among others: no other latency, or part that is reached, breaks the order."""
    links = LISTED.nodes[name].links
    rates = [one * links["network"].rate.bytes_per_s / 1e9 for one in sorted([1.0, *multiples])]
    fabrics = [Fabric.from_topology(LISTED.topology(name, network=Rate(gb_per_s=one, source=""))) for one in rates]
    world_size, sizes = nodes * links["nvlink"].members, 2 ** np.arange(3, 31, 3)
    costs_ns = [one.all_reduce_costs_ns(sizes, world_size).tolist() for one in fabrics]
    costs_ns += [[one.broadcast_ns(size, world_size) for size in sizes.tolist()] for one in fabrics]
    for slow, fast in (*pairwise(costs_ns[: len(fabrics)]), *pairwise(costs_ns[len(fabrics) :])):
        assert all(one >= other for one, other in zip(slow, fast, strict=True))
    for multiple, one in zip(sorted([1.0, *multiples]), fabrics, strict=True):
        assert multiple == 1 or "latency between nodes seems not to be measured" in " ".join(
            one.assumed(sizes, world_size)
        )


@pytest.mark.parametrize("name", NODES)
def test_no_broadcast_exceeds_the_wire(name):
    """What passes each link once; all-reduces of two nodes reach more bus bandwidth, of which a part is not sent."""
    node, fabric = LISTED.nodes[name], load_fabric(name)
    for nodes in (2, 3) if "network" in node.links else ():
        ns = fabric.broadcast_ns(2**33, nodes * node.links["nvlink"].members)
        assert 2**33 / ns <= node.links["network"].rate.bytes_per_s / 1e9


def test_a_node_is_found_by_name_and_other_fabrics_in_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = load_fabric("dgx-a100")
    assert named == Fabric.from_topology(LISTED.topology("dgx-a100"))
    assert "NVIDIA DGX A100" in named.source
    save_topology(named.topology, "links.yaml")
    inside, network = named.topology.levels
    assert load_fabric("links.yaml").topology.levels == (inside, network.model_copy(update={"wait": None}))
    other = Fabric.from_alpha_beta(alpha_ns=1, bytes_per_s=1e9)
    other.save("dgx-a100")
    assert load_fabric("dgx-a100") == other


@pytest.mark.parametrize("name", NODES)
def test_a_node_is_found_by_what_its_vendor_calls_it(name):
    product = LISTED.nodes[name].product
    assert LISTED.node_of(product) == name
    assert LISTED.node_of(product.lower().replace("_", "-")) == name


@pytest.mark.parametrize(
    ("find", "name", "says"),
    [
        (load_fabric, "dgx", "did you mean dgx-1-v100 or dgx-a100 or dgx-h100"),
        (load_fabric, "aws-p4", "did you mean aws-p4d"),
        (load_fabric, "ND96isr", "did you mean azure-nd-h100 or azure-nd-h200"),
        (load_fabric, "Isambard-X", "did you mean isambard-ai"),
        (load_fabric, "zzz", "expected a file or a name that `ddplab show` lists, got 'zzz'"),
        (find_device, "h10", "did you mean h100 or h100-fp32"),
        (find_device, "h100", "has h100-fp32, h100-tf32"),
        (find_device, "l4", "got 'l4', of which the catalogue has no training"),
        (find_device, "h300", "expected a data sheet's .json file or a name that `ddplab show` lists"),
    ],
)
def test_a_wrong_name_is_one_line_with_near_matches(find, name, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        find(name)
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


def test_a_device_takes_the_precision_of_the_model():
    assert with_precision("h100", "float32") == "h100-tf32"
    assert with_precision("h100", "bfloat16") == "h100-bf16"
    assert with_precision("v100", "float32") == "v100-fp32"
    assert with_precision("v100", "float16") == "v100-fp16"
    for name in ("h100-fp32", "mine.json"):
        assert with_precision(name, "float32") == name
    with pytest.raises(ValueError, match=r"expected one that computes with parameters of bfloat16, got 'v100'"):
        with_precision("v100", "bfloat16")


@pytest.mark.parametrize("name", data_sheets())
def test_only_parameters_of_float32_compute_in_another_precision(name):
    """A model of float64 was predicted at the rate of bfloat16, which autocast does not give it."""
    dtypes = {"float32", *(dtype for dtype, own in PRECISIONS.items() if data_sheets()[name].precision in own)}
    for dtype in (*PRECISIONS, "float64", "complex64"):
        if dtype in dtypes:
            assert with_precision(name, dtype) == name
        else:
            with pytest.raises(
                ValueError, match=f"expected one that computes with parameters of {dtype}, got '{name}'"
            ):
                with_precision(name, dtype)
