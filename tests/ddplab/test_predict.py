"""The command `predict`: table, files and the last sentences."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.cli.predict import conclusion
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, Policy, predict
from ddplab.simulator.cost_terms import TERMS
from ddplab.simulator.inputs_with_default_costs import complete
from ddplab.simulator.prediction import System

from ..explore import examples
from ..strategies import iteration, trace_of
from .command_process import unwrapped

ASSUMED_OF = {
    "copies": "copying a gradient",
    "launches": " 11 us",
    "stalls": " for each doubling",
    "slow_downs": "beside collectives",
    "device_spread": "GPUs of one model",
    "jitter": "the iterations of one GPU",
}
"""What a prediction says of a term that is assumed."""


def test_predict_prints_a_table_and_writes_json_and_timeline(answered, trace, fabric, tmp_path):
    shown, document = answered(
        *("predict", trace, "--fabric", fabric, "--world-size", 8, "--caps", "0.01,single"),
        *("--orders", "ready,forward", "--timeline", tmp_path / "t.json"),
    )
    assert "single" in shown
    assert "iteration ms" in shown
    *_, fastest, limit, verdict = unwrapped(shown).splitlines()
    assert re.fullmatch(
        r"fastest: cap .*, order .*, hook none, .* ms; (.*its lead over .* ms|.*a tie .* with) .*", fastest
    )
    assert limit.startswith(f"limit on 8 GPUs: {document['verdict']['limit']}")
    assert re.fullmatch(r"verdict: 8 GPUs do the work of .* that train alone \(.*%\); .*90%.*", verdict)
    assert 0 < document["verdict"]["efficiency"] <= 1
    rows = document["rows"]
    assert [(row["cap_mb"], row["order"]) for row in rows] == [
        (0.01, "ready"), (0.01, "forward"), (None, "ready"), (None, "forward"),
    ]  # fmt: skip
    assert all(row["iteration_ns"] >= row["compute_ns"] for row in rows)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def trace_of_two_gradients() -> Trace:
    ms = 10**6
    return trace_of([[iteration(2 * ms, (6 * ms, 4 * ms), 8 * ms, ms)]], [4 * ms, 4 * ms])


def test_predict_explains_its_terms_and_leaves_them_out(answered, tmp_path):
    trace = trace_of_two_gradients()
    on_gpu = trace.workload.model_copy(update={"device_name": "NVIDIA A100-SXM4-80GB"})
    trace.model_copy(update={"workload": on_gpu}).save(tmp_path / "gpu.json.gz")
    Fabric.from_alpha_beta(alpha_ns=10_000, bytes_per_s=1e10).save(tmp_path / "links.json")
    asked = "predict", tmp_path / "gpu.json.gz", "--fabric", tmp_path / "links.json", "--world-size", 8, "--caps", 25
    shown, whole = answered(*asked, "--explain")
    line = "computation measured; collectives described; copies, launches, .* assumed"
    assert re.search(f"origin of the costs: {line}", unwrapped(shown))
    (adds_ms,) = re.findall(r"stalls +(\S+) +assumed", shown)
    assert re.search(r"\n +stalls +\S+ +assumed +\S+ launch ", shown)
    assert re.search(r"\n +jitter +\S+ +assumed +\S+ forward, backward, optimizer ", shown)
    slow, _ = answered(*asked, "--explain", "--straggler", "3:1.5")
    assert re.search(r"\n +stragglers +\d+\.\d+ +described", slow)
    assert "left out" not in shown
    assert "90%" not in answered(*asked, "--without", "collectives")[0]  # nothing follows for the network
    shown, less = answered(*asked, "--without", "stalls,copies", "--explain")
    assert "\nleft out: stalls, copies\n" in shown
    assert not re.search(r"stalls +\S+ +assumed", shown)
    assert (whole["origins"]["stalls"], less["origins"]["stalls"]) == ("assumed", "none")
    assert float(adds_ms) > 0
    assert less["rows"][0]["iteration_ns"] < whole["rows"][0]["iteration_ns"]
    for term in ASSUMED_OF:
        line = unwrapped(answered(*asked, "--without", term)[0])
        assert [one for one, said in ASSUMED_OF.items() if said not in line] == [term]
    assert "costs: computation beside collectives takes 19% longer\n" in unwrapped(
        answered(*asked, "--without", "copies,launches,stalls")[0]
    )
    shown, _ = answered(*asked, "--without", ",".join(TERMS), "--explain")
    assert "assumed" not in shown
    assert "\nno term of the model has an effect on the fastest configuration\n" in shown


@pytest.mark.parametrize("bytes_per_s", [1e12, 1e9, 1e8])
def test_the_last_sentence_names_the_fastest_and_its_lead(bytes_per_s):
    trace = trace_of_two_gradients()
    fabric = Fabric.from_alpha_beta(alpha_ns=10, bytes_per_s=bytes_per_s)
    policies = [Policy(bucket_cap_mb=cap) for cap in (float("inf"), 1.0)]
    predictions = [predict(trace, fabric, world_size=2, policy=one) for one in policies]
    fastest = min(predictions, key=lambda prediction: prediction.iteration_ns)
    sentence = conclusion(policies, predictions)
    tie = predictions[0].compare(predictions[1]).is_tie
    rest = "a tie within the errors of the costs with" if tie else "its lead over"
    assert f", {fastest.iteration_ns / 1e6:.1f} ms; {rest}" in sentence
    assert conclusion(policies[:1], predictions[:1]).endswith(" ms")


@pytest.mark.parametrize("bytes_per_s", [1e12, 1e9, 1e5])
def test_a_table_of_world_sizes_names_the_ties_that_one_of_them_has(
    printed, trace, tmp_path, monkeypatch, bytes_per_s
):
    """Hooks differ although their buckets are equal."""
    monkeypatch.setenv("COLUMNS", "200")
    fabric = tmp_path / "links.json"
    Fabric.from_alpha_beta(alpha_ns=10_000, bytes_per_s=bytes_per_s).save(fabric)
    asked = ("predict", trace, "--fabric", fabric, "--caps", "default", "--hooks", "none,fp16", "--world-size")
    (row,) = [line for line in printed(*asked, "2,8").splitlines() if line.split()[:1] == ["8"]]
    last = next(line for line in unwrapped(printed(*asked, 8)).splitlines() if line.startswith("fastest: "))
    assert ("a tie" in last, "its lead" in last) in ((True, False), (False, True))
    assert ("its lead" in last) == row.rstrip().endswith(" -")


@given(far=st.floats(1.5, 50), bytes_per_s=st.sampled_from([1e10, 1e9, 1e8]))
@examples(10)
def test_a_lead_is_one_of_whole_intervals_if_the_model_does_not_explain_what_was_measured(far, bytes_per_s):
    trace, fabric = trace_of_two_gradients(), Fabric.from_alpha_beta(10, bytes_per_s)
    policies = [Policy(bucket_cap_mb=cap) for cap in (1.0, 25.0)]
    measured = {8: round(far * predict(trace, fabric, world_size=8, policy=policies[0]).iteration_ns)}
    system = System(complete(trace, fabric, policy=policies[0], measured=measured))
    both = [system.at(8, system.inputs._replace(policy=one, measured_policy=policies[0])) for one in policies]
    first, second = sorted(both, key=lambda one: one.iteration_ns)
    overlap = first.interval_ns[1] >= second.interval_ns[0]
    if first.contradictions:
        assert first.compare(second).is_tie == overlap
        assert ("its lead" in conclusion(policies, both)) != overlap


def test_a_table_of_world_sizes_says_what_one_size_says_of_its_inputs(printed, fabric, tmp_path):
    """A table without these sentences was printed where the model explains nothing of what was measured."""
    trace_of_two_gradients().save(tmp_path / "t.json")
    asked = ("predict", tmp_path / "t.json", "--fabric", fabric, "--without", "jitter", "--measured", "2:150ms")
    one, several = (unwrapped(printed(*asked, "--world-size", sizes)).splitlines() for sizes in ("4", "2,4"))
    told = [
        line for line in one if line.startswith(("the measured", "left out", "assumed", "the trace", "the fabric"))
    ]
    assert len(told) >= 2
    assert [line for line in told if line not in several] == []
    assert [line for line in several if line.startswith("on 4 ranks: measured 150.0 ms on 2 ranks")]


def test_configurations_with_equal_buckets_are_no_tie():
    trace = trace_of([[iteration(20, (60, 40), 80, 10)]], [4, 4])
    policies = [Policy(bucket_cap_mb=cap) for cap in (1.0, 25.0)]
    fabric = Fabric.from_alpha_beta(alpha_ns=10, bytes_per_s=1e9)
    predictions = [predict(trace, fabric, world_size=2, policy=one) for one in policies]
    assert conclusion(policies, predictions).endswith("; 1 other has the same buckets")


def test_measured_times_are_shown_with_what_each_has_changed(answered, trace, fabric):
    asked = ("predict", trace, "--fabric", fabric, "--world-size", 8, "--caps", "0.01,single")
    predicted = answered(*asked)[1]["rows"][0]["iteration_ns"]
    shown, document = answered(*asked, "--measured", f"2:{predicted}ns,4:{predicted / 1e6:.3f}ms")
    assert shown.count("changes the prediction by") + shown.count("it contradicts the model") >= 2
    assert [anchor["world_size"] for anchor in document["rows"][0]["anchors"]] == [2, 4]


def test_predict_takes_every_setting_and_draws_the_timeline(printed, trace, topology, tmp_path):
    settings = ("find_unused_parameters=true", "slow_link=2", "kind=resampled", "iterations=9")
    shown = printed(
        *("predict", trace, "--fabric", topology, "--world-size", 4, "--caps", 0.01, "--straggler", "random:2"),
        *(word for one in settings for word in ("--set", one)),
        *("--timeline", tmp_path / "t.svg"),
    )
    assert "fastest configuration: parts of the median iteration" in shown
    assert "no processor costs, so copies, launches and slow-downs count as free" in unwrapped(shown)
    assert "rank 3 computes" in (tmp_path / "t.svg").read_text()


def test_settings_of_the_fabric_apply_to_nodes_by_name(answered, trace):
    asked = ("predict", trace, "--fabric", "aws-p4d", "--world-size", 16, "--caps", "single")
    usual, slow = (answered(*asked, "--set", f"scale={one}")[1]["rows"][0]["iteration_ns"] for one in (1, 9))
    assert slow > usual


def test_logs_are_merged_into_one_fabric(answered, trace, logs):
    fabrics = [word for path in logs for word in ("--fabric", path)]
    merged, one_bucket = Fabric.merged(*map(Fabric.load, logs)), float("inf")
    for world_size in (2, 4):
        asked = ("predict", trace, "--world-size", world_size, "--caps", "single")
        (row,) = answered(*asked, *fabrics)[1]["rows"]
        expected = predict(Trace.load(trace), merged, world_size=world_size, bucket_cap_mb=one_bucket)
        assert row["iteration_ns"] == expected.iteration_ns


def test_several_world_sizes_are_a_table(answered, trace, topology):
    shown, document = answered(
        *("predict", trace, "--fabric", topology, "--world-size", "2,4", "--caps", "0.01,single"),
        *("--hooks", "none,power_sgd:2", "--set", "sync_every=2", "--straggler", "1:1.5"),
        *("--set", "kind=fitted", "--set", "iterations=5"),
    )
    assert "the fastest configuration at each world size" in shown
    rows = document["rows"]
    assert [(row["world_size"], row["cap_mb"]) for row in rows] == [
        (2, 0.01), (2, 0.01), (2, None), (2, None), (4, 0.01), (4, 0.01), (4, None), (4, None),
    ]  # fmt: skip


def test_the_output_says_what_counts_as_free_what_ties_and_what_it_leaves_out(answered, trace, topology):
    sizes = ",".join(map(str, range(2, 86, 2)))
    asked = ("--caps", "0.01,single", "--hooks", "none,fp16", "--world-size", sizes)
    shown, document = answered("predict", trace, "--fabric", topology, *asked)
    lines = unwrapped(shown).splitlines()
    assert "the fabric has no processor costs, so copies, launches and slow-downs count as free" in lines
    assert [line for line in lines if line.startswith("the hook fp16 was not measured")]
    assert "2 more rows of the table not shown; at most 40 are printed" in lines
    assert "tie" in shown.split()  # the words of the column's head may stand on lines of their own
    assert {row["p99_ns"] for row in document["rows"]} == {None}


def test_nothing_is_assumed_of_terms_that_have_no_origin(printed, tmp_path):
    """On one GPU, no collective slows computation down; the sentence of assumed costs said by how much."""
    path = tmp_path / "t.json.gz"
    printed("synthesize", "--model", "resnet50-224", "--device", "a100-40gb", "--out", path)
    for ranks, has in ((1, False), (8, True)):
        shown = " ".join(printed("predict", path, "--fabric", "aws-p4d", "--world-size", ranks).split())
        (origins,) = re.findall("origin of the costs: .*? assumed, because", shown)
        assert ("slow_downs" in origins) == ("computation beside collectives" in shown) == has
        assert ("stalls" in origins) == ("for each doubling" in shown) == has
        assert ("jitter" in origins) == ("the iterations of one GPU" in shown) == has
    few = ("--set", "iterations=3")
    for command in (("tune", "--out", tmp_path / "plan.json"), ("emulate", "--caps", "default", *few)):
        shown = " ".join(printed(*command, path, "--fabric", "aws-p4d", "--world-size", 1).split())
        assert "assumed" in shown
        assert not re.search("beside collectives|for each doubling|the iterations of one GPU", shown)
