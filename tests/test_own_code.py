"""Code that learners write in tutorials: how ranks import it, and that tutorial 2 builds a correct class."""

from pathlib import Path

import pytest

from ddplab.conformance.overlap import MODELS
from ddplab.emulation.scale_model import ScaleModel
from reference.launch import RankPool
from simulator import Fabric
from tutorials import breaking, emulated, own_code

BUILD = "02_build_your_own_ddp.ipynb"
CHECKS = ("any timing", "one weight", "construction", "bucket caps")
OURS = "reference.data_parallel:DistributedDataParallel"
TORCHS = "torch.nn.parallel:DistributedDataParallel"
FOLDER = own_code.FOLDER


def use(_rank: int, _world_size: int, folder: Path) -> None:
    """Let a rank import from another folder, so that tests leave the learner's modules alone."""
    own_code.FOLDER = folder


@pytest.fixture
def folder(monkeypatch, two_ranks, four_ranks, tmp_path):
    monkeypatch.setattr(own_code, "FOLDER", tmp_path)
    for pool in (two_ranks, four_ranks):
        pool.run(use, tmp_path)
    yield tmp_path
    own_code.forget()
    for pool in (two_ranks, four_ranks):
        pool.run(own_code.forget)
        pool.run(use, FOLDER)


def test_a_module_of_the_learner_is_never_overwritten(folder):
    (folder / "naive.py").write_text("mine = 1\n")
    written = own_code.write_missing(BUILD)
    assert written == ["flat", "asynchronous", "bucketed", "my_ddp"]
    assert (folder / "naive.py").read_text() == "mine = 1\n"
    assert own_code.write_missing(BUILD) == []


def test_ranks_run_the_file_as_it_is_now(folder, two_ranks):
    for number in range(3):
        (folder / "step.py").write_text(f"def work(rank, world_size, factor):\n    return factor * rank + {number}\n")
        assert two_ranks.run(own_code.run, "step:work", 10) == [number, 10 + number]


@pytest.mark.parametrize("name", ["naive:Naive", "flat:Flat", "bucketed:FinishedByScript", "my_ddp:MyDDP"])
def test_a_class_of_tutorial_2_is_local_training(folder, four_ranks, name):
    own_code.write_missing(BUILD)
    checks = CHECKS if name.startswith("my") else ("one weight", "construction")  # the tutorial runs all of them
    results = own_code.check(four_ranks, name, checks)
    assert [(one.check, one.message) for one in results if one.outcome == "failed"] == []
    assert len(results) == len(checks)


def test_the_asynchronous_class_of_tutorial_2_depends_on_the_ready_order(folder, four_ranks):
    own_code.write_missing(BUILD)
    last = own_code.check(four_ranks, "asynchronous:Asynchronous", CHECKS)[-1]
    assert (last.check, last.outcome) == ("any timing", "failed")


def test_an_emulated_iteration_lasts_at_least_as_long_as_its_parts(folder):
    """Sleeps and collectives may take longer than they should on a busy machine, but never less long."""
    own_code.write_missing(BUILD)
    trace = ScaleModel(byte_scale=1 / 64).trace(MODELS[0], iterations=1)
    one = trace.ranks[0].iterations[0]
    sizes = sum(trace.sizes_bytes)
    slow = Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=sizes / 50e-3)
    candidates = [emulated.Candidate(name) for name in (OURS, TORCHS, "my_ddp:MyDDP", "flat:Flat")]
    with RankPool(2, timeout_s=60) as pool:  # of its own, because it changes the scheduling of network threads
        pool.run(use, folder)
        times = pool.run(emulated.iteration_ms, trace, slow, candidates, 2, 3)
    assert times[0] == times[1]  # the slowest rank's
    computation_ms = (one.end_ns - one.forward_start_ns) / 1e6
    exposed_ms = slow.all_reduce_ns(sizes, 2) / 1e6 - (one.backward_end_ns - one.backward_start_ns) / 1e6
    assert [len(iterations) for iterations in times[0]] == [3] * 4
    assert min(ms for iterations in times[0] for ms in iterations) >= computation_ms + exposed_ms - 1
    assert min(times[0][-1]) >= computation_ms + slow.all_reduce_ns(sizes, 2) / 1e6 - 1  # flat hides nothing


def test_a_simple_test_and_a_loss_curve_accept_what_the_checks_refuse(folder, two_ranks, four_ranks):
    modules = own_code.modules_of(BUILD)
    own_code.write_missing(BUILD)
    faulty = modules["bucketed"].replace("flat /= dist.get_world_size()", "flat /= 2")
    (folder / "halved_buckets.py").write_text(faulty)
    (folder / "halves.py").write_text(modules["my_ddp"].replace("from bucketed", "from halved_buckets"))
    right, wrong = (two_ranks.run(breaking.train, name, 3) for name in ("my_ddp:MyDDP", "halves:MyDDP"))
    assert right == wrong
    assert two_ranks.run(breaking.passes_simple_test, "halves:MyDDP") == [True, True]
    last = own_code.check(four_ranks, "halves:MyDDP", CHECKS)[-1]
    assert last.outcome == "failed"
    assert "2 of the expected" in last.message
