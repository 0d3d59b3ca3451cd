"""The command as a user runs it: real processes, real files, exit codes, one clear line for a mistake."""

import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import typer
from hypothesis import given

from ddplab.cli.fabric_and_knobs import KNOBS
from ddplab.cli.main import EXAMPLES, app
from ddplab.cli.predict import conclusion
from ddplab.validation.validation_report import model_folder
from reference.trace import Trace
from simulator import Fabric, Policy, Straggler, predict
from simulator.fabric import LevelEntry, Linear, Processor, TopologyFile
from simulator.fabric.processor_costs import HookCost

from .explore import examples
from .nccl_log import nccl_log
from .reference.test_virtual_links import links_are_permitted
from .strategies import any_predictions, iteration, trace_of

ROOT = Path(__file__).parent.parent
TINY = "tests.models_for_cli:tiny"
STEPS = ("recording", "sweeping")
"""Words of progress that are printed where there is no terminal."""


def ddplab(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "ddplab", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "trace.json.gz"
    done = ddplab("record", "--model", TINY, "--world-size", 2, "--iterations", 4, "--out", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "fabric.json"
    Fabric.from_alpha_beta(20_000, 1e9, concurrency=2).save(path)
    return path


@pytest.fixture(scope="module")
def topology(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "topology.yaml"
    path.write_text(
        "levels:\n  node: {members: 2, latency_us: 2, gb_per_s: 10}\n  nic: {of: node, latency_us: 9, gb_per_s: 1}\n"
    )
    return path


def test_record_writes_a_trace_of_all_ranks(trace):
    recorded = Trace.load(trace)
    assert recorded.workload.model == TINY
    assert [len(rank.iterations) for rank in recorded.ranks] == [4, 4]


def test_predict_prints_a_table_and_writes_json_and_timeline(here, trace, fabric, tmp_path):
    done = here(
        "predict", trace, "--fabric", fabric, "--world-size", 8, "--caps", "0.01,single",
        "--orders", "ready,forward", "--json", tmp_path / "p.json", "--perfetto", tmp_path / "t.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "single" in done.stdout
    assert "iteration ms" in done.stdout
    *_, fastest, verdict = done.stdout.splitlines()
    assert re.fullmatch(
        r"fastest: cap .*, order .*, hook none, .* ms, limited by .*; (.*its lead of .* ms over|.*a tie .* with) .*",
        fastest,
    )
    assert re.fullmatch(r"verdict: 8 ranks do the work of .* without communication \(.*%\); 90% .*", verdict)
    written = json.loads((tmp_path / "p.json").read_text())
    assert 0 < written["verdict"]["efficiency"] <= 1
    rows = written["rows"]
    assert [(row["cap_mb"], row["order"]) for row in rows] == [
        (0.01, "ready"), (0.01, "forward"), (None, "ready"), (None, "forward"),
    ]  # fmt: skip
    assert all(row["iteration_ns"] >= row["compute_ns"] for row in rows)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("bytes_per_s", "slow_rank", "limit"),
    [
        (1e12, 1.0, "limited by computation (100 %)"),
        (1e12, 3.0, "limited by stragglers (67 %), then by computation (33 %)"),
        (1e9, 1.0, "limited by computation (69 %), then by exposed communication of 2 of 2 buckets (0-1) (31 %)"),
        (1e8, 1.0, "limited by exposed communication of 2 of 2 buckets (0-1) (89 %), then by computation (11 %)"),
    ],
)
def test_the_last_sentence_names_the_fastest_its_limit_and_its_lead(bytes_per_s, slow_rank, limit):
    ms = 10**6
    trace = trace_of([[iteration(2 * ms, (6 * ms, 4 * ms), 8 * ms, ms)]], [4 * ms, 4 * ms])
    stragglers = [Straggler(rank=1, factor=slow_rank)] if slow_rank > 1 else []
    fabric = Fabric.from_alpha_beta(alpha_ns=10, bytes_per_s=bytes_per_s)
    policies = [Policy(bucket_cap_mb=cap) for cap in (float("inf"), 1.0)]
    predictions = [predict(trace, fabric, world_size=2, policy=one, stragglers=stragglers) for one in policies]
    fastest = min(predictions, key=lambda prediction: prediction.iteration_ns)
    sentence = conclusion(policies, predictions)
    tie = predictions[0].compare(predictions[1]).intervals_overlap
    rest = "a tie within the 90 % intervals with" if tie else "its lead of"
    assert f", {fastest.iteration_ns / 1e6:.1f} ms, {limit}; {rest}" in sentence
    assert conclusion(policies[:1], predictions[:1]).endswith(")")


def test_configurations_with_equal_buckets_are_no_tie():
    trace = trace_of([[iteration(20, (60, 40), 80, 10)]], [4, 4])
    policies = [Policy(bucket_cap_mb=cap) for cap in (1.0, 25.0)]
    fabric = Fabric.from_alpha_beta(alpha_ns=10, bytes_per_s=1e9)
    predictions = [predict(trace, fabric, world_size=2, policy=one) for one in policies]
    assert conclusion(policies, predictions).endswith("; 1 others have the same buckets")


@examples(30)
@given(any_predictions())
def test_every_prediction_has_a_last_sentence_whose_shares_are_parts_of_the_whole(asked):
    sentence = conclusion([asked.policy], [asked.predict()])
    shares = [int(share) for share in re.findall(r"\((\d+) %\)", sentence)]
    assert len(shares) <= 2
    assert sum(shares) <= 101, "each is rounded"
    assert shares == sorted(shares, reverse=True)


def test_emulate_prints_no_difference_for_torchs_class_and_writes_json(here, topology, tmp_path):
    """With the usual caps, of which the last one is infinite."""
    trace, out = tmp_path / "small.json.gz", tmp_path / "emulated.json"
    here("synthesize", "--model", "small-tensors", "--out", trace)
    done = here("emulate", trace, "--fabric", topology, "--class", "torch", "--json", out)
    assert done.returncode == 0, done.stderr
    assert "largest difference between emulated and predicted median iterations: 0 ns" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert [row["cap_mb"] for row in rows] == [0.5, 1.0, 5.0, 25.0, None]
    assert all(row["emulated_ns"] == row["predicted_ns"] for row in rows)


def test_sweep_writes_a_table_and_draws_it(here, trace, fabric, topology, tmp_path):
    for ending in ("csv", "parquet", "json"):
        done = here(
            "sweep", trace, "--fabric", fabric, "--fabric", topology, "--world-sizes", "2,4", "--caps", "0.01,single",
            "--hooks", "none,power_sgd:2", "--out", tmp_path / f"s.{ending}", "--heat-map", tmp_path / "h.png",
            "--policy", "sync_every=2", "--straggler", "1:1.5", "--variation", "kind=fitted",
            "--variation", "iterations=5", "--json", tmp_path / "j",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "the fastest configuration at each world size" in done.stdout
    tables = [
        pd.read_csv(tmp_path / "s.csv"), pd.read_parquet(tmp_path / "s.parquet"), pd.read_json(tmp_path / "s.json")
    ]  # fmt: skip
    assert [len(table) for table in tables] == [16] * 3
    assert all(list(table["iteration_ns"]) == list(tables[0]["iteration_ns"]) for table in tables)
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    assert [row["bucket_cap_mb"] for row in rows[:3]] == [0.01, 0.01, None]
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_predict_takes_every_knob_and_draws_the_timeline(here, trace, topology, tmp_path):
    done = here(
        "predict", trace, "--fabric", topology, "--world-size", 4, "--caps", 0.01, "--inputs", "3,3,2,0",
        "--policy", "find_unused_parameters=true", "--policy", "process_groups=2", "--fabric-set", "slow_link=2",
        "--straggler", "random:2", "--timeline", tmp_path / "t.svg",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fastest configuration: parts of the median iteration" in done.stdout
    assert "no processor costs, so copies, launches and slow-downs count as free" in done.stdout
    assert "after the last iteration, all ranks receive one rank's model" in done.stdout
    assert "rank 3 computes" in (tmp_path / "t.svg").read_text()


def test_a_topology_takes_the_processor_of_a_calibration(here, trace, fabric, topology, tmp_path):
    slow = Fabric.load(fabric).model_copy(update={"processor": Processor(launch_ns=10**8)})
    slow.save(tmp_path / "slow.json")
    asked = ("predict", trace, "--fabric", topology, "--caps", "default,single", "--json", tmp_path / "j")
    times = []
    for processor in ((), ("--processor", tmp_path / "slow.json")):
        assert here(*asked, *processor).returncode == 0
        rows = json.loads((tmp_path / "j").read_text())["rows"]
        assert [row["cap_mb"] for row in rows] == ["default", None]
        times.append(rows[1]["iteration_ns"])
    assert times[1] >= times[0] + 10**8 - 10**7


@pytest.fixture
def logs(tmp_path) -> list[Path]:
    """Of nccl-tests: 8.65 us on two ranks, 9.65 us on four."""
    paths = [tmp_path / "two.log", tmp_path / "four.txt"]
    for path, ranks, us in zip(paths, (2, 4), (8.65, 9.65), strict=True):
        path.write_text(nccl_log(ranks, {8: us, 2**20: 99.25}))
    return paths


def test_logs_of_nccl_tests_are_fabrics_merged_by_predict_and_an_axis_of_sweep(here, trace, logs, tmp_path):
    fabrics = [word for path in logs for word in ("--fabric", path)]
    for world_size in (2, 4):
        asked = ("predict", trace, "--world-size", world_size, "--caps", "single", "--json", tmp_path / "j")
        done = here(*asked, *fabrics)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads((tmp_path / "j").read_text())["rows"]
        merged = predict(
            Trace.load(trace),
            Fabric.merged(*map(Fabric.load, logs)),
            world_size=world_size,
            bucket_cap_mb=float("inf"),
        )
        assert row["iteration_ns"] == merged.iteration_ns
    asked = ("sweep", trace, *fabrics, "--caps", "single", "--fabric-set", "extrapolate=true")
    assert here(*asked, "--world-sizes", "2,4", "--out", tmp_path / "s.csv").returncode == 0
    assert pd.read_csv(tmp_path / "s.csv")["fabric"].tolist() == [str(path) for path in logs for _ in range(2)]


def test_a_fabric_is_shown_as_latency_and_bandwidth(here, logs, fabric, topology, tmp_path):
    done = here("fabric", *logs, "--json", tmp_path / "j")
    assert done.returncode == 0, done.stderr
    assert "the fabric has no processor costs" in done.stdout
    shown = json.loads((tmp_path / "j").read_text())
    assert [(row["world_size"], row["origin"]) for row in shown["segments"]] == [(2, "measured"), (4, "measured")]
    assert shown["segments"][0]["alpha_ns"] == pytest.approx(8650, rel=1e-3)
    processor = Processor(
        launch_ns=1234, pack=Linear(fixed_ns=5), hooks=(HookCost(name="fp16", compress=Linear(fixed_ns=7e3)),)
    )
    Fabric.load(fabric).model_copy(update={"processor": processor}).save(tmp_path / "slow.json")
    done = here("fabric", topology, "--processor", tmp_path / "slow.json", "--world-sizes", "2,4")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("described", "1,234", "5 + 0 per byte", "fp16"))
    assert "described" in here("fabric", topology).stdout


@pytest.mark.parametrize("setting", ["plan=[[5,4],[3,2,1,0]]", "bucket_cap_mb_list=[0.01,25]"])
def test_a_policy_that_says_the_buckets_is_one_row_and_leaves_no_choice(here, trace, fabric, tmp_path, setting):
    field = setting.partition("=")[0]
    asked = (trace, "--fabric", fabric, "--policy", setting, "--json", tmp_path / "j")
    picture = ("--heat-map", tmp_path / "h.svg")
    for command, extra in (("predict", ()), ("sweep", ("--world-sizes", 2, "--out", tmp_path / "s.csv", *picture))):
        done = here(command, *asked, *extra)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads((tmp_path / "j").read_text())["rows"]
        assert row.get("cap_mb", row.get("bucket_cap_mb")) == field
        assert row["order"] == ("plan" if field == "plan" else "ready")
        done = here(command, *asked, *extra, "--caps", "1,25")
        assert done.stderr.startswith(f"ddplab: --caps: expected no value with --policy {field}=...")
    assert pd.read_csv(tmp_path / "s.csv")["bucket_cap_mb"].tolist() == [field]
    assert field in (tmp_path / "h.svg").read_text()


def test_values_of_settings_are_json_in_records_within_records_too(here, trace, topology, tmp_path):
    processor = {"hooks": [{"name": "fp16", "compress": {"fixed_ns": 1e8}}]}
    asked = (
        "predict",
        trace,
        "--fabric",
        topology,
        "--hooks",
        "none,fp16",
        "--caps",
        "single",
        "--json",
        tmp_path / "j",
    )
    done = here(*asked, "--fabric-set", f"processor={json.dumps(processor)}")
    assert done.returncode == 0, done.stderr
    none, fp16 = (row["iteration_ns"] for row in json.loads((tmp_path / "j").read_text())["rows"])
    assert fp16 >= none + 9 * 10**7


def test_concurrency_follows_the_library_that_is_set(here, topology, tmp_path):
    def concurrency(*settings: str) -> int:
        words = [word for setting in settings for word in ("--fabric-set", setting)]
        assert here("fabric", topology, *words, "--json", tmp_path / "j").returncode == 0
        return json.loads((tmp_path / "j").read_text())["concurrency"]

    assert [concurrency(), concurrency("library=gloo"), concurrency("library=gloo", "concurrency=3")] == [1, 2, 3]


def test_the_heat_map_has_the_axes_that_were_asked_for(here, trace, fabric, tmp_path):
    asked = (
        "sweep",
        trace,
        "--fabric",
        fabric,
        "--caps",
        "default,single",
        "--hooks",
        "none,fp16",
        "--orders",
        "size,ready",
    )
    drawn = ("--heat-map", tmp_path / "h.svg", "--rows", "hook", "--columns", "order", "--value", "iteration_ns")
    done = here(*asked, *drawn, "--world-sizes", "2,4", "--out", tmp_path / "s.csv", "--json", tmp_path / "j")
    assert done.returncode == 0, done.stderr
    picture = (tmp_path / "h.svg").read_text()
    assert all(f"<!-- {word} -->" in picture for word in ("comm hook", "fp16", "order", "size"))
    assert "<!-- ranks -->" not in picture
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    assert {row["bucket_cap_mb"] for row in rows} == {"default", None}


def test_a_trace_is_synthesised_and_rescaled(here, trace, tmp_path):
    out = tmp_path / "synthetic.json.gz"
    done = here("synthesize", "--model", TINY, "--device", "h100-fp32", "--step-ms", 7, "--out", out)
    assert done.returncode == 0, done.stderr
    assert Trace.load(out).ranks[0].iterations[0].duration_ns == 7_000_000
    done = here(
        "rescale", trace, "--model", TINY, "--from", "v100-fp32", "--to", "h100-fp32", "--out", tmp_path / "r.json"
    )
    assert done.returncode == 0, done.stderr
    assert "H100" in Trace.load(tmp_path / "r.json").workload.device_name


def test_knobs_lists_every_field_with_its_meaning(here):
    listed = here("knobs").stdout
    for title, record in KNOBS.items():
        assert title in listed
        for name, field in record.model_fields.items():
            assert name in listed
            assert re.fullmatch(r".{8,}; .+", field.description or ""), (
                f"{record.__name__}.{name}: WHAT, UNIT; SOURCE"
            )


def test_every_knob_is_compared_with_other_simulators():
    table = (ROOT / "docs" / "comparison.md").read_text()
    arguments = set(inspect.signature(predict).parameters) - {"policy", "settings"}
    arguments |= set(Policy.model_fields) | set(Processor.model_fields)
    fields = {name for record in (LevelEntry, TopologyFile, Linear) for name in record.model_fields} - {"source"}
    unasked = {"fabric", "order_seed", "hooks"}
    for name in (arguments | fields) - unasked:
        assert f"`{name}`" in table, f"the table of what can be asked has no `{name}`"


def test_every_command_has_a_manual_whose_examples_parse():
    commands = typer.main.get_command(app).commands
    assert set(EXAMPLES) == set(commands)
    for name, commands_shown in EXAMPLES.items():
        for example in commands_shown:
            program, command, *words = shlex.split(example)
            assert (program, command) == ("ddplab", name)
            manual = commands[name]
            if importers := getattr(manual, "commands", None):  # `import` has a command for each kind of file
                manual = importers[words.pop(0)]
            assert manual.make_context(name, words).params


def test_help_shows_the_usual_order_and_examples_that_fit_a_terminal(here):
    assert "  record      record when each gradient of a model is ready" in here("--help").stdout
    for name, shown in EXAMPLES.items():
        lines = here(name, "--help").stdout.splitlines()
        for example in shown:
            (line,) = (line for line in lines if line.strip() == example)
            assert len(line) <= 80


def test_calibrate_and_validate_on_real_ranks(here, tmp_path):
    """The slow one: it really measures, over links where it may have any. Predictions are on disk, as hashed."""
    import hashlib

    links = ["--link-rate", "1gbit"] if links_are_permitted() else []
    done = here(
        "validate", "--model", TINY, "--caps", "0.01,single", "--hooks", "none,fp16", "--repeat", 1,
        "--out", tmp_path, "--json", tmp_path / "j", *links,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "j").read_text())
    assert set(report) == {
        "predictions_sha256",
        "mape",
        "paired_mape",
        "worst_error",
        "noise",
        "pairs_apart",
        "sign_errors",
        "fastest_found",
        "coverage",
        "half_width",
        "interval_score",
        "world_size",
        "drift",
        "yardsticks",
        "rows",
    }
    assert [(row["cap_mb"], row["hook"]) for row in report["rows"]] == [
        (0.01, "none"), (0.01, "fp16"), (None, "none"), (None, "fp16"),
    ]  # fmt: skip
    explained = here("explain", tmp_path, "--figure", tmp_path / "why.png", "--json", tmp_path / "why.json")
    assert explained.returncode == 0, explained.stderr
    assert "main cause" in explained.stdout
    assert (tmp_path / "why.png").stat().st_size > 10_000
    for row, one in zip(
        report["rows"], json.loads((tmp_path / "why.json").read_text())["configurations"], strict=True
    ):
        assert (row["cap_mb"], row["hook"], row["predicted_ns"]) == (one["cap_mb"], one["hook"], one["predicted_ns"])
        assert one["measured_ns"] == pytest.approx(row["measured_ns"], abs=1)
    for row in report["rows"]:
        assert row["error"] == pytest.approx(row["predicted_ns"] / row["measured_ns"] - 1)
        assert row["measured_ns"] > 0
    written = (tmp_path / "predictions.json").read_bytes()
    assert hashlib.sha256(written).hexdigest() == report["predictions_sha256"]
    assert (tmp_path / "report.csv").exists()
    fabric = Fabric.load(model_folder(tmp_path, TINY) / "fabric.json")
    assert fabric.all_reduce_ns(1 << 27, 2) > fabric.all_reduce_ns(1 << 12, 2) > 0
    assert [hook.name for hook in fabric.processor.hooks] == ["none", "fp16"]
    assert ("links of 1 Gbit/s" in fabric.source) == bool(links)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["record", "--model", "alexnet"],
            "ddplab: --model: expected resnet50, resnet18, mlp, transformer, small-tensors, resnet50-224, "
            "bert-large, gpt2, emulated:TRACE or module",
        ),
        (["record", "--model", "no_such:thing"], "No module named 'no_such'"),
        (
            ["record", "--model", "tests.models_for_cli:not_callable"],
            "not_callable is not callable but a int",
        ),
        (["record", "--model", "tests.models_for_cli:not_a_pair"], "expected it to return (module, loss_fn)"),
        (["record", "--world-size", "0"], "Invalid value for '--world-size'"),
        (["record", "--frobnicate"], "No such option"),
        (["predict", "absent.json"], "ddplab: absent.json: cannot be read: No such file"),
        (["predict", "{trace}", "--fabric", "absent.json"], "ddplab: absent.json: cannot be read"),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--caps", "1,two"],
            "ddplab: --caps: expected sizes in MB",
        ),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--caps", "-1"],
            "ddplab: --caps: expected sizes in MB",
        ),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--orders", "up"],
            "ddplab: --orders: expected ready, reverse",
        ),
        (["record", "--out", "/dev/null/trace.json"], "cannot be written: /dev/null is not a folder"),
        (["predict", "{trace}", "--fabric", "{fabric}", "--json", "."], "cannot be written: it is a folder"),
        (["predict", "{trace}", "--fabric", "{trace}"], "expected a fabric file, got a trace"),
        (["predict", "{fabric}"], "not a trace: workload: field required"),
        (["validate", "--caps", ""], "ddplab: --caps: expected sizes in MB"),
        (["validate", "--calibrations", "11"], "--calibrations: expected at most --repeat, which is 10, got 11"),
        (
            ["validate", "--emulate", "{trace}", "--calibrations", "2"],
            "--calibrations: expected 1 with --emulate, because the speed of an emulated device",
        ),
        (["predict", "{trace}", "--fabric", "{fabric}", "--hooks", "gzip"], "--hooks: hook: expected one of none"),
        (["predict", "{trace}", "--fabric", "{fabric}", "--policy", "sync=2"], "--policy: expected NAME=VALUE"),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--policy", "order=size"],
            "--policy: expected --orders for order",
        ),
        (["predict", "{trace}", "--fabric", "{fabric}", "--policy", "sync_every=0"], "--policy: sync_every: input"),
        (["predict", "{trace}", "--fabric", "{fabric}", "--straggler", "3"], "--straggler: expected RANK:FACTOR"),
        (["predict", "{trace}", "--fabric", "{fabric}", "--straggler", "9:2"], "stragglers[0].rank: expected a rank"),
        (["predict", "{trace}", "--fabric", "{fabric}", "--inputs", "3"], "inputs: expected 2 numbers of batches"),
        (["predict", "{trace}", "--fabric", "{fabric}", "--variation", "kind=wild"], "--variation: kind: input"),
        (["sweep", "{trace}", "--fabric", "{fabric}", "--out", "s.xls"], "--out: expected a name that ends in .csv"),
        (["sweep", "{trace}", "--fabric", "{fabric}", "--world-sizes", "2,x"], "--world-sizes: expected numbers"),
        (["sweep", "{trace}", "--fabric", "{fabric}", "--value", "speed"], "--value: expected one of buckets"),
        (["sweep", "{trace}", "--fabric", "{fabric}", "--rows", "caps"], "--rows: expected one of trace, fabric"),
        (["sweep", "{trace}", "--fabric", "{fabric}", "--rows", "world_size"], "--columns: expected one of trace"),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--fabric", "{fabric}"],
            "fabrics[1]: topology: expected none, because fabrics[0]",
        ),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--fabric-set", "algorithm=trees"],
            "--fabric-set: algorithm: input should be 'library', 'ring'",
        ),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--processor", "{fabric}"],
            "--processor: expected a fabric file of `ddplab calibrate`",
        ),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--inputs", "0,x"],
            "--inputs: expected numbers of at least 0",
        ),
        (["fabric", "absent.log"], "absent.log: cannot be read"),
        (["fabric", "{fabric}", "--world-sizes", "0"], "--world-sizes: expected numbers of at least 1"),
        (["synthesize", "--device", "tpu"], "tpu"),
        (["predikt"], "No such command 'predikt'"),
        (["predict", "{trace}", "--wurld-size", "2"], "No such option: --wurld-size"),
        (["predict", "{trace}", "--world-size", "two"], "'--world-size'"),
        (["fabric", "{fabric}", "--world-sizes"], "'--world-sizes' requires an argument"),
    ],
)
def test_a_mistake_is_reported_in_one_line(words, message, here, trace, fabric):
    done = here(*(word.format(trace=trace, fabric=fabric) for word in words))
    assert done.returncode != 0
    assert message in done.stderr
    lines = [line for line in done.stderr.splitlines() if line not in STEPS and " comes from " not in line]
    assert [line.startswith("ddplab: ") for line in lines] == [True]


