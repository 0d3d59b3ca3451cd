"""The command `show`, and names of the catalogue in other commands."""

import re
from pathlib import Path

import pytest

from ddplab import models
from ddplab.cli.show import SETTINGS, _field_rows
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric
from ddplab.simulator.catalogue import read_catalogue
from ddplab.simulator.fabric import Linear, Processor
from ddplab.simulator.fabric.processor_costs import HookCost
from validation.larger_models import COUNTED

ROOT = Path(__file__).parents[2]

LISTED = read_catalogue()


def test_the_catalogue_lists_nodes_devices_and_models(answered):
    shown, written = answered("show")
    names = {line.split()[0] for line in shown.splitlines() if line.strip()}
    usable = {name for name, one in LISTED.devices.items() if one.peaks}
    assert names >= {*LISTED.nodes, *usable, *models.BUILT_IN, *COUNTED}
    assert names.isdisjoint({*LISTED.devices} - usable), "whose memory alone is known"
    assert {part: set(written[part]) for part in ("nodes", "devices", "models")} == {
        "nodes": set(LISTED.nodes),
        "devices": set(LISTED.devices),
        "models": {*models.BUILT_IN, *COUNTED},
    }
    rate = written["nodes"]["aws-p4d"]["links"]["network"]["rate"]
    assert rate["gbit_per_s"] == 400
    assert written["sources"][rate["source"]]["date"] == LISTED.sources[rate["source"]].date
    assert written["models"]["llama-3.1-8b"]["parameters"] == 8_030_261_248
    assert written["models"]["llama-3.1-8b"]["gradient_bytes"] == 2 * 8_030_261_248


def test_one_entry_is_shown_with_the_source_of_each_figure(printed):
    shown = " ".join(printed("show", "isambard-ai").split())
    figures = LISTED.figures("isambard-ai")
    assert len(figures) > 5
    for value, source in figures.values():
        assert value in shown
        assert source.title.split(",")[0].split(":")[0] in shown
    for name in ("h100", "H100", "h100-bf16", "NVIDIA H100-FP16"):
        assert "3350 GB/s" in printed("show", name)
    assert "BM.GPU" not in printed("show", "mi300x")  # one node has this word in its name
    assert "86,567,656" in printed("show", "vit-b-16")


def test_a_device_without_precision_says_which_one_it_takes(here, trace, tmp_path):
    out = tmp_path / "t.json"
    done = here("synthesize", "--model", "vit-b-16", "--device", "h100", "--step-ms", 100, "--out", out)
    assert "h100 computes in tf32, because the model's parameters are float32" in done.stdout, done.stderr
    assert "h100-fp32 or h100-fp16 or h100-bf16" in done.stdout
    assert Trace.load(out).workload.device_name.startswith("NVIDIA H100 SXM, tf32")
    done = here("synthesize", "--model", "llama-3.2-1b", "--device", "h100", "--out", out)
    assert "h100 computes in bf16, because the model's parameters are bfloat16" in done.stdout, done.stderr
    assert Trace.load(out).workload.device_name.startswith("NVIDIA H100 SXM, bf16")
    done = here(
        *("synthesize", "--rescale", trace, "--model", "tests.models_for_cli:tiny"),
        *("--from", "v100", "--device", "h100", "--out", out),
    )
    assert "v100 computes in fp32" in done.stdout, done.stderr
    assert "h100 computes in tf32" in done.stdout


def test_a_trace_is_described_and_a_fabric_as_its_segments(printed, answered, trace, logs, topology, tmp_path):
    shown, document = answered("show", trace)
    assert "tests.models_for_cli:tiny" in shown
    assert document["ranks"] == "2"
    shown, document = answered("show", *logs)
    assert "the fabric has no processor costs" in shown
    assert [(row["world_size"], row["origin"]) for row in document["segments"]] == [(2, "measured"), (4, "measured")]
    assert document["segments"][0]["alpha_ns"] == pytest.approx(8650, rel=1e-3)
    processor = Processor(
        launch_ns=1234, pack=Linear(fixed_ns=5), hooks=(HookCost(name="fp16", compress=Linear(fixed_ns=7e3)),)
    )
    Fabric.from_table([(2, 1000, 2000)]).model_copy(update={"processor": processor}).save(tmp_path / "slow.json")
    shown = printed("show", tmp_path / "slow.json", topology)
    assert all(word in shown for word in ("described", "1,234", "5 + 0 per byte", "fp16"))
    assert "described" in printed("show", topology)


def test_every_setting_is_listed_with_its_meaning(printed):
    listed = printed("show", "settings")
    for title, record in SETTINGS.items():
        assert title in listed
        for row in _field_rows(record):
            assert row["name"] in listed
            assert re.fullmatch(r".{8,}; .+", row["meaning"]), f"{row['name']}: expected WHAT, UNIT; SOURCE"


def test_a_table_of_one_size_shows_no_latency(printed, tmp_path):
    """A table of one size does not show the latency; `show` printed 0.0 us."""
    Fabric.from_table([(8, 2**20, 60_000)]).save(tmp_path / "one.json")
    assert printed("show", tmp_path / "one.json").splitlines()[3].split()[3:] == ["1,048,576", "-", "17.5", "30.6"]


def test_a_name_that_is_no_fabric_is_shown_alone(here, trace):
    """Beside a fabric, a trace got advice on the options of other commands."""
    for names in (("resnet50", "resnet50"), ("dgx-h100", "settings"), ("dgx-h100", str(trace))):
        said = here("show", *names).stderr
        assert f"expected one name or several fabrics, got {names[1]!r} beside others; show it alone" in said
