"""Runs the scenarios under torch's class, ours passed by hand, and ours in its place: `make test-clients`.

The results must be equal to the bit, or the same type of error. Names of scenarios as arguments run those alone.
"""

import hashlib
import inspect
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import import_torchvision

MODES = ("torch", "ours")
CLIENTS = (
    *("lightning", "accelerate", "transformers", "peft", "timm", "torchft", "mmengine", "ignite"),
    "sentence_transformers",
)
TIMEOUT_S = 1800


def run_rank(mode: str, rank: int, out: Path, names: list[str]) -> None:
    """Run the scenarios as one rank, and save their results by name."""
    import warnings
    from contextlib import nullcontext
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import ddplab

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    import_torchvision()
    from .scenarios import BY_HAND, SCENARIOS

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    chosen = names or list(SCENARIOS)
    wrap = torch.nn.parallel.DistributedDataParallel if mode == "torch" else ddplab.DistributedDataParallel
    by_hand = [] if mode == "torch" else [name for name in chosen if name in BY_HAND]
    for name in by_hand:
        results[name, "passed"] = result(SCENARIOS[name], wrap)
        torch.save(results, out / f"{mode}-{rank}.pt")
    with nullcontext() if mode == "torch" else ddplab.replace_ddp():
        for name in chosen:
            results[name, "replaced"] = result(SCENARIOS[name], wrap)
            torch.save(results, out / f"{mode}-{rank}.pt")
    os._exit(0)  # some clients leave threads