def test_a_mistake_ends_the_command_without_a_traceback():
    done = ddplab("predict", "absent.json")
    assert done.returncode == 1
    assert re.fullmatch(r"ddplab: absent.json: cannot be read: No such file or directory; .*\n", done.stderr)


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


def started(*words: object, folder: Path) -> subprocess.Popen[str]:
    """Start the command with temporary files in a folder."""
    return subprocess.Popen(
        [Path(sys.executable).parent / "ddplab", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env=os.environ | {"TMPDIR": str(folder)},
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in SIGNALS],  # the background ignores SIGINT
    )  # fmt: skip


def listening(session: int) -> set[str]:
    """Addresses, as in /proc/net/tcp, on which the processes of a session listen."""
    sockets = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                sockets |= {os.readlink(one) for one in (process / "fd").iterdir()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.parametrize(
    "words",
    [("conform", "ddplab", "--only", "a lost rank"), ("record", "--model", TINY, "--world-size", "2")],
    ids=str,
)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_ranks_listen_on_the_loopback_interface_alone(words, tmp_path):
    out = () if words[0] == "conform" else ("--out", str(tmp_path / "trace.json"))
    seen = set()
    with started(*words, *out, folder=tmp_path) as running:
        while running.poll() is None:
            seen |= listening(running.pid)
        errors = running.communicate()[1]
    assert running.returncode == 0, errors
    assert seen == {"0100007F"}  # 127.0.0.1


def assert_ended_in_order(returncode: int, errors: str, number: signal.Signals, folder: Path) -> None:
    assert returncode == 128 + number
    assert errors.splitlines()[-1].startswith(f"ddplab: ended by {number.name}")
    assert "Traceback" not in errors
    left = [one.name for one in folder.iterdir() if not one.name.startswith("torchinductor")]  # a cache of torch's
    assert left == []


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGHUP, os.killpg), (signal.SIGTERM, os.kill)],
    ids=["Ctrl-C, to all", "a terminal that is closed, to all", "SIGTERM, to the command"],
)
def test_a_signal_ends_the_command_and_its_ranks_and_leaves_nothing(number, send, tmp_path):
    process = started("record", "--model", "tests.models_for_cli:telling", "--iterations", "100000", folder=tmp_path)
    try:
        assert process.stdout.readline() == "computing\n"
        send(process.pid, number)
        _, errors = process.communicate(timeout=60)  # as long as a rank lives, it holds these pipes
    finally:
        process.kill()
    assert_ended_in_order(process.returncode, errors, number, tmp_path)


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.6, 0.9])
def test_ctrl_c_while_the_command_starts_is_one_line(delay_s, tmp_path):
    process = started("predict", "absent.json", folder=tmp_path)
    while not _handles_sigterm(process.pid):
        assert process.poll() is None
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delay_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if process.returncode == 1:  # it was faster
        assert errors.startswith("ddplab: absent.json")
    else:
        assert_ended_in_order(process.returncode, errors, signal.SIGINT, tmp_path)


def _handles_sigterm(pid: int) -> bool:
    mask = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_files_of_the_user_replace_neither_torch_nor_this_project(tmp_path):
    for name in ("torch.py", "reference/__init__.py", "simulator/__init__.py", "reference/launch.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('that of the user')")
    (tmp_path / "mine.py").write_text("from sibling import tiny")
    (tmp_path / "sibling.py").write_text((ROOT / "tests" / "models_for_cli.py").read_text())
    done = ddplab("record", "--model", "mine:tiny", "--iterations", "2", "--out", "t.json", cwd=tmp_path)
    assert (done.returncode, Trace.load(tmp_path / "t.json").workload.model) == (0, "mine:tiny")
