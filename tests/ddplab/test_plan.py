"""The command `plan`: names, files and questions; the first line is the verdict, and wrong input is one line."""

import re

import pytest

from ddplab.cli.plan import _read_efficiency, _read_steps
from ddplab.cli.shared_options import read_hours
from ddplab.reference.trace import Trace

from ..simulator.changed_traces import with_parameters

FAST = ("--world-size", "8,16")


def test_two_names_are_enough(answered):
    shown, document = answered("plan", "ResNet-50", "aws-p4d", "--world-size", 8, "--world-size", 16)
    assert shown.startswith("16 GPUs of aws-p4d process")
    assert document["systems"][0]["model"] == "resnet50-224"
    assert [row["world_size"] for row in document["sizes"]] == [8, 16]
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) <= 40


def test_a_stranger_gets_an_answer_or_hears_what_to_measure(here, tmp_path):
    asked = ("resnet50-224", "A100", "--network", "100gbit", "--world-size", 64)
    document = tmp_path / "open.json"
    done = here("plan", *asked, "--samples", 1.2e10, "--deadline", "3d", "--json", document)
    assert "for a deadline of 72 h" in document.read_text()
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ddplab: the range is wider than the decision: 64 GPUs of A100:")
    assert "to narrow it, measure" in line


def test_systems_are_compared_by_price(printed, tmp_path):
    prices = tmp_path / "prices.csv"
    prices.write_text(
        "system,per_gpu_hour,currency,source,date\n"
        "aws-p4d,1,USD,a test,2026-01-01\ndgx-h100,9,USD,a test,2026-01-01\n"
    )
    steps = ("--step-ms", "aws-p4d:200", "--step-ms", "dgx-h100:100")
    asked = (*FAST, *steps, "--samples", 1e8, "--deadline", "1d", "--prices", prices)
    shown = printed("plan", "resnet50", "aws-p4d", "dgx-h100", *asked)
    assert shown.startswith("yes: 8 GPUs of aws-p4d, the cheapest of 4 choices whose whole range suffices (1")
    assert "fastest and cheapest by their medians, from fast to cheap: 16 of dgx-h100" in shown


def test_a_run_of_a_second_takes_seconds(printed, here):
    asked = ("plan", "resnet50", "aws-p4d", "--world-size", 8, "--price", 2.5, "--samples")
    shown = " ".join(printed(*asked, 1000, "--deadline", "1min").split())
    assert re.search(r" 0\.\d+-0\.\d+ s for a deadline of 1.00 min 90 % ranges", shown)
    assert re.search(r" ms hours USD in time .* 0\.\d+-0\.\d+ s .* yes ", shown)
    assert "h for a deadline of 1.00 min" in " ".join(here(*asked, 1e9, "--deadline", "1min").stdout.split())
    assert not re.search(r"\D0\.00\D", printed(*asked, 1e9, "--details"))


def test_what_was_measured_is_no_name_alone_and_an_option_given_twice_is_refused(printed, here):
    """Of two --measured, the last counted in silence."""
    asked = ("plan", "resnet50", "aws-p4d", "--samples", 115e6, "--deadline", "1h", "--world-size", "64")
    assert printed(*asked).startswith("yes, by names alone: ")
    assert printed(*asked, "--measured", "8:97.4ms").startswith("yes: ")
    done = here(*asked, "--measured", "8:97.4ms", "--measured", "4:97ms")
    assert done.returncode == 1
    assert done.stderr == "ddplab: --measured: expected once, its values separated by commas, got it 2 times\n"


def test_prices_of_some_systems_are_shown_and_decide_nothing(printed, here, tmp_path):
    prices = tmp_path / "prices.csv"
    prices.write_text("system,per_gpu_hour,currency,source,date\nAWS_P4D,9,USD,a test,2026-01-01\n")
    asked = ("gpt2", "aws-p4d", "dgx-h100", "--samples", 1e8, "--deadline", "2d", "--world-size", 16)
    shown = printed("plan", *asked, "--prices", prices)
    assert shown.startswith("yes, by names alone: 16 GPUs of aws-p4d, the smallest of 2 choices")
    rows = [
        line.split() for line in shown.splitlines() if " 16 " in line and "fits" not in line and "yes" in line.split()
    ]
    assert [row[-2] == "-" for row in rows] == [False, True]
    shown = printed(
        "plan", "gpt2", "aws-p4d", "dgx-h100", "--nodes", 1, "--prices", prices, "--price", "dgx-h100:3-4"
    )
    assert "USD/M tokens" in shown
    assert "sequences of 1,024 tokens" in " ".join(shown.split())
    done = here("plan", "gpt2", "aws-p4d", "--prices", prices, "--price", 3)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--price: expected one price of a system, got several of aws-p4d" in done.stderr


