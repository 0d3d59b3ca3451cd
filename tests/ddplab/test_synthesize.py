"""The command `synthesize`, and what it says about the result."""

import pytest

from ddplab.cli.synthesize import judgement, read_step
from reference.trace import Trace

TINY = "tests.models_for_cli:tiny"


def test_a_trace_is_synthesised_and_rescaled(here, trace, tmp_path):
    out = tmp_path / "synthetic.json.gz"
    done = here("synthesize", "--model", TINY, "--device", "h100-fp32", "--step-ms", 7, "--out", out)
    assert done.returncode == 0, done.stderr
    assert Trace.load(out).ranks[0].iterations[0].duration_ns == 7_000_000
    done = here("synthesize", "--model", TINY, "--device", "h100-bf16", "--step-ms", "2,4,1", "--out", out)
    assert done.returncode == 0, done.stderr
    (iteration,) = Trace.load(out).ranks[0].iterations
    assert (iteration.forward_end_ns, iteration.backward_end_ns, iteration.end_ns) == (
        2 * 10**6,
        6 * 10**6,
        7 * 10**6,
    )
    done = here(
        *("synthesize", "--rescale", trace, "--model", TINY, "--from", "v100-fp32", "--device", "h100-fp32"),
        *("--out", tmp_path / "r.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "H100" in Trace.load(tmp_path / "r.json").workload.device_name


@pytest.mark.parametrize("text", ["", "2,4", "1,2,3,4", "-1", "fast", "1e3", "99999999999999"])
def test_a_step_has_one_time_or_three(text):
    with pytest.raises(ValueError, match="--step-ms: expected milliseconds, such as 90, or of forward pass"):
        read_step(text)
    assert read_step("2.5, 4,0") == {"forward_ns": 2_500_000, "backward_ns": 4_000_000, "optimizer_ns": 0}


@pytest.mark.parametrize(
    ("step_ms", "says"),
    [(None, "measure an iteration"), (5.0, "needs CUDA graphs"), (20.0, "the step takes 20 ms")],
)
def test_a_host_that_limits_the_iteration_is_named(step_ms, says):
    sentence = judgement(1_000_000, 12_000_000, step_ms)
    assert sentence.startswith("the host needs 12 ms to launch the kernels")
    assert says in sentence


@pytest.mark.parametrize(
    ("step_ms", "says"),
    [
        (None, "no --step-ms: the iteration takes 10 ms"),
        (20.0, "data sheet"),
        (9.0, "usual, so check"),
        (90.0, "check"),
    ],
)
def test_a_step_far_from_the_roofline_is_doubted(step_ms, says):
    sentence = judgement(10_000_000, 10_000_000, step_ms)
    assert says in sentence
    assert ("check" in sentence) == (step_ms in (9.0, 90.0))
