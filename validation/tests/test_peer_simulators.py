"""ASTRA-sim and Proteus: what they are given and how their answers are read; without their sources."""

import json

import pytest

from ddplab.simulator import Fabric, predict
from ddplab.simulator.fabric import Level, Topology
from validation.board import rows
from validation.peers import astra_sim, proteus
from validation.peers.buckets_and_links import Links, links_of
from validation.peers.proteus_step import Communicator

ROWS = {row.name: row for row in rows()}
RESNET = ROWS["i: DGX V100, ResNet-50, 25 MB, 16 GPUs"]


def test_astra_sims_ring_has_the_rate_of_its_slowest_link_and_the_mean_latency_of_its_hops():
    inside = Links(nodes=1, gpus=4, inside=100e9, between=None, inside_s=3e-6, between_s=0.0)
    assert astra_sim.ring_of(inside) == (4, 100e9, 3e-6)
    gpus, rate, latency_s = astra_sim.ring_of(inside._replace(nodes=2, between=25e9, between_s=15e-6))
    assert (gpus, rate) == (8, 25e9)
    assert latency_s * 8 == pytest.approx(6 * 3e-6 + 2 * 15e-6)


def test_astra_sim_gets_a_trace_for_each_gpu_and_its_files_name_them(monkeypatch):
    seen = {}

    def run(program, *options, cwd, limit_s):
        for option in options:
            name, file = option.removeprefix("--").split("=")
            seen[name] = cwd / file
        seen["traces"] = sorted(path.name for path in cwd.glob("trace.*.et"))
        seen["network"] = (cwd / "network.yml").read_text()
        seen["system"] = json.loads((cwd / "system.json").read_text())
        return "".join(f"[x] sys[{gpu}] finished, {5_000_000 + gpu} cycles, exposed\n" for gpu in range(2))

    monkeypatch.setattr(astra_sim, "program", lambda: "astra-sim")
    monkeypatch.setattr(astra_sim, "run", run)
    fabric = Fabric(
        topology=Topology(levels=(Level(name="ring", latency_ns=5, bytes_per_s=2**30),)), algorithm="ring"
    )
    prediction = predict(RESNET.load_trace(), fabric, world_size=2, assume=False)
    assert astra_sim.simulated_ms(prediction, astra_sim.Ring(2, 2**30, 5e-9)) == 5.000001
    assert seen["workload-configuration"].name == "trace"
    assert seen["traces"] == ["trace.0.et", "trace.1.et"]
    assert "npus_count: [ 2 ]\nbandwidth: [ 1.000000000 ]\nlatency: [ 5.000 ]" in seen["network"]
    assert seen["system"]["active-chunks-per-dimension"] == 1  # two would have twice the bandwidth


def test_a_gpu_that_does_not_finish_in_astra_sim_is_an_error():
    with pytest.raises(RuntimeError, match="the end of 2 GPUs in its log, got 1"):
        astra_sim.finished_ms("sys[0] finished, 7 cycles", 2)


def test_proteus_gets_operators_whose_step_on_one_gpu_is_the_known_one(monkeypatch):
    asked = []

    def simulated_ms(*, factor, nodes, gpus, **settings):
        asked.append(settings)
        return 0.5 + 60 * factor + 3 * (nodes * gpus - 1)  # fixed, by operators, by communication

    monkeypatch.setattr(proteus, "simulated_ms", simulated_ms)
    proteus._alone_ms.cache_clear()
    assert proteus.method(RESNET) == pytest.approx(RESNET.known_ms + 3 * 15)
    assert asked[-1]["blocks"] == (3, 4, 6, 3)
    assert asked[-1]["bucket_mb"] == 25
    assert asked[-1]["gb_per_s"] == pytest.approx(links_of(RESNET).between / 1e9)
    proteus._alone_ms.cache_clear()


def test_proteus_ring_has_the_rate_of_its_links_and_late_large_messages_between_nodes():
    links = {"gb_per_s": 10.0, "inside_us": 3.4, "between_us": 14.0}
    ring = type("Ring", (Communicator,), links)
    rate, latency_us = ring([], [], 4, 1, "").allreduce(2**20)
    assert rate == pytest.approx(10 * 4 / 6)
    assert latency_us == pytest.approx(8.4 + 6 * 3.4)
    assert ring([], [], 8, 2, "").allreduce(2**20)[1] == pytest.approx(1.9 * (8.4 + 12 * 3.4 + 2 * 14))
    assert ring([], [], 8, 2, "").allreduce(2**10)[1] == pytest.approx(8.4 + 12 * 3.4 + 2 * 14)


@pytest.mark.parametrize(
    ("tool", "name", "why"),
    [
        (astra_sim, "f: ", "no links"),
        (proteus, "i: DLPerf, V100, BERT", "another model"),
        (proteus, "b: torch 1.4, V100, ResNet-50", "another rule"),
    ],
)
def test_a_row_that_a_tool_cannot_take_has_a_reason(tool, name, why):
    with pytest.raises(ValueError, match=why):
        tool.method(next(row for row in ROWS.values() if row.name.startswith(name)))