def test_tokens_prices_and_nodes_as_people_ask_for_them(here, printed):
    shown = " ".join(printed("plan", "bert-large-512", "h100", "--nodes", "1,2", "--price", "1.80-2.40EUR").split())
    assert shown.startswith("16 GPUs of h100 process ")
    for words in "tokens/s", "EUR/M tokens", "; sequences of 512 tokens", "MFU":
        assert words in shown
    for words, says in (
        (("h100", "a100", "--price", 2.5), "--price: expected a file, or the price of one of the systems"),
        (("h100", "--price", "cheap"), "--price: per_gpu_hour: expected a price above 0"),
        (("h100", "--nodes", "two"), "--nodes: expected numbers from 1 to a million"),
        (("h100", "--gpus", 10**9), "--world-size: expected numbers from 1 to a million, separated by commas, got"),
        (("alps", "dgx-h100", "--nodes", 2), "--nodes: expected systems with equally many GPUs in a node, got 4 in"),
        (("h100", "--price", 2, "--budget", 10), "--budget: expected --samples with it"),
        (("h100", "--deadline", "1h"), "--deadline: expected --samples with it"),
    ):
        done = here("plan", "gpt2", *words)
        assert (done.returncode, done.stdout, done.stderr.startswith(f"ddplab: {says}")) == (1, "", True), done.stderr


def test_the_nearest_choice_is_named_and_a_contradiction_decides_nothing(here, trace, tmp_path):
    done = here("plan", "bert-large", "aws-p4d", "--efficiency", "99%", "--world-size", "8,512")
    assert (done.returncode, done.stdout.startswith("no: 8 GPUs of aws-p4d, the nearest of 2 choices")) == (1, True)
    words = ("--measured", "8:60ms", "--world-size", 64, "--efficiency", "50%")
    done = here("plan", "resnet50", "dgx-h100", *words)
    assert done.stderr.startswith("ddplab: the answer is open, because the measured iterations contradict the model")
    done = here("plan", trace, "dgx-h100", "--world-size", 8)
    assert "expected a trace of NVIDIA H100 SXM, as the system has, got " in done.stderr
    of_h100 = tmp_path / "h100.json.gz"
    done = here("synthesize", "--model", "resnet50-224", "--device", "h100", "--out", of_h100)
    assert done.returncode == 0
    for device, in_trace in (("h100-bf16", False), ("h100-tf32", True), ("h100", True)):
        done = here("plan", of_h100, "dgx-h100", "--world-size", 8, "--device", device)
        refused = "expected a trace of NVIDIA H100 SXM, bf16, as the system has, got NVIDIA H100 SXM, tf32"
        assert (done.returncode == 0, refused in done.stderr) == (in_trace, not in_trace)


def test_a_trace_and_a_file_of_links_are_systems_too(printed, trace, topology):
    printed("plan", trace, topology, "--world-size", "2,4", "--measured", "2:20ms")
    printed("plan", "tests.models_for_cli:tiny", topology, "--device", "h100", "--world-size", "2,4")


def test_that_all_rows_of_sparse_gradients_count_is_told_without_details(printed, trace, topology, tmp_path):
    changed = with_parameters(Trace.load(trace), sparse=[True, *[False] * (len(Trace.load(trace).sizes_bytes) - 1)])
    changed.save(tmp_path / "sparse.json")
    shown = " ".join(printed("plan", tmp_path / "sparse.json", topology, "--world-size", "2").split())
    assert "not in the ranges: sparse gradients" in shown


