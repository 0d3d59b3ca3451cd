"""Code that learners write in tutorials: how ranks import it, and which checks find its faults."""

import json
from pathlib import Path

import pytest

from ddplab.conformance.check_runner import bench_on, run_check
from ddplab.conformance.overlap import MODELS
from ddplab.emulation.time_dilation import ScaleModel
from reference.launch import RankPool
from simulator import Fabric
from tutorials import breaking, building, emulated, own_code
from tutorials.answers import build_your_own_ddp as answers
from tutorials.exercises import TO_WRITE

BUILD = Path(own_code.__file__).parent / "02_build_your_own_ddp.ipynb"
CHECKS = ("any timing", "one weight", "construction", "bucket caps")
OURS = "reference.data_parallel:DistributedDataParallel"
TORCHS = "torch.nn.parallel:DistributedDataParallel"
FLAT, OVERLAPPED = "reference.minimal:FlatDataParallel", "reference.minimal:OverlappedDataParallel"
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


def written_by(notebook):
    """The sources of the modules that a notebook writes, by name."""
    cells = ["".join(cell["source"]).partition("\n") for cell in json.loads(notebook.read_text())["cells"]]
    written = {magic: source for magic, _, source in cells if magic.startswith(own_code.WRITES)}
    return {magic.removeprefix(own_code.WRITES).removesuffix(".py"): source for magic, source in written.items()}


def test_ranks_run_the_file_as_it_is_now(folder, two_ranks):
    for number in range(3):
        (folder / "step.py").write_text(f"def work(rank, world_size, factor):\n    return factor * rank + {number}\n")
        assert two_ranks.run(own_code.run, "step:work", 10) == [number, 10 + number]


def test_an_answer_is_open_while_the_module_has_a_gap(folder):
    source = "def work():\n    return {}\n"
    (folder / "filled.py").write_text(source.format(TO_WRITE))
    assert own_code.answer("filled:work") is ...
    (folder / "filled.py").write_text(source.format("1 + 1"))
    assert own_code.answer("filled:work") == "filled:work"
    assert own_code.answer("missing:work") == "missing:work"


def test_the_bucket_rule_of_the_solution_is_torchs():
    answers.bucket_rule().verify()


def test_an_iteration_in_virtual_time_is_computation_and_communication_to_the_nanosecond(folder):
    sizes_bytes = building.v100().sizes_bytes
    flat_ms = building.computation_ms() + building.all_reduces_ms(sum(sizes_bytes))
    assert building.iteration_ms(FLAT) == pytest.approx(flat_ms, abs=1e-6)
    naive_ms = building.computation_ms() + building.all_reduces_ms(*sizes_bytes)
    assert building.iteration_ms("reference.minimal:NaiveDataParallel") == pytest.approx(naive_ms, abs=1e-6)


def test_the_asynchronous_class_of_tutorial_2_depends_on_the_ready_order(folder, four_ranks):
    (folder / "asynchronous.py").write_text(written_by(BUILD)["asynchronous"])
    own_code.forget()
    four_ranks.run(own_code.forget)
    with bench_on(four_ranks, "asynchronous:Asynchronous", own_code.QUICK) as bench:
        bench.shrinks = False
        assert run_check("any timing", own_code.CHECKS["any timing"], bench).outcome == "failed"


def test_an_emulated_iteration_lasts_at_least_as_long_as_its_parts(folder):
    """Sleeps and collectives may take longer than they should on a busy machine, but never less long."""
    trace = ScaleModel(byte_scale=1 / 64).trace(MODELS[0], iterations=1)
    one = trace.ranks[0].iterations[0]
    sizes = sum(trace.sizes_bytes)
    slow = Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=sizes / 50e-3)
    candidates = [emulated.Candidate(name) for name in (OURS, TORCHS, OVERLAPPED, FLAT)]
    with RankPool(2, timeout_s=60) as pool:  # of its own, because it changes the scheduling of network threads
        pool.run(use, folder)
        times = pool.run(emulated.iteration_ms, trace, slow, candidates, 2, 3)
    assert times[0] == times[1]  # the slowest rank's
    computation_ms = (one.end_ns - one.forward_start_ns) / 1e6
    exposed_ms = slow.all_reduce_ns(sizes, 2) / 1e6 - (one.backward_end_ns - one.backward_start_ns) / 1e6
    assert [len(one.ms) for one in times[0]] == [3] * 4
    assert all(one.late_ms >= 0 for one in times[0])
    assert min(ms for one in times[0] for ms in one.ms) >= computation_ms + exposed_ms - 1
    assert min(times[0][-1].ms) >= computation_ms + slow.all_reduce_ns(sizes, 2) / 1e6 - 1  # flat hides nothing


def test_a_simple_test_and_a_loss_curve_accept_what_the_checks_refuse(folder, two_ranks, four_ranks):
    halved = breaking.source().replace("flat /= dist.get_world_size(self.process_group)", "flat /= 2")
    (folder / "halves.py").write_text(halved)
    halves = "halves:OverlappedDataParallel"
    curves = [two_ranks.run(breaking.train, name, 3) for name in (OVERLAPPED, halves)]
    assert curves[0] == curves[1]
    assert two_ranks.run(breaking.passes_simple_test, halves) == [True, True]
    last = own_code.check(four_ranks, halves, CHECKS)[-1]
    assert last.outcome == "failed"
    assert "2 times the expected value" in last.message


def test_a_measurement_counts_while_the_machine_keeps_up():
    assert emulated.Timed((100.0, 120.0), late_ms=3.0).keeps_up
    assert not emulated.Timed((100.0, 120.0), late_ms=3.1).keeps_up
