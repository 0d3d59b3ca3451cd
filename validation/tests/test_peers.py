"""Other predictors: what their files must be, and the kept answers; without their sources."""

import subprocess

import pytest

from validation import peers
from validation.board import Answers, rows
from validation.board_files import BOARD
from validation.peers import astra_sim, calculon, loggopsim, primus, proteus, simai
from validation.peers.buckets_and_links import computation_of, links_of, ring_of
from validation.peers.transformers import transformer_of

TOOLS = [astra_sim, calculon, loggopsim, primus, proteus, simai]
BERT = "i: DLPerf, V100, BERT-Base, fp32, batch 32, 16 GPUs"


def row_of(name):
    return next(row for row in rows() if row.name == name)


def bert():
    return computation_of(row_of(BERT)), links_of(row_of(BERT)), transformer_of(row_of(BERT))


@pytest.mark.parametrize("row", [row for row in rows() if row.part in "di"], ids=lambda row: row.name)
def test_the_known_step_and_all_gradients_are_in_the_computation(row):
    computation = computation_of(row)
    assert computation.end_ns / 1e6 == pytest.approx(row.known_ms, rel=1e-6)
    ready = [bucket.ready_ns for bucket in computation.buckets]
    assert sorted(ready) == ready
    assert computation.forward_ns < ready[0] <= ready[-1] <= computation.backward_ns
    parameters = row.load_trace().workload.parameters
    assert sum(bucket.size_bytes for bucket in computation.buckets) == sum(one.size_bytes for one in parameters)
    links = links_of(row)
    assert links.nodes * links.gpus == row.gpus
    assert (links.nodes == 1) == (links.between is None)


def test_simai_gets_a_layer_for_each_bucket_and_all_computation():
    computation, links, _ = bert()
    header, number, *lines = simai.workload(computation, links.nodes * links.gpus).splitlines()
    words = header.split()
    assert words[0] == "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
    assert words[words.index("all_gpus:") + 1] == "16"
    assert int(number) == len(lines) == len(computation.buckets) + 1
    layers = [line.split() for line in lines]
    assert {len(layer) for layer in layers} == {12}  # the fields that its parser reads
    computed = sum(int(layer[column]) for layer in layers for column in (2, 5, 8))
    assert computed - computation.end_ns == len(computation.buckets) + len(layers)  # 1 ns for each empty pass
    sent = [(layer[9], int(layer[10])) for layer in layers if layer[9] != "NONE"]
    assert sent == [("ALLREDUCE", bucket.size_bytes) for bucket in reversed(computation.buckets)]


def test_simai_gets_the_links_in_its_unit():
    def options(name):
        words = simai.arguments(links_of(row_of(name)))
        return dict(zip(words[::2], map(float, words[1::2]), strict=True))

    several = options(BERT)
    assert (several["-g"], several["-g_p_s"], several["-n_p_s"]) == (16, 8, 1)
    assert several["-nv"] == pytest.approx(134.5e9 / 2**30)
    assert several["-nic"] == pytest.approx(12.5e9 / 2**30)
    one = options(BERT.replace("16 GPUs", "8 GPUs"))
    assert one["-nic"] == one["-nv"] == several["-nv"]


def test_simai_reports_microseconds():
    assert simai.total_ms("File name, Expose DP comm, Total time\nrow-, 5 (1.00%), 345678\nlayers,1") == 345.678


def test_loggopsim_gets_every_send_and_all_computation():
    computation, links, _ = bert()
    lines = list(loggopsim.schedule(computation, ring_of(links), ticks_per_ns=1))
    assert lines[0] == "num_ranks 32"
    process = lines[lines.index("rank 3 {") : lines.index("rank 4 {")]
    sent = [int(line.split()[2].removesuffix("b")) for line in process if ": send " in line]
    assert sum(sent) == pytest.approx(2 * 15 / 16 * sum(one.size_bytes for one in computation.buckets), rel=1e-5)
    names = {line.partition(":")[0] for line in process if ":" in line}
    needed = [line.split() for line in process if " requires " in line]
    assert names.issuperset(name for first, _, second in needed for name in (first, second))
    # Messages of one sender and tag are received in the order in which they are sent.
    receives = [line.partition(":")[0] for line in process if " from 2 " in line]
    orders = {(first, second) for first, _, second in needed}
    assert orders.issuperset(zip(receives[1:], receives, strict=False))
    computes = lines[lines.index("rank 19 {") : lines.index("rank 20 {")]
    computed = sum(int(line.split()[2]) for line in [*computes, *process] if ": calc " in line)
    assert computed + round(ring_of(links).latency_s * 1e9) == pytest.approx(computation.end_ns, abs=1)


def test_loggopsim_prints_the_end_of_the_last_process():
    assert loggopsim.finished_ms("Maximum finishing time at host 3: 25000000 (0.025 s)\n", 10) == 2.5
    with pytest.raises(RuntimeError, match="expected the time of the last host, got 'unexpected queue"):
        loggopsim.finished_ms("unexpected queue on host 0 contains 3 elements!", 10)