def test_values_with_units():
    assert [read_hours("deadline", one) for one in ("36h", "3d", "90 min")] == [36, 72, 1.5]
    assert (_read_efficiency("0.9"), _read_efficiency("90%"), _read_efficiency("90 %")) == (0.9, 0.9, 0.9)
    assert _read_steps(["130"], ["a"]) == {"a": 130.0}
    assert _read_steps(["b:80", "a:130"], ["a", "b"]) == {"a": 130.0, "b": 80.0}
    for wrong in (["130"], ["c:1"], ["a:0"], ["a:fast"]):
        with pytest.raises(ValueError, match="--step-ms: expected milliseconds above 0"):
            _read_steps(wrong, ["a", "b"])


def test_a_step_that_nobody_has_seen_so_long_is_doubtful(here):
    """The range contains what published training reaches, so that no answer comes from a wrong unit alone."""
    words = ("plan", "bert-large", "a100", "--gpus", 64, "--samples", 3e9, "--deadline", "4d", "--step-ms")
    done = here(*words, 3000)
    assert done.returncode == 1
    assert "wider than the decision" in done.stderr
    assert "the step takes 16 times its usual time: check unit, batch and precision" in done.stderr
    assert "--measured 1:TIME with a trace or a doubtful step" in done.stderr
    assert here(*words, 400).stdout.startswith("no: ")
    asked = ("plan", "bert-large", "a100", "--gpus", 64, "--step-ms", 3000, "--details")
    shown = " ".join(here(*asked).stdout.split())
    assert "(held: a doubtful step not tested)" in shown
    assert "a step on one GPU (--measured 1:TIME)" in shown, "the same step again would narrow nothing"
    assert "a host launches a kernel every" not in shown
    shown = " ".join(here(*asked, "--measured", "1:3000ms").stdout.split())
    assert "to narrow ±" in shown
    assert "a step on one GPU (" not in shown


def test_what_to_measure_next_can_be_given(here, tmp_path):
    """`--step-ms` was advised for traces, for which it is refused."""
    path = tmp_path / "t.json.gz"
    assert here("synthesize", "--model", "gpt2", "--device", "a100-40gb-bf16", "--out", path).returncode == 0
    shown = " ".join(here("plan", path, "dgx-a100", "--gpus", 16).stdout.split())
    assert "--step-ms" not in shown
    assert "a step on one GPU (--measured 1:TIME" in shown
    step_ns = Trace.load(path).ranks[0].iterations[0].duration_ns
    done = here("plan", path, "dgx-a100", "--gpus", 16, "--measured", f"1:{step_ns}ns")
    assert (done.returncode, "a step on one GPU" in done.stdout) == (0, False)


def test_what_is_advised_for_several_systems_can_be_given(here, printed):
    """`--measured` was advised for each, and refused with several systems."""
    asked = ("plan", "resnet50", "aws-p4d", "dgx-h100", "--gpus", 64)
    shown = " ".join(printed(*asked).split())
    assert "(--measured with aws-p4d alone)" in shown
    assert "(--step-ms dgx-h100:MS)" in shown
    assert printed(*asked, "--step-ms", "dgx-h100:45")
    assert "plan it alone" in here(*asked, "--measured", "8:97ms").stderr
    assert printed(*asked[:3], "--gpus", 64, "--measured", "8:97ms")
    done = here(*asked[:4], "--gpus", 64, "--samples", 1.2e10, "--deadline", "35h")
    assert re.search(
        r"; (aws-p4d|dgx-h100): the width .* --step-ms \1:MS, or --measured 1:TIME with \1 al", done.stderr
    )


def test_a_plan_names_no_option_that_it_lacks(here):
    done = here("plan", "nosuch", "aws-p4d")
    assert done.stderr == "ddplab: model: expected module:callable or a name that `ddplab show` lists, got 'nosuch'\n"


def test_a_run_for_less_than_a_cent_has_no_figures_unless_its_budget_is_less(printed):
    asked = ("plan", "resnet50", "aws-p4d", "--gpus", "8,16", "--step-ms", 90, "--price", 0.01, "--deadline", "1h")
    shown = printed(*asked, "--samples", 40000, "--budget", 0.01)
    assert "a cost of <0.01 USD for a budget of 0.01" in " ".join(shown.split())
    assert re.search(r"^ +16 .* <0\.01 +yes +yes", shown, re.MULTILINE)
    assert re.search(r"16 of aws-p4d\s+\(.* s,\s+<0\.01\); 8", shown)
    assert re.search(r"a cost of\s+0\.00\d+-0\.00\d+ USD", printed(*asked, "--samples", 1e5, "--budget", 0.009))
    assert re.search(r"^ +8 .* <0\.01-0\.0\d+ ", printed(*asked, "--samples", 2.45e6), re.MULTILINE)


