"""The command `show`, and names of the catalogue in other commands."""

import json
import re
from pathlib import Path

import pytest

from ddplab import models
from ddplab.cli.show import SETTINGS
from reference.trace import Trace
from simulator import Fabric
from simulator.catalogue import load_fabric, read_catalogue
from simulator.fabric import Linear, Processor
from simulator.fabric.processor_costs import HookCost

from ..topology_files import save_topology

ROOT = Path(__file__).parents[2]

LISTED = read_catalogue()


def test_the_catalogue_lists_nodes_devices_and_models(here, tmp_path):
    done = here("show", "--json", tmp_path / "j")
    assert done.returncode == 0, done.stderr
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert names >= {*LISTED.nodes, *LISTED.devices, *models.BUILT_IN}
    written = json.loads((tmp_path / "j").read_text())
    assert {part: set(written[part]) for part in ("nodes", "devices", "models")} == {
        "nodes": set(LISTED.nodes),
        "devices": set(LISTED.devices),
        "models": set(models.BUILT_IN),
    }
    rate = written["nodes"]["aws-p4d"]["links"]["network"]["rate"]
    assert rate["gbit_per_s"] == 400
    assert written["sources"][rate["source"]]["date"] == LISTED.sources[rate["source"]].date
    assert written["models"]["llama-3.1-8b"]["parameters"] == 8_030_261_248
    assert written["models"]["llama-3.1-8b"]["gradient_bytes"] == 2 * 8_030_261_248


def test_one_entry_is_shown_with_the_source_of_each_figure(here):
    shown = " ".join(here("show", "isambard-ai").stdout.split())
    for value, source in LISTED.figures("isambard-ai").values():
        assert value in shown
        assert source.title.split(",")[0].split(":")[0] in shown
    assert "3350 GB/s" in here("show", "h100").stdout
    assert "86,567,656" in here("show", "vit-b-16").stdout


def test_a_node_by_name_predicts_as_its_links_in_a_file(here, trace, tmp_path):
    save_topology(load_fabric("aws-p4d").topology, tmp_path / "links.yaml")
    results = []
    for fabric in ("aws-p4d", tmp_path / "links.yaml"):
        words = ("--world-size", 16, "--caps", "1,25", "--json", tmp_path / "j")
        done = here("predict", trace, "--fabric", fabric, *words)
        assert done.returncode == 0, done.stderr
        results.append(json.loads((tmp_path / "j").read_text())["rows"])
    assert results[0] == results[1]
    assert "AWS p4d.24xlarge" in here("show", "aws-p4d").stdout


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
    done = here("synthesize", "--model", "llama-3.2-1b", "--device", "v100", "--out", out)
    assert done.returncode == 1
    assert done.stderr.startswith("ddplab: device: expected a precision of v100 (v100-fp32, v100-fp16)")


def test_a_trace_is_described_and_a_fabric_as_latency_and_bandwidth(here, trace, logs, topology, tmp_path):
    done = here("show", trace, "--json", tmp_path / "j")
    assert done.returncode == 0, done.stderr
    assert "tests.models_for_cli:tiny" in done.stdout
    assert json.loads((tmp_path / "j").read_text())["ranks"] == "2"
    done = here("show", *logs, "--json", tmp_path / "j")
    assert done.returncode == 0, done.stderr
    assert "the fabric has no processor costs" in done.stdout
    shown = json.loads((tmp_path / "j").read_text())
    assert [(row["world_size"], row["origin"]) for row in shown["segments"]] == [(2, "measured"), (4, "measured")]
    assert shown["segments"][0]["alpha_ns"] == pytest.approx(8650, rel=1e-3)
    processor = Processor(
        launch_ns=1234, pack=Linear(fixed_ns=5), hooks=(HookCost(name="fp16", compress=Linear(fixed_ns=7e3)),)
    )
    Fabric.from_table([(2, 1000, 2000)]).model_copy(update={"processor": processor}).save(tmp_path / "slow.json")
    done = here("show", tmp_path / "slow.json", topology)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("described", "1,234", "5 + 0 per byte", "fp16"))
    assert "described" in here("show", topology).stdout


def test_every_setting_is_listed_with_its_meaning(here):
    listed = here("show", "settings").stdout
    for title, record in SETTINGS.items():
        assert title in listed
        for name, field in record.model_fields.items():
            assert name in listed
            assert re.fullmatch(r".{8,}; .+", field.description or ""), (
                f"{record.__name__}.{name}: WHAT, UNIT; SOURCE"
            )