def test_calculon_gets_the_fields_of_its_files():
    _, links, shape = bert()
    assert calculon.application(shape) == {
        "hidden": 768,
        "feedforward": 3072,
        "seq_size": 128,
        "attn_heads": 12,
        "attn_size": 64,
        "num_blocks": 12,
    }
    execution = calculon.execution(shape, links)
    assert len(execution) == 23  # Calculon accepts exactly these
    assert (execution["data_par"], execution["batch_size"], execution["data_par_net"]) == (16, 512, 1)
    network = {"bandwidth": 300, "efficiency": 0.9, "size": 8, "latency": 1e-5, "processor_usage": 0.15}
    unit = {"float16": {"tflops": 100, "gflops_efficiency": [[0, 1.0]]}}
    given = {"matrix": unit, "vector": unit, "mem1": {"GBps": 1000}, "networks": [network, dict(network)]}
    system = calculon.system(given, 0.5, links)
    assert system["matrix"]["float32"]["tflops"] == 50
    assert system["mem1"]["GBps"] == 500
    inside, between = system["networks"]
    assert (inside["bandwidth"], inside["efficiency"], inside["processor_usage"]) == (134.5, 1.0, 0.15)
    assert (between["bandwidth"], between["efficiency"], between["latency"]) == (12.5, 0.9, 14e-6)


def test_primus_gets_the_known_step_and_the_rate_of_a_node():
    computation, links, shape = bert()
    results = primus.benchmark(computation, shape.blocks)["profiling_results"]
    block = results["0"]
    total = shape.blocks * (block["forward_time_ms"] + block["backward_time_ms"])
    total += results["_optimizer_benchmark"]["step_time_ms"]
    assert total == pytest.approx(row_of(BERT).known_ms)
    given = primus.hardware(links)["hardware_config"]
    assert given["node_bw"] * given["bw_eff"] == pytest.approx(134.5)
    assert given["pod_bw"] * given["nics_per_node"] == pytest.approx(12.5)
    overrides = primus.experiment(shape, links)["modules"]["pre_trainer"]["overrides"]
    assert (overrides["num_layers"], overrides["global_batch_size"]) == (12, 512)


def test_primus_prints_milliseconds():
    assert primus.iteration_ms("   Iteration Time: 278.080 ms (1 microbatches x 260 ms)\n") == 278.08
    with pytest.raises(RuntimeError, match="expected an iteration time, got Traceback"):
        primus.iteration_ms("Traceback")


@pytest.mark.parametrize(
    ("tool", "name", "why"),
    [
        (calculon, "i: DGX V100, ResNet-50, 25 MB, 16 GPUs", "no transformer"),
        (primus, "d: NVIDIA, Transformer-XL Base", "no transformer"),
        (calculon, "e: CS336 XL, damek, batch 2, 1 MB, 2 GPUs", "three matrices"),
        (simai, "f: ", "no links"),
        (loggopsim, "f: ", "no links"),
    ],
)
def test_a_row_that_a_tool_cannot_take_has_a_reason(tool, name, why):
    with pytest.raises(ValueError, match=why):
        tool.method(next(row for row in rows() if row.name.startswith(name)))


@pytest.mark.parametrize("tool", [tool.__name__.rpartition(".")[2] for tool in TOOLS])
def test_kept_answers_are_of_rows_of_the_board(tool):
    kept = Answers.load(BOARD / "answers" / f"{tool}.csv")
    assert set(kept.of) == {row.name for row in rows()}
    assert kept.method == f"validation.peers.{tool}:method"
    assert kept.revision == getattr(peers, tool).REVISION
    assert kept.taken()
    assert all(one.why for one in kept.of.values() if one.ms is None)


def repository(folder):
    def git(*words):
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        return subprocess.run(
            ("git", *identity, *words), cwd=folder, check=True, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    folder.mkdir()
    git("init", "--quiet")
    for name in ("kept.txt", "left.txt"):
        (folder / name).write_text(name)
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    return git("rev-parse", "HEAD")


def test_a_checkout_has_the_files_and_repositories_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", tmp_path / "peers")
    revision, other = repository(tmp_path / "tool"), repository(tmp_path / "library")
    url = str(tmp_path / "tool")
    folder = peers.checkout(
        url, revision, "tool", {"extern/library": (str(tmp_path / "library"), other)}, paths=["/kept.txt"]
    )
    assert sorted(path.name for path in folder.iterdir()) == [".git", "extern", "kept.txt"]
    assert (folder / "extern/library/left.txt").exists()
    (folder / "built").touch()
    again = peers.checkout(
        url, revision, "tool", {"extern/library": (str(tmp_path / "library"), other)}, paths=["/kept.txt"]
    )
    assert (again / "built").exists()  # the same wish: nothing is fetched
    assert not (peers.checkout(url, revision, "tool") / "built").exists()


def test_a_revision_that_is_missing_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", tmp_path / "peers")
    repository(tmp_path / "tool")
    with pytest.raises(RuntimeError, match=r"^git checkout .*0000: exit code \d+, in .*") as caught:
        peers.checkout(str(tmp_path / "tool"), "0" * 40, "tool")
    assert "\n" not in str(caught.value)


def test_a_command_that_hangs_or_is_missing_is_one_clear_line(tmp_path):
    with pytest.raises(RuntimeError, match=r"sleep 60 .*: not finished after 0.5 s"):
        peers.run("sh", "-c", "sleep 60 & wait", cwd=tmp_path, limit_s=0.5)  # its child holds the pipes
    with pytest.raises(RuntimeError, match="expected no-such-program on the path"):
        peers.run("no-such-program", cwd=tmp_path)