def test_a_measured_step_has_no_more_digits_than_were_given(printed, here, tmp_path):
    shown = " ".join(printed("plan", "resnet50", "aws-p4d", "--gpus", 8, "--step-ms", 90, "--details").split())
    assert "scaled to a measured step of 90 ms" in shown
    path = tmp_path / "t.json.gz"
    made = ("synthesize", "--model", "resnet50-224", "--device", "a100-40gb", "--step-ms", 90, "--out", path)
    assert here(*made).returncode == 0
    assert "90.000" not in here("plan", path, "dgx-h100").stderr


def test_the_table_has_the_range_of_the_verdict(here):
    """91 to 99.1 % is less than 100 %; rounded outwards alone, the cell was 91-100 %, beside a "no"."""
    done = here("plan", "resnet50", "a100", "--step-ms", 90, "--gpus", 2, "--efficiency", "100%")
    (words,) = re.findall(r"an efficiency of (\S+ %) for a\s+target", done.stdout)
    (row,) = re.findall(r"^ +2 .*", done.stdout, re.MULTILINE)
    assert f" {words} " in row
    assert row.split()[-1] == "no"
    assert "not used by 2 GPUs in one node" in " ".join(done.stdout.split()) or "no rate" in done.stdout


@pytest.mark.parametrize("words", [("bucket_cap_mb=50",), ("hook=fp16", "order=reverse")])
def test_a_plan_takes_the_caps_orders_and_hooks_that_predict_has_options_for(answered, trace, topology, words):
    """It named the options of `predict`, which it does not have."""
    names = {"bucket_cap_mb": "--caps", "hook": "--hooks", "order": "--orders"}
    asked = [word for one in words for word in ("--set", one)]
    options = [word for one in words for word in (names[one.partition("=")[0]], one.partition("=")[2])]
    options += [] if "--caps" in options else ["--caps", "default"]
    size = answered("plan", trace, topology, "--gpus", 4, *asked)[1]["sizes"][-1]
    [row] = answered("predict", trace, "--fabric", topology, "--world-size", size["world_size"], *options)[1]["rows"]
    assert size["iteration_ns"] == row["iteration_ns"]


def test_systems_without_a_common_number_of_gpus_are_told_in_one_line(here, tmp_path):
    pod = tmp_path / "pod.yaml"
    links = "{members: 3, latency_us: 3, gb_per_s: 200}\n  nic: {of: nvlink, latency_us: 10, gb_per_s: 9, members: 5}"
    pod.write_text(f"levels:\n  nvlink: {links}\n")
    done = here("plan", "gpt2", pod, "aws-p4d", "--device", "a100")
    assert done.stderr.startswith(
        "ddplab: world_sizes: expected at least one number of GPUs that all systems can have"
    )
    assert done.stderr.count("\n") == 1


def test_a_batch_given_for_a_trace_is_known(printed, trace, topology):
    """With --batch 4, samples were batches "whose size is not known" beside 4 samples per GPU."""
    recorded = Trace.load(trace)
    unknown = recorded.model_copy(update={"workload": recorded.workload.model_copy(update={"batch": None})})
    unknown.save(trace.with_name("unknown.json"))
    asked = ("plan", trace.with_name("unknown.json"), topology, "--gpus", 4)
    assert "whose size is not known" in " ".join(printed(*asked).split())
    shown = printed(*asked, "--batch", 4)
    assert ", 4 samples per GPU, on " in " ".join(shown.split())
    assert "not known" not in shown


def test_counting_a_model_is_said_where_there_is_no_terminal(here):
    """Torch is loaded for it, and nothing else is printed for seconds; names that are listed need no counting."""
    asked = ("dgx-h100", "--world-size", 8)
    said = "counting the operations and the memory of tests.models_for_cli:tiny\n"
    assert here("plan", "tests.models_for_cli:tiny", *asked).stderr == said
    assert here("plan", "resnet18", *asked).stderr == ""
    assert "counting" not in here("plan", "resnet5", *asked).stderr