def result(scenario: Any, wrap: type) -> Any:
    """Digests of a scenario's tensors, or its error; ends when both ranks have one."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())  # the wrapper makes the ranks' models equal
    began = time.monotonic()
    try:
        found = scenario(wrap)
        found = list(map(digest, found))
    except Exception as error:  # noqa: BLE001 - the other class must raise one of this type
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    dist.barrier()
    print(f"{time.monotonic() - began:.1f} s", flush=True)
    return found


def digest(tensor: Any) -> tuple[tuple[int, ...], str]:
    """Shape, and a hash of the values; zeros of both signs are equal, and all that is not a number."""
    import torch

    values = (tensor.nan_to_num() + 0).contiguous().reshape(-1)
    return tuple(tensor.shape), hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def run_mode(mode: str, out: Path, names: list[str]) -> None:
    """Run both ranks of a mode, and wait."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        places |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        command = [sys.executable, "-m", __spec__.name, "--rank", mode, str(rank), str(out), *names]
        output = None if names and rank == 0 else (out / f"{mode}-{rank}.log").open("w")
        ranks.append(
            subprocess.Popen(command, env=os.environ | places | quiet, stdout=output, stderr=subprocess.STDOUT)
        )
    deadline = time.monotonic() + TIMEOUT_S
    for process in ranks:
        try:
            process.wait(max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{mode}: ended at the time-out of {TIMEOUT_S} s; scenarios below may be missing", flush=True)


def difference(torchs: Any, ours: Any) -> str:
    """Why two results differ; empty if they are equal to the bit, errors of one type, or only torch's an error."""
    if isinstance(torchs, str) and isinstance(ours, list):
        return ""
    if torchs is None or ours is None:  # a rank ended before this scenario
        return "no result under " + ("torch's class" if torchs is None else "ours")
    if isinstance(torchs, str) or isinstance(ours, str):
        kinds = [str(result).partition(":")[0] if isinstance(result, str) else "tensors" for result in (torchs, ours)]
        return "" if kinds[0] == kinds[1] else f"torch's: {str(torchs)[:200]}; ours: {str(ours)[:300]}"
    if len(torchs) != len(ours):
        return f"{len(torchs)} tensors under torch's class, {len(ours)} under ours"
    same = [torchs_digest == our_digest for torchs_digest, our_digest in zip(torchs, ours, strict=True)]
    return "" if all(same) else f"{same.count(False)} of {len(same)} tensors differ"


def names_missing() -> list[str]:
    """Names of torch's wrapper and reducer that the source of a client touches, and that ours lack."""
    from torch import nn
    from torch._C._distributed_c10d import Reducer

    from ddplab.reference import data_parallel, module_wrapper
    from ddplab.reference.features import join
    from ddplab.reference.reducer import Reducer as OurReducer
    from ddplab.reference.torch_names import TorchNames

    def attributes(*sources: Any) -> set[str]:
        return {name for source in sources for name in re.findall(r"self\.(\w+)\b", inspect.getsource(source))}

    torchs_class, our_class = nn.parallel.DistributedDataParallel, data_parallel.DistributedDataParallel
    torchs = {*dir(torchs_class), *attributes(torchs_class)} - set(dir(nn.Module))
    ours = {*dir(our_class), *attributes(data_parallel, module_wrapper, join)}
    reducers = set(dir(Reducer)) - set(dir(OurReducer)) - set(dir(TorchNames))
    missing, touched = set(), set()
    for client in CLIENTS:
        for path in Path(str(find_spec(client).origin)).parent.rglob("*.py"):
            text = path.read_text(errors="ignore")
            missing |= {f"reducer.{name}" for name in re.findall(r"\breducer\.(\w+)\(", text) if name in reducers}
            if "DistributedDataParallel" in text:
                touched |= torchs.intersection(re.findall(r"\.(\w+)\b", text))
    assert "_static_graph_delay_allreduce_enqueued" in touched
    return sorted(missing | (touched - ours))


def self_started_ranks() -> str:
    """How a training whose script starts its second rank differs under our class; empty: not at all."""
    script = str(Path(__file__).with_name("starts_its_ranks.py"))
    printed = []
    for launcher in ([], ["-m", "ddplab.replace_ddp"]):
        command = [sys.executable, *launcher, script]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
        printed.append(sorted(line for line in ran.stdout.splitlines() if line.startswith("rank ")))
        if len(printed[-1]) != 2:
            return f"{' '.join(command)} failed: {ran.stderr[-1000:]}"
    torchs, ours = printed
    expected = [line.replace("torch.nn.parallel.distributed", "ddplab.reference.data_parallel") for line in torchs]
    return "" if ours == expected else f"torch's: {torchs}; ours: {ours}"


def main() -> int:
    """Run all modes, print a line for each scenario, and return how many differ."""
    import torch

    names = sys.argv[1:]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for mode in MODES:
            run_mode(mode, out, names)
        results = {
            (mode, rank): torch.load(path) if (path := out / f"{mode}-{rank}.pt").exists() else {}
            for mode in MODES
            for rank in range(2)
        }
        wrong = 0
        for name, how in sorted(results["ours", 0]):
            torchs = [results["torch", rank].get((name, "replaced")) for rank in range(2)]
            found = {difference(torchs[rank], results["ours", rank].get((name, how))) for rank in range(2)}
            reasons = sorted(found - {""})
            wrong += bool(reasons)
            error = str(torchs[0]).partition(":")[0] if isinstance(torchs[0], str) else ""
            trains = isinstance(results["ours", 0][name, how], list)
            note = error and f" ({error} under {'torch alone' if trains else 'both'})"
            print(f"{'DIFFERS' if reasons else 'equal':8}{how:9}{name}{note} {'; '.join(reasons)}")
        lost = set(results["torch", 0]) - set(results["ours", 0])
        wrong += len(lost)
        wrong += len(missing := names_missing())
        print("".join(f"{name} is touched and missing\n" for name in missing), end="")
        if not names:
            wrong += bool(reason := self_started_ranks())
            print(f"{'DIFFERS' if reason else 'equal':8}replaced ranks that the script starts itself {reason}")
        print("".join(f"MISSING {name}\n" for name, _ in sorted(lost)), end="")
    count = len(results["torch", 0])
    print(f"{count} scenarios, {wrong} differences, {time.monotonic() - began:.0f} s")
    return int(bool(wrong) or not count)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    sys.exit(main())
