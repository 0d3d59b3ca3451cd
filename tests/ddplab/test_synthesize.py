"""The command `synthesize`, and what it says about the result."""

import re

import pytest

from ddplab.cli.synthesize import judgement, read_step
from ddplab.reference.trace import Trace

TINY = "tests.models_for_cli:tiny"


def test_a_trace_is_synthesised_and_rescaled(printed, trace, tmp_path):
    out, ms = tmp_path / "synthetic.json.gz", 10**6
    printed("synthesize", "--model", TINY, "--device", "h100-fp32", "--step-ms", 7, "--out", out)
    assert Trace.load(out).ranks[0].iterations[0].duration_ns == 7 * ms
    printed("synthesize", "--model", TINY, "--device", "h100-bf16", "--step-ms", "2,4,1", "--out", out)
    (iteration,) = Trace.load(out).ranks[0].iterations
    assert (iteration.forward_end_ns, iteration.backward_end_ns, iteration.end_ns) == (2 * ms, 6 * ms, 7 * ms)
    devices = ("--from", "v100-fp32", "--device", "h100-fp32")
    printed("synthesize", "--rescale", trace, *devices, "--out", tmp_path / "r.json")  # the trace names its model
    assert "H100" in Trace.load(tmp_path / "r.json").workload.device_name


@pytest.mark.parametrize("words", [(), ("--from", "h100"), ("--from", "a100-80gb-bf16")])
def test_a_trace_is_rescaled_from_the_device_that_it_names_alone(here, tmp_path, words):
    """The times of an A100 became a fifth of those of an H100, as if a slow processor had taken them."""
    of_a100, out = tmp_path / "a100.json.gz", tmp_path / "h100.json.gz"
    counted = ("--model", "resnet50-224", "--batch", "16")  # another batch than that of the model
    assert here("synthesize", *counted, "--device", "a100", "--out", of_a100).returncode == 0
    asked = ("synthesize", "--rescale", of_a100, "--device", "h100", "--out", out)
    assert here(*asked, "--from", "a100-40gb").returncode == 0
    refused = here(*asked, *words)
    assert "--from: expected the trace's device, NVIDIA A100 SXM 40GB, tf32" in refused.stderr


@pytest.mark.parametrize("text", ["", "2,4", "1,2,3,4", "-1", "fast", "1e3", "99999999999999"])
def test_a_step_has_one_time_or_three(text):
    with pytest.raises(ValueError, match="--step-ms: expected milliseconds, such as 90, or of forward pass"):
        read_step(text)
    assert read_step("2.5, 4,0") == {"forward_ns": 2_500_000, "backward_ns": 4_000_000, "optimizer_ns": 0}


@pytest.mark.parametrize(
    ("roofline_ms", "paced_ms", "step_ms", "says"),
    [
        (1, 12, None, "the host needs 12 ms to launch the kernels .* measure an iteration"),
        (1, 12, 5.0, "the host needs 12 ms to launch the kernels .* needs CUDA graphs"),
        (1, 12, 20.0, "the host needs 12 ms to launch the kernels .* the step takes 20 ms"),
        (10, 10, None, "no --step-ms: the iteration takes 10 ms"),
        (10, 10, 20.0, "data sheet$"),
        (10, 10, 9.0, "usual, so check"),
        (10, 10, 90.0, "usual, so check"),
    ],
)
def test_a_step_is_compared_with_the_roofline_and_the_host(roofline_ms, paced_ms, step_ms, says):
    assert re.search(says, judgement(roofline_ms * 10**6, paced_ms * 10**6, step_ms))


def test_a_doubtful_step_is_named_as_such_where_the_host_limits(here, tmp_path):
    words = ("synthesize", "--model", "resnet50", "--device", "h100", "--out", tmp_path / "t.json", "--step-ms")
    said = [" ".join(here(*words, ms).stdout.split()) for ms in (500, 25)]
    assert "times its usual time: check unit, batch and precision" in said[0]
    assert said[1].endswith("the step takes 25 ms")
