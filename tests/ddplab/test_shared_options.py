"""Options that several commands have: policies, settings in JSON, and one clear line for each mistake."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.cli.shared_options import bits_per_s, read_settings

STEPS = (
    *("recording on 1 rank", "predicting", "tuning"),
    "counting the operations and the memory of tests.models_for_cli:needs_a_batch",
)
"""Words of progress that are printed where there is no terminal."""


@pytest.mark.parametrize("setting", ["plan=[[5,4],[3,2,1,0]]", "bucket_cap_mb_list=[0.01,25]"])
def test_a_policy_that_says_the_buckets_is_one_row_and_no_choice(here, answered, trace, fabric, tmp_path, setting):
    field = setting.partition("=")[0]
    asked = ("predict", trace, "--fabric", fabric, "--set", setting)
    (row,) = answered(*asked)[1]["rows"]
    assert row.get("cap_mb", row.get("bucket_cap_mb")) == field
    assert row["order"] == ("plan" if field == "plan" else "ready")
    done = here(*asked, "--caps", "1,25")
    assert done.stderr.startswith(f"ddplab: --caps: expected no value with --set {field}=...")


def test_values_of_settings_are_json_in_records_within_records_too(answered, trace, topology):
    processor = {"hooks": [{"name": "fp16", "compress": {"fixed_ns": 1e8}}]}
    asked = ("predict", trace, "--fabric", topology, "--hooks", "none,fp16", "--caps", "single")
    _, document = answered(*asked, "--set", f"processor={json.dumps(processor)}")
    none, fp16 = (row["iteration_ns"] for row in document["rows"])
    assert fp16 >= none + 9 * 10**7


@pytest.mark.parametrize("name", ["two.log", "2:two.log"])
def test_a_log_with_a_number_of_ranks_is_no_output(here, trace, logs, monkeypatch, name):
    log, before = logs[0], logs[0].read_text()
    monkeypatch.chdir(log.parent)
    assert here("predict", trace, "--fabric", name).returncode == 0
    done = here("predict", trace, "--fabric", name, "--json", "two.log")
    assert "expected a name for an output, got that of an input" in done.stderr
    assert log.read_text() == before


def test_a_version_of_nccl_keeps_its_digits(topology):
    assert read_settings(["nccl_version=2.20"]).fabric([topology]).nccl_version == "2.20"


MISTAKES = {
    "record --model alexnet": "model: expected module:callable or a name that `ddplab show` lists",
    "record --model t5-large": "model t5-large: expected a model to run, got one of which only the operations",
    "predict {trace} --fabric dgx-h10": "got 'dgx-h10'; did you mean dgx-h100",
    "show llama": "got 'llama'; did you mean llama-3.2-1b or llama-3.1-8b",
    "record --model no_such:thing": "No module named 'no_such'",
    "record --model tests.models_for_cli:not_callable": "not_callable is not callable but a int",
    "record --model tests.models_for_cli:not_a_pair": "expected it to return (module, loss_fn)",
    "record --model tests.models_for_cli:loss_is_a_number": "a parameter, got AttributeError: 'float' object",
    "calibrate --model tests.models_for_cli:loss_is_a_number": "a parameter, got AttributeError: 'float' object",
    "plan tests.models_for_cli:needs_a_batch h100": "missing 1 required positional argument: 'batch' (",
    "plan resnet50 aws-p4d --network 100": "got '100'; did you mean 100gbit?",
    "predict {trace} --fabric {fabric} --set plan=plan.json": "in a file of `ddplab tune --out`), got 'plan.json'",
    "record --world-size 0": "--world-size: expected to be greater than or equal to 1, got '0'",
    "predict absent.json": "absent.json: cannot be read: No such file",
    "predict {trace} --fabric absent.json": "absent.json: cannot be read",
    "predict {trace} --fabric {fabric} --caps 1,two": "--caps: expected sizes in MB",
    "predict {trace} --fabric {fabric} --orders up": "--orders: expected ready, reverse",
    "record --out /dev/null/trace.json": "cannot be written: /dev/null is not a folder",
    "predict {trace} --fabric {fabric} --json .": "cannot be written: it is a folder",
    "predict {trace} --fabric {trace}": "expected a fabric file, got a trace",
    "predict {fabric}": "not a trace: workload: field required",
    "validate --caps ,": "--caps: expected sizes in MB",
    "validate --plan plan.json --caps 1": "--caps: expected either this or --plan",
    "validate --plan absent.json": "absent.json: cannot be read",
    "predict {trace} --fabric {fabric} --without latency": "--without: expected some of collectives, buffers",
    "predict {trace} --fabric {fabric} --hooks gzip": "--hooks: hook: expected one of none",
    "predict {trace} --fabric {fabric} --set sync=2": "--set: expected NAME=VALUE",
    "predict {trace} --fabric {fabric} --set order=size": "--set: expected --orders for order",
    "predict {trace} --fabric {fabric} --set sync_every=0": "--set: sync_every: input",
    "predict {trace} --fabric {fabric} --straggler 3": "--straggler: expected RANK:FACTOR",
    "predict {trace} --fabric {fabric} --world-size 2,4 --explain": "--explain: expected one",
    "predict {trace} --fabric {fabric} --set kind=wild": "--set: kind: input",
    "predict {trace} --fabric {fabric} --timeline h.gif": "--timeline: expected a name that",
    "synthesize --from v100": "--from: expected --rescale with it",
    "predict {trace} --fabric {fabric} --fabric {fabric}": "fabrics[1]: topology: expected none, because fabrics[0]",
    "predict {trace} --fabric {fabric} --set algorithm=trees": "--set: algorithm: input should be 'library', 'ring'",
    "show 40:absent.log": "absent.log: cannot be read",
    "synthesize --device tpu": "tpu",
    "plan resnet50 t4": "SYSTEM: no node of the catalogue has a t4",
    "plan resnet50 aws-p4d --device h100-fp8": "device: expected",
    "tune {trace} --fabric {fabric} --objective speed": "--objective: expected one of median, mean, p95, p99",
    "tune {trace} --fabric {fabric} --set hook=zip": "--set: hook: ",
    "tune {trace} --fabric {fabric} --set bucket_cap_mb=3": "--set: expected none, because tune chooses the buckets",
    "learn --junit a.xml": "--junit: expected --grade too",
    "learn --grade --watch": "--grade: expected neither",
    "learn --watch --json -": "--json: expected neither",
    "predikt": "No such command 'predikt'",
    "predict {trace} --wurld-size 2": "No such option: --wurld-size",
    "tune {trace} --world-size two": "--world-size: expected to be a valid integer",
    "predict {trace} --world-size": "'--world-size' requires an argument",
}
"""Command lines, each with a part of the line that it prints; `test_impossible_inputs` has values out of range."""


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_reported_in_one_line(line, here, trace, fabric):
    done = here(*line.format(trace=trace, fabric=fabric).split())
    assert done.returncode != 0
    assert MISTAKES[line] in done.stderr
    lines = [line for line in done.stderr.splitlines() if line not in STEPS]
    assert [line.startswith("ddplab: ") for line in lines] == [True]


@given(st.floats(0.001, 1000), st.sampled_from([("gbit", 1e9), ("Mbit", 1e6), (" kbit/s", 1e3), ("bps", 1)]))
def test_a_rate_is_read_with_its_unit(number, unit):
    word, factor = unit
    assert bits_per_s(f"{number:f}{word}") == pytest.approx(float(f"{number:f}") * factor)


@pytest.mark.parametrize("text", ["", "fast", "0gbit", "-1gbit", "1 gbyte", "1tbit", "nan", "0", "100"])
def test_a_text_that_is_no_rate_is_refused(text):
    with pytest.raises(
        ValueError, match=r"^link rate: expected one above 0 with its unit, such as 1gbit .*, got"
    ) as error:
        bits_per_s(text)
    assert ("did you mean" in str(error.value)) == (text == "100")
