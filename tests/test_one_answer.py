"""One question, one answer: eight tasks, five questions each; every door that answers one gives the same answer."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab import simulator
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, Policy
from ddplab.simulator.capacity.judgement import HELD, ranking

from .ddplab.command_process import unwrapped
from .explore import examples
from .strategies import iteration, trace_of

ROOT = Path(__file__).parents[1]
MS, MB = 10**6, 10**6
POD = (
    "levels:\n  nvlink: {{members: 4, latency_us: {latency}, gb_per_s: 100}}\n"
    "  nic: {{of: nvlink, latency_us: {latency}, gbit_per_s: {gbit}}}\n"
)
TASKS = {
    "one node": (4, 100, 3, None),
    "a fast network": (8, 400, 5, None),
    "a slow network": (16, 40, 5, None),
    "a very slow network": (64, 1, 5, None),
    "long latencies": (32, 200, 2000, None),
    "two GPUs": (2, 100, 3, None),
    "measured as predicted": (16, 100, 5, {4: 104 * MS}),
    "measured far from the model": (8, 40, 5, {8: 300 * MS}),
}
"""GPUs, Gbit/s of a node, latency in microseconds, and measured iterations."""


def trace() -> Trace:
    ready = tuple(range(90 * MS, 30 * MS, -10 * MS))
    made = trace_of([[iteration(30 * MS, ready, 92 * MS, 8 * MS)] * 3], [16 * MB] * len(ready))
    workload = made.workload.model_copy(update={"device": "cuda", "device_name": "NVIDIA A100-SXM4-40GB", "batch": 8})
    return made.model_copy(update={"workload": workload})


@pytest.mark.parametrize("task", TASKS)
def test_every_pair_of_answers_agrees(here, tmp_path, task):
    ranks, gbit, latency, measured = TASKS[task]
    pod, path, out = tmp_path / "pod.yaml", tmp_path / "t.json", tmp_path / "answers.json"
    pod.write_text(POD.format(gbit=gbit, latency=latency))
    trace().save(path)
    recorded, fabric = Trace.load(path), Fabric.load(pod)
    words = [f"--measured={','.join(f'{n}:{ns}ns' for n, ns in measured.items())}"] if measured else []
    printed = {}

    def asked(*command: object) -> dict[str, object]:
        done = here(*command, "--world-size", ranks, *words, "--json", out)
        assert done.returncode == 0, done.stderr
        first = printed[command[0]] = unwrapped(done.stdout).splitlines()
        assert any("contradict the model" in line for line in first) == (task == "measured far from the model")
        return json.loads(out.read_text())

    predicted = asked("predict", path, "--fabric", pod, "--caps", "default")
    planned = asked("plan", path, pod)
    (size,) = [row for row in planned["sizes"] if row["world_size"] == ranks]
    (about,) = planned["systems"]
    assert about["at"] == ranks
    efficiency = re.search(r"train alone \((.* %)\)", printed["predict"][-1])[1]
    assert any(re.search(rf" {efficiency} ", line) for line in printed["plan"])
    assert ("is open" in printed["predict"][-1]) == (size["efficiency_low"] < 0.9 <= size["efficiency_high"])
    one = simulator.predict(recorded, fabric, world_size=ranks, measured=measured)
    (row,) = simulator.sweep(recorded, fabric, world_sizes=[ranks], measured=measured).to_dict("records")
    plan = simulator.plan(recorded, fabric, world_sizes=[ranks], measured=measured).systems[0]
    verdict = predicted["verdict"]
    answers = {
        "iteration": [one.iteration_ns, row["iteration_ns"], size["iteration_ns"],
                      predicted["rows"][0]["iteration_ns"], plan.offers[0].size.prediction.iteration_ns],
        "interval": [list(one.interval_ns), [row["low_ns"], row["high_ns"]], predicted["rows"][0]["interval_ns"],
                     [size["iteration_ns_low"], size["iteration_ns_high"]]],
        "efficiency": [size["efficiency"], verdict["efficiency"], plan.offers[0].size.prediction.efficiency],
        "its interval": [list(one.efficiency_interval), [row["efficiency_low"], row["efficiency_high"]],
                         predicted["rows"][0]["efficiency_interval"],
                         [size["efficiency_low"], size["efficiency_high"]]],
        "limit": [about["limit"], verdict["limit"], plan.limits.limit],
        "needed rate": [about["needed_rate_multiple"], verdict["needed_multiple_of_rates"],
                        plan.limits.needed_rate().multiple],
    }  # fmt: skip
    assert {question: len(set(map(str, given))) for question, given in answers.items()} == dict.fromkeys(answers, 1)
    if not measured or ranks not in measured:
        assert one.efficiency == pytest.approx(size["efficiency"])
    if task != "measured far from the model":
        assert answers["limit"][0] != "unexplained"
    else:
        assert one.compute_ns == simulator.predict(recorded, fabric, world_size=ranks).compute_ns == 100 * MS


@pytest.mark.parametrize("task", list(TASKS)[:4])
def test_what_is_fastest_and_what_ties_with_it_is_one_rule(here, tmp_path, task):
    ranks, gbit, latency, _ = TASKS[task]
    (tmp_path / "pod.yaml").write_text(POD.format(gbit=gbit, latency=latency))
    recorded, fabric = trace(), Fabric.load(tmp_path / "pod.yaml")
    caps = [1, 25, 100]
    predictions = [simulator.predict(recorded, fabric, world_size=ranks, bucket_cap_mb=cap) for cap in caps]
    best, ties = ranking(predictions)
    table = simulator.sweep(recorded, fabric, world_sizes=[ranks], bucket_caps_mb=caps)
    assert table["iteration_ns"].argmin() == best
    assert set(table.index[table["is_tie"]]) == {best, *ties}
    tuned = simulator.tune(recorded, fabric, world_size=ranks)
    default = simulator.predict(recorded, fabric, world_size=ranks, bucket_cap_mb=None)
    with_plan = simulator.predict(recorded, fabric, world_size=ranks, policy=Policy(plan=tuned.buckets))
    fastest, ties = ranking([default, with_plan])
    assert tuned.keep_default == (0 in (fastest, *ties))
    assert (tuned.default_ns, tuned.iteration_ns) == (default.iteration_ns, with_plan.iteration_ns)
    (change,) = [
        one
        for one in simulator.plan(recorded, fabric, world_sizes=[ranks]).systems[0].changes
        if one.name == "best buckets"
    ]
    usual = simulator.predict(recorded, fabric, world_size=ranks)
    assert change.iteration_ns == min(usual.iteration_ns, with_plan.iteration_ns)
    assert change.is_tie == (len(ranking([usual, min(usual, with_plan, key=lambda one: one.iteration_ns)])[1]) == 1)


def test_the_coverage_that_answers_name_is_the_measured_one():
    laboratory, text = ((ROOT / page).read_text() for page in ("validation/README.md", "docs/accuracy.md"))
    rows = [line.split("|") for line in laboratory.splitlines() if line.startswith(("| inside one", "| beyond one"))]
    held = {cells[1].strip(): cells[5].strip() for cells in rows}
    assert HELD["a step, one node"] == held["inside one node"]
    assert HELD["a step, new clusters"] == held["beyond one node, systems added later"]
    table = text.partition("| what was given |")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| ([^|]+) \| (\d+ of \d+) \|", table, re.MULTILINE)) == HELD


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("--world-size", "8"), {"names alone"}),
        (
            ("--world-size", "8,16", "--step-ms", "130"),
            {"a step, one node", "a step, new clusters"},
        ),
        (("--world-size", "16", "--step-ms", "130"), {"a step, new clusters"}),
        (("--world-size", "32", "--step-ms", "130", "--measured", "8:140ms"), {"fewer GPUs"}),
    ],
)
def test_the_coverage_is_that_of_what_was_given(here, words, given):
    (line,) = [
        line for line in here("plan", "resnet50", "aws-p4d", *words).stdout.splitlines() if "90 % ranges" in line
    ]
    for kind, count in HELD.items():
        assert (f"{kind} {count}" in line) == (kind in given)


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("vit-b-16", "aws-p4d", "--step-ms", 212, "--batch", 128), 24),
        (("Llama-3.1-8B", "dgx-h100", "--world-size", 8), 24),
        (("bert-large", "a100", "h100", "dgx-b200", "--world-size", 16), 30),
    ],
)
def test_one_screen(here, words, most):
    done = here("plan", *words)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines) <= most, max(map(len, lines)) <= 80) == (0, True, True)
    assert len(here("plan", *words, "--details").stdout) > len(done.stdout)


@pytest.mark.parametrize("words", [(), ("--step-ms", 130)])
def test_a_model_and_the_trace_made_of_it_have_one_plan(here, tmp_path, words):
    """On 32 GPUs, a quarter of the batch waits for the host, whose pace no trace has."""
    path, out = tmp_path / "gpt2.json.gz", tmp_path / "plan.json"
    assert here("synthesize", "--model", "gpt2", "--device", "h100", "--out", path, *words).returncode == 0
    sizes = []
    for asked in (("gpt2", *words), (path,)):
        assert here("plan", *asked, "dgx-h100", "--world-size", "8,32", "--json", out).returncode == 0
        sizes.append(json.loads(out.read_text())["sizes"])
    assert sizes[0] == sizes[1]
    assert all(size["strong_samples_per_s"] for size in sizes[0])


DEVICES = {"aws-p4d": "a100-40gb", "dgx-h100": "h100", "azure-ndm-a100": "a100-80gb"}
MODELS = {"resnet50-224": (64, 4096), "bert-large": (8, 128), "gpt2": (8, 64), "llama-3.2-1b": (1, 8)}
"""Batches that fit and that do not, or are near the limit."""


@pytest.mark.timeout(300)  # 25 s alone; several times as long beside other jobs
@examples(4)
@given(
    model=st.sampled_from(list(MODELS)),
    large=st.booleans(),
    systems=st.lists(st.sampled_from(["aws-p4d", "dgx-h100", "azure-ndm-a100"]), min_size=1, max_size=2, unique=True),
    optimizer=st.sampled_from([None, "sgd", "adam"]),
    given=st.sampled_from(["a name", "a step", "a doubtful step", "a trace"]),
    target=st.sampled_from(
        [
            *((), ("--efficiency", "60%"), ("--efficiency", "95%"), ("--efficiency", "100%")),
            *(("--samples", "1e8", "--deadline", "2d"), ("--samples", "1", "--deadline", "1s", "--price", "2")),
        ]
    ),
)
def test_no_line_of_a_plan_denies_its_verdict(here, tmp_path, model, large, systems, optimizer, given, target):
    """The first line against the rows, the memory lines and the advice of the same output."""
    out, path, batch = tmp_path / "plan.json", tmp_path / "trace.json.gz", ["--batch", MODELS[model][large]]
    is_priced = "--price" in target
    if given != "a name" or is_priced:
        systems = systems[:1]
    made = here("synthesize", "--model", model, "--device", DEVICES[systems[0]], *batch, "--out", path)
    assert made.returncode == 0, made.stderr
    step_ms = Trace.load(path).ranks[0].iterations[0].duration_ns / 1e6
    steps = {"a step": [f"--step-ms={1.1 * step_ms:.3f}"], "a doubtful step": [f"--step-ms={5 * step_ms:.3f}"]}
    what = [path] if given == "a trace" else [model, *batch]
    words = ["plan", *what, *systems, "--world-size", "8,16", "--details", *steps.get(given, []), *target]
    words += [] if optimizer is None else ["--optimizer", optimizer]
    done = here(*words, "--json", out)
    document = json.loads(out.read_text())
    rows, verdict, text = document["sizes"], document["verdict"], done.stdout + done.stderr
    answers = [[answer for name, answer in row.items() if name.startswith("answer_")] for row in rows]
    sure = [row for row, given in zip(rows, answers, strict=True) if set(given) <= {"yes", None}]
    never = [row for row, given in zip(rows, answers, strict=True) if "no" in given]
    for about in document["systems"]:
        assert about["memory"].keys() == about["fits"].keys() == ({optimizer} if optimizer else about["fits"].keys())
        fits = {about["fits"][name] for name in about["fits"]}
        expected = (
            {"fits": "yes", "does not fit": "no"}[min(fits)] if len(fits) == 1 and "unknown" not in fits else "open"
        )
        assert {row["answer_memory"] for row in rows if row["system"] == about["system"]} == {expected}
    if target:
        assert document["answer"] == ("yes" if sure else "no" if len(never) == len(rows) else "open")
    else:
        assert document["answer"] == ("no" if len(never) == len(rows) else "")
        assert ("whether it fits is open" in verdict) == (not sure and len(never) < len(rows))
    assert done.returncode == (document["answer"] in ("no", "open"))
    assert " ".join(verdict.split()) in " ".join(text.split())
    if document["answer"] == "yes":
        chosen = document["cheapest"]
        assert {"system": chosen["system"], "world_size": chosen["world_size"]} in [
            {"system": row["system"], "world_size": row["world_size"]} for row in sure
        ]
        (line,) = [
            part
            for part in re.findall(r"(?:^|\n)(?:(\S+): )?memory: ((?:.|\n  )*)", text)
            if part[0] in ("", chosen["system"])
        ]
        assert "does not fit" not in " ".join(line[1].split())
        assert "unknown" not in line[1]
    for needed in re.findall(r"needs ([\d.]+ to [\d.]+ of [\d.]+ GB) with", " ".join(verdict.split())):
        assert not done.stdout or f"({needed}" in " ".join(done.stdout.split())
    for words in re.findall(r"an efficiency of (\S+ %) for a target", " ".join(verdict.split())):
        assert not done.stdout or re.search(rf" {words} ", done.stdout), "the table has the same range"
    assert all(3600e9 * (row["hours"] or 1) >= row["iteration_ns"] * (1 - 1e-9) for row in rows), (
        "of one iteration at least"
    )
    uses = [use for one in document["systems"] for use in one["memory"].values()]
    for batch in re.findall(r"([\d,]+) samples? certainly do", " ".join(done.stdout.split())):
        assert int(batch.replace(",", "")) in [use["largest_batch"] for use in uses], "of the optimiser that it names"
    for batch in re.findall(r"a batch of ([\d,]+) per GPU", " ".join(done.stdout.split())):
        largest = [use["largest_batch"] for use in uses if use["largest_batch"] is not None]
        assert not largest or int(batch.replace(",", "")) <= max(largest)
    said = " ".join(text.split())
    assert ("a step on one GPU (--step-ms)" in said) <= (given == "a name"), "it can be given, and was not"
    assert ("a doubtful step not tested" in said) <= (given == "a doubtful step")
    assert (", by names alone" in said) <= (given in ("a name", "a trace"))
    assert not re.search(r"\D0\.0000|\D0\.00 (?!%)", said), "no figure without a digit"
