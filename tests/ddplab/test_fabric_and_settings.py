"""The commands `fabric` and `knobs`."""

import inspect
import json
import re
from pathlib import Path

import pytest

from ddplab.cli.fabric_and_settings import KNOBS
from simulator import Fabric, Policy, predict
from simulator.fabric import LevelEntry, Linear, Processor, TopologyFile
from simulator.fabric.processor_costs import HookCost

ROOT = Path(__file__).parents[2]


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


def test_concurrency_follows_the_library_that_is_set(here, topology, tmp_path):
    def concurrency(*settings: str) -> int:
        words = [word for setting in settings for word in ("--fabric-set", setting)]
        assert here("fabric", topology, *words, "--json", tmp_path / "j").returncode == 0
        return json.loads((tmp_path / "j").read_text())["concurrency"]

    assert [concurrency(), concurrency("library=gloo"), concurrency("library=gloo", "concurrency=3")] == [1, 2, 3]


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
