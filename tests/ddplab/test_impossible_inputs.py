"""What cannot be is refused in one line that has both numbers, and is never answered."""

import pytest
import torch

import ddplab

from ..nccl_log import nccl_log
from .small_trace import small_trace

VIT = ("plan", "vit-b-16", "aws-p4d", "--world-size", 8)
TRACE = ("plan", "{trace}", "aws-p4d", "--world-size", 8)
PREDICT = ("predict", "{trace}", "--fabric", "aws-p4d", "--world-size", 8, "--caps", 25)
SYNTHESIZE = ("synthesize", "--model", "vit-b-16", "--device", "a100-40gb-tf32", "--out", "{out}")
IMPOSSIBLE = [
    # faster than one GPU alone, which takes 212 ms
    *(((*command, "--measured", f"8:{ms}ms"), f"the 212 ms that one rank takes alone less noise, got {ms} ms on 8")
      for command in (TRACE, PREDICT) for ms in ("200", "0.212")),
    ((*TRACE, "--measured", "1:220ms,8:190ms"), "the 220 ms that one rank takes alone less noise, got 190 ms on 8"),
    ((*TRACE, "--measured", "1:100ms"), "the 212 ms that one rank takes alone less noise, got 100 ms on 1 rank;"),
    ((*VIT, "--step-ms", 212, "--measured", "8:120ms"), "212 ms that one rank takes alone less noise, got 120 ms"),
    (("predict", "{trace}", "--fabric", "aws-p4d", "--world-size", "8,16", "--measured", "8:20ms"), "got 20 ms on 8"),
    # of another order
    *(((*command, "--measured", f"8:{word}"), "at most 100 times the predicted") for command in (TRACE, PREDICT)
      for word in ("212s", "3000000ms")),
    # faster than the chip
    *(((*VIT, "--step-ms", word), "which the arithmetic takes at the peak rate of NVIDIA A100 SXM 40GB, tf32, got")
      for word in ("21.2", "0.0212s")),
    ((*VIT, "--step-ms", 60, "--batch", 128), "step: expected at least 86.9 ms"),
    (("plan", "bert-large", "{log}", "--device", "v100", "--step-ms", 1), "got 1 ms; check the unit"),
    ((*VIT, "--step-ms", 212_000), "100 times the time on NVIDIA A100 SXM 40GB, tf32, got 2.12e+05 ms"),
    *(((*SYNTHESIZE, "--step-ms", word), f"{part}: expected at least") for word, part in
      (("0.212", "step"), ("2,200,5", "forward"), ("60,2,5", "backward"))),
    # two inputs that cannot both be true
    (("plan", "{trace}", "dgx-h100", "--world-size", 8), "H100 SXM, as the system has, got NVIDIA A100"),
    (("plan", "{trace}", "{pod}", "--device", "v100", "--world-size", 8), "a trace of NVIDIA V100"),
    ((*VIT, "--step-ms", 212, "--step-ms", 90), "expected one time of aws-p4d, got 212 and 90 ms"),
    ((*PREDICT, "--set", "sync_every=2", "--set", "sync_every=4"), "one value of sync_every, got 'sync_every=2' and"),
    ((*PREDICT, "--measured", "8:230ms,8:240ms"), "one time for each number of ranks, got two for 8"),
    ((*TRACE, "--step-ms", 212), "expected a model, not a trace"),
    (("plan", "vit-b-16", "aws-p4d", "--device", "h100"), "expected a100-40gb, the GPU of aws-p4d, in any precision"),
    (("plan", "vit-b-16", "{pod}", "--device", "a100", "--network", "100gbit"), "expected nodes or devices"),
    (("predict", "{trace}", "--fabric", "16:{log}", "--world-size", 8), "a list of 16 ranks, as given, got one of 8"),
    (("predict", "{trace}", "--fabric", "{log}", "--fabric", "{log2}", "--world-size", 8), "8"),
    (("predict", "{trace}", "--fabric", "{log}", "--world-size", 16), "expected one of [8]"),
    (("predict", "{trace}", "--fabric", "{pod}", "--world-size", 12), "expected a multiple of 8 above 8 ranks"),
    ((*VIT, "--deadline", "3d"), "samples"),
    # values outside their range
    ((*PREDICT, "--straggler", "1:0"), "factor"),
    ((*PREDICT, "--straggler", "1:nan"), "factor"),
    *(((*VIT, "--efficiency", word), "--efficiency: expected a part") for word in ("0", "150%", "-5", "two")),
    *(((*VIT, "--step-ms", word), "--step-ms: expected milliseconds") for word in ("0", "-5", "nan", "1e400")),
    *(((*VIT, "--network", word), "--network") for word in ("0gbit", "-4gbit", "0x100gbit", "fast")),
    *(((*VIT, "--samples", 1e9, "--deadline", word), "deadline") for word in ("0h", "-3d", "tomorrow")),
    *((("predict", "{trace}", "--fabric", "aws-p4d", "--world-size", word), "--world-size: expected")
      for word in ("0", "-8", "8.5")),
    *(((*PREDICT[:-2], "--caps", word), "--caps: expected sizes in MB above 0") for word in ("0", "-25", "nan")),
    *(((*PREDICT, "--measured", word), "--measured: expected ranks and a time")
      for word in ("0:220ms", "8:0ms", "8:-1ms", "8:220")),
    *(((*VIT, "--batch", word), f"--batch: expected to be {limit}, got '{word}'") for word, limit in
      ((0, "greater than or equal to 1"), (2_000_000, "less than or equal to 1000000"))),
    (("tune", "{trace}", "--fabric", "{pod}", "--world-size", 0), "--world-size: expected to be greater than"),
    (("plan", "vit-b-16", "a1000", "--world-size", 8), "did you mean"),
    (("plan", "vit-b-16", "8x100g", "--world-size", 8), "aws-p4d --network 8x100gbit"),
    (("plan", "vit-b-16", "nvlink", "--world-size", 8), "aws-p4d --network 100gbit"),
    (("plan", "vit-b-16", "p4dx.24xlarge", "--world-size", 8), "did you mean aws-p4d"),
    (("plan", "vit-b-61", "aws-p4d", "--world-size", 8), "vit-b-16"),
    (("plan", "vit-b-16", "aws-p4d", "dgx-h100", "--step-ms", 212), "did you mean aws-p4d:212 --step-ms dgx-h100"),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from ddplab.cli.main import app

    folder = tmp_path_factory.mktemp("impossible")
    names = {"trace": "t.json.gz", "pod": "pod.yaml", "log": "8.log", "log2": "again.log", "out": "out.json.gz"}
    paths = {name: str(folder / file) for name, file in names.items()}
    app([*map(str, SYNTHESIZE[:-1]), paths["trace"], "--step-ms", "212"], standalone_mode=False)
    (folder / "pod.yaml").write_text(
        "levels:\n  nvlink: {members: 8, latency_us: 3, gb_per_s: 200}\n"
        "  nic: {of: nvlink, latency_us: 10, gbit_per_s: 400}\n"
    )
    for name in ("8.log", "again.log"):
        (folder / name).write_text(nccl_log(8, {2**20: 28.0, 2**27: 1041.0}))
    return paths


@pytest.mark.parametrize(("words", "expected"), IMPOSSIBLE)
def test_what_cannot_be_is_refused(here, files, words, expected):
    done = here(*(str(word).format(**files) for word in words))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddplab: ")]
    assert expected in line
    assert len(done.stderr.splitlines()) <= 2, "progress, and one line"
    assert "pydantic" not in line
    assert "Input should" not in line


LINEAR = torch.nn.Linear(2, 2)
FABRIC = ddplab.Fabric.from_alpha_beta(100, 1e9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda _: ddplab.plan("resnet50", "aws-p4d"), "trace: expected a Trace, or several by name, got 'resnet50'"),
        (lambda _: ddplab.predict("resnet50"), "trace: input should be an instance of Trace, got 'resnet50'"),
        (lambda _: ddplab.tune(3), "trace: input should be an instance of Trace, got 3"),
        (lambda _: ddplab.sweep(3), "trace: expected a Trace, or several by name, got 3"),
        (lambda trace: ddplab.plan(trace, "aws-p4d"), "fabric: expected a Fabric, or several by name, got 'aws-p4d'"),
        (lambda trace: ddplab.explain(trace, 3), "fabric: input should be an instance of Fabric, got 3"),
        (lambda trace: ddplab.explain(trace, FABRIC, world_size=0), "world_size: input should be greater than"),
        (lambda trace: ddplab.emulate(trace, FABRIC, world_size=2, reducer=3), "reducer: expected ddplab, .*, got 3"),
        (lambda _: ddplab.record(3), "record: expected module of type Module, got 3"),
        (lambda _: ddplab.record(LINEAR, batch="x"), "record: expected batch of type int, got 'x'"),
        (lambda _: ddplab.run_ranks(2, print), "world_size: expected at least 1, got <built-in function print>"),
        (lambda _: ddplab.run_ranks(2, 2), r"body: expected a function body\(rank, world_size, \*args\), got 2"),
        (lambda _: ddplab.RankPool("2"), "world_size: expected at least 1, got '2'"),
        (lambda _: ddplab.compress(3), "compress: expected a dtype, such as torch.float16, got 3"),
        (lambda _: ddplab.import_profile("a.json"), "paths: expected a list of files, got 'a.json'"),
        (
            lambda _: ddplab.assign_buckets([1], [float("nan")]),
            "caps_bytes: expected at least one size, none negative",
        ),
        (lambda _: ddplab.Topology(levels=3), r"levels: input should be a list, \[...\], got 3"),
        (lambda _: ddplab.Policy(plan="plan.json"), "plan: expected a list of buckets, .*, got 'plan.json'"),
    ],
)
def test_a_public_name_refuses_a_wrong_argument_in_one_line(call, says):
    """Among others, `plan` printed pydantic's own names, and `explain`, `record` and `run_ranks` errors of Python."""
    with pytest.raises(ValueError, match=f"^{says}") as caught:
        call(small_trace())
    assert "\n" not in str(caught.value)
