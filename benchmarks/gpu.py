"""Everything that is measured on the first GPU, part by part: `make gpu`; `--dry` tries it with tiny sizes on a CPU.

Each part is some commands, each in a process of its own with a time-out. When a part ends, its outcome is written to
`validation/gpu/DEVICE_VERSIONS/PART.json.gz`, with the output and the measured values; traces are files beside it. A
part that failed does not keep the others from running. The next run repeats only what failed or had no time.

This file imports nothing but the standard library, because packages may be missing: those that are not installed come
from a folder of wheels.
"""

import argparse
import contextlib
import gzip
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "validation" / "gpu"
DRY_RUNS = ROOT / "out" / "gpu"
PACKAGES = ROOT / "out" / "gpu-packages"
"""Where packages from the folder of wheels are installed."""
MINUTES = 8.5
"""Time for all parts, by default; machines are often lent for ten minutes."""
LEAST_S = 10.0
"""With less time left, no command is started."""
FOR_TESTS = "expecttest", "hypothesis", "pytest", "pytest-timeout"
"""Packages that the tests and `ddplab conform` need, beside those that the project depends on."""
OUTPUT_CHARACTERS = 30_000
"""How much of the end of a command's output is kept."""
DEVICE = (
    "import torch\n"
    "from benchmarks.device import nccl_version\n"
    "if torch.cuda.is_available():\n"
    "    print('device:', torch.cuda.get_device_name(0), torch.__version__, 'nccl', *nccl_version())\n"
    "else:\n"
    "    print('device: cpu', torch.__version__)\n"
)
"""A program that prints device and versions."""
CONFORM = (
    *("one weight", "construction", "bucket caps", "optimizers", "kept gradients", "buffers", "real models"),
    *("large gradients", "nested no_sync", "ignored parameters", "nested outputs", "untouched gradients"),
    *(
        "checkpoints",
        "hooks of the script",
        "skipped all-reduces",
        "list of bucket caps",
        "gradients that nothing waits for",
    ),
    *("first pass of a static graph", "plans", "comm hooks", "bucket layout", "accumulation", "unused parameters"),
    *("static graph", "gradient views", "a long run", "random programs", "state machine"),
)
"""Checks of `ddplab conform` that passed for our class and for torch's on a GPU, also with one rank."""
PUBLISHED = "resnext101_32x4d", "transformer_xl_base", "bert_base_batch_32", "cs336_xl", "gpt2_large_512@4"
"""Models of published measurements whose steps are timed beside the built-in ones."""


SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
"""Whether NCCL, from 2.30 on, lets two ranks share a GPU; then they do."""


@dataclass(frozen=True)
class Part:
    """A part: the commands that follow `python -m`, one after the other or at once, and the seconds for all of them.

    RUN in a command is the folder of the results, VALUES a folder for JSON files, which become part of the outcome.
    """

    name: str
    limit_s: float
    commands: Sequence[str]
    at_once: bool = False


@dataclass
class Outcome:
    """What became of a part: `done`, `failed`, or `no time`, if it was not begun."""

    part: str
    state: str
    seconds: float
    error: str
    commands: list[dict[str, Any]]
    values: dict[str, Any]


def parts(*, dry: bool) -> list[Part]:
    """Return all parts, the most valuable and cheap ones first."""
    backend, device = ("gloo", "cpu") if dry else ("nccl", "cuda")
    alone = f"--backend {backend} --world-size 1"
    together = f"--backend {backend} --world-size {1 + SHARED}"
    model = "small-tensors" if dry else "resnet50-224"
    tests = "tests/reference/test_gpu.py -m gpu -vv -rfEs -W default -p no:cacheprovider --durations 10"
    checks = ",".join(CONFORM[:2] if dry else CONFORM)
    if dry:
        traced = {model: "--steps 3 --within 0.5"}  # at its own batch size
        subjects = [("ddplab", 2, "gloo")]
        hooks, iterations = "--hook fp16", "--iterations 2"
        recorded = f"--models {model} --blocks 1"
        timed, compared, repeats = f"--models {model} --modes '' --pairs 2", "--ranks 1 --pairs 2", 1
        memory = {"small": f"--models {model}"}
        steps = {"small": f"--models {model} --precisions bf16 --wrappers module"}
    else:
        batches = {"resnet50-224": "64 128", "bert-large": "16 32", "gpt2": "4 8"}
        traced = {name: f"--batches {both} --steps 6" for name, both in batches.items()}
        pools = [(2, "nccl")] if SHARED else [(1, "nccl"), (2, "gloo")]
        subjects = [(name, *ranks) for ranks in pools for name in ("ddplab", "torch")]
        hooks, iterations = "--hook fp16 --hook bf16 --hook power_sgd:4", "--iterations 10"
        recorded = "--models resnet50-224 bert-large --blocks 3"  # paced by the host, and by the GPU
        timed = "--models resnet50-224 bert-large gpt2 small-tensors --modes '' --pairs 10"
        compared, repeats = "--ranks 4 --pairs 10", 4
        images = "--models resnet50-224@64 resnet50-224@128 vit-b-16@64 vit-b-16@128"
        words = "--models bert-large@8 bert-large@16 gpt2@8 gpt2@16 --optimizers adamw"
        half = "--precisions bf16 --wrappers module 'ours, views'"
        memory = {
            "images": images,
            "words": words,
            "images_bf16": f"{images} {half}",
            "words_bf16": f"{words} {half}",
        }
        published = " ".join(f"validation.published_models:{name}" for name in PUBLISHED)
        built_in = "resnet50-224 resnet152-224 vit-b-16 bert-large gpt2"
        sizes = "resnet50-224@8 resnet50-224@256 vit-b-16@8 vit-b-16@256"
        in_16_bits = " ".join(f"validation.published_models:retinanet@{batch}" for batch in (8, 32))
        steps = {
            "weights": f"--models llama-3.2-1b llama-3.2-1b-checkpointed {in_16_bits} --precisions weights",
            "tensor_cores": f"--models {built_in} {published} {sizes} --precisions tf32 bf16",
            "float32": f"--models {built_in} --precisions fp32",
        }
        steps = {name: f"{what} --wrappers module" for name, what in steps.items()}
    return [
        Part("device", 90, [f"benchmarks.device {together} --json VALUES/device.json"]),
        Part("tests", 110, [f"pytest {tests}"]),
        Part(
            "conform",
            150,
            [
                f"ddplab conform {name} --world-size {ranks} --backend {over} --device {device} --only '{checks}' "
                f"--json VALUES/{name}_{over}_{ranks}.json"
                for name, ranks, over in subjects
            ],
            at_once=True,
        ),
        Part(
            "validate",
            180 if dry else 90,  # a CPU shared with other tests took 75 s for the first command
            [
                f"{how} validate --model {model} --caps 25,single {turns} --out VALUES/{name} "
                f"--json VALUES/{name}.json"
                for name, how, turns in [
                    ("validate", "ddplab", f"{alone} --repeat {repeats} --torch"),
                    ("torchrun", "torch.distributed.run --nproc-per-node 1 -m ddplab", "--repeat 1"),
                ]
            ],
        ),
        Part(
            "steps",
            170,
            [f"benchmarks.training_steps {alone} {what} --json VALUES/{name}.json" for name, what in steps.items()],
        ),
        *(
            Part(
                f"traces-{name}",
                90,
                [f"benchmarks.gpu_traces {alone} --models {name} {sizes} --out RUN --json VALUES/agreement.json"],
            )
            for name, sizes in traced.items()
        ),
        Part("calibrate", 100, [f"ddplab calibrate --model {model} {together} {hooks} --out VALUES/fabric.json"]),
        Part("overhead-ddp", 150, [f"benchmarks.ddp {alone} {timed} --json VALUES/ddp.json"]),
        Part(
            "overhead-recorder",
            110,
            [f"benchmarks.recorder {alone} {recorded} --json VALUES/recorder.json"],
        ),
        Part(
            "overhead-powersgd",
            60,
            [f"benchmarks.powersgd {alone} --models {model} {compared} --json VALUES/powersgd.json"],
        ),
        *(
            [Part("slow-down", 100, [f"benchmarks.slow_down {alone} --rounds 3 --json VALUES/slow_down.json"])]
            if SHARED
            else []
        ),
        Part(
            "memory",
            150,
            [f"benchmarks.training_steps {alone} {what} --json VALUES/{name}.json" for name, what in memory.items()],
        ),
        Part("record", 60, [f"ddplab record --model {model} {alone} {iterations} --out RUN/record_command.json.gz"]),
    ]


# Packages


def missing(root: Path = ROOT) -> list[str]:
    """Return the requirements of the project, without torch, that this Python does not fulfil."""
    table = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [*table["dependencies"], *FOR_TESTS]
    return [one for one in (requirement.partition(";")[0].strip() for requirement in wanted) if not _fulfilled(one)]


def _fulfilled(requirement: str) -> bool:
    name, _, least = requirement.partition(">=")
    try:
        return name == "torch" or _numbers(importlib.metadata.version(name)) >= _numbers(least)
    except importlib.metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]


def install(wheels: Path) -> None:
    """Install every wheel of a folder into `PACKAGES`, where only the parts see them; uses no network.

    What the wheels need and this Python has stays as it is: pip would want a wheel of it too.

    Raises:
        SystemExit: pip failed, or something is still missing.
    """
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    command = [*pip, "--target", str(PACKAGES), *map(str, sorted(wheels.resolve().glob("*.whl")))]
    ended = subprocess.run(command, env=os.environ | {"PIP_CONFIG_FILE": os.devnull}, check=False)
    if ended.returncode or missing():
        sys.exit(f"gpu: expected wheels of {', '.join(missing())} and of what they need in {wheels}; {ADVICE}")


ADVICE = (
    "make one where there is a network: `pip download --only-binary :all: --python-version X.Y --platform "
    "manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --dest FOLDER PACKAGE...`, with X.Y of this Python; then "
    "`WHEELS=FOLDER make gpu`"
)


def environment() -> dict[str, str]:
    """Return the environment of the parts: this checkout and `PACKAGES` come before what is installed."""
    before = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), str(PACKAGES), *([before] if before else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


# Parts


def run_part(part: Part, run: Path, seconds_left: float) -> Outcome:
    """Run the commands of a part, all of them even if one fails."""
    deadline = time.monotonic() + min(part.limit_s, seconds_left)
    start = time.monotonic()
    outcome = Outcome(part.name, "done", 0.0, "", [], {})
    with tempfile.TemporaryDirectory(prefix="gpu-values-") as folder:
        for commands in [part.commands] if part.at_once else [[command] for command in part.commands]:
            lines = [shlex.split(one.replace("RUN", str(run)).replace("VALUES", folder)) for one in commands]
            programs = [[sys.executable, "-m", *words] for words in lines]
            for command, words, ended in zip(
                commands, lines, run_commands(programs, deadline - time.monotonic()), strict=True
            ):
                ended = {"command": command, **ended, "output": ended["output"].replace(folder, "VALUES")}
                outcome.commands.append(ended)
                if ended["status"] != 0 and not outcome.error:
                    outcome.state, outcome.error = "failed", f"{words[0]}: {_last_line(ended)}"
        for path in sorted(Path(folder).glob("*.json")):
            outcome.values[path.stem] = json.loads(path.read_text())
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


def run_commands(commands: Sequence[Sequence[str]], limit_s: float) -> list[dict[str, Any]]:
    """Run commands at once; returns the exit status of each, its seconds, and the end of its output.

    A command without a status did not end in `limit_s`, and was ended with all processes that it had started.
    """
    if limit_s < LEAST_S:
        return [{"status": None, "seconds": 0.0, "output": "not begun: no time was left"} for _ in commands]
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        started = []
        for command in commands:
            output = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            stack.callback(end, process)
            started.append((process, output))
        return [_ended(process, output, start, limit_s) for process, output in started]


def _ended(process: "subprocess.Popen[bytes]", output: IO[bytes], start: float, limit_s: float) -> dict[str, Any]:
    status: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(max(0.0, start + limit_s - time.monotonic()))
    end(process)
    seconds = round(time.monotonic() - start, 1)
    output.seek(0)
    text = output.read().decode(errors="replace").replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    text = text.replace(f"{sys.prefix}/", "")
    if status is None:
        text += f"\nended after {limit_s:.0f} s"
    return {"status": status, "seconds": seconds, "output": text[-OUTPUT_CHARACTERS:]}


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and all processes that it started; those that it has left behind hold the GPU's memory."""
    if process.poll() is None:
        process.terminate()  # ddplab's commands end their ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(ended: dict[str, Any]) -> str:
    lines = [line.strip() for line in ended["output"].splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit status {ended['status']}"


# The run


def run_folder(*, dry: bool) -> Path:
    """Return the folder of this device and these versions.

    Raises:
        SystemExit: torch cannot be imported, or there is no GPU, without `dry`.
    """
    (found,) = run_commands([[sys.executable, "-c", DEVICE]], 120)
    if found["status"] != 0:
        sys.exit(f"gpu: expected torch in {sys.executable}: {_last_line(found)}")
    (words,) = re.findall("^device: (.*)", found["output"].lower(), re.MULTILINE)
    if words.startswith("cpu ") and not dry:
        sys.exit("gpu: expected a CUDA device, torch sees none; `make gpu DRY=1` tries all parts on the CPU")
    return (DRY_RUNS if dry else RUNS) / re.sub(r"[^a-z0-9.+]+", "-", words).strip("-")


def load(path: Path) -> Outcome | None:
    """Return the outcome that an earlier run wrote; None: there is none, or it is damaged."""
    try:
        return Outcome(**json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, EOFError, ValueError, TypeError):
        return None


def save(path: Path, outcome: Outcome) -> None:
    """Write an outcome; a run that is ended meanwhile leaves the file of before."""
    new = path.with_suffix(".new")
    new.write_bytes(gzip.compress(json.dumps(asdict(outcome), indent=1).encode(), mtime=0))
    new.replace(path)


def run_all(chosen: Sequence[Part], run: Path, *, again: bool, minutes: float) -> list[Outcome]:
    """Run the parts that are not done, and write each outcome; returns all outcomes, those of before included."""
    deadline = time.monotonic() + 60 * minutes
    run.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for part in chosen:
        path = run / f"{part.name}.json.gz"
        before = load(path)
        if before is not None and before.state == "done" and not again:
            outcomes.append(before)
            continue
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            outcomes.append(Outcome(part.name, "no time", 0.0, "run again for this part", [], {}))
            continue
        print(f"{part.name} ...", flush=True)
        outcomes.append(run_part(part, run, left_s))
        save(path, outcomes[-1])
        print(row(outcomes[-1]), flush=True)
    return outcomes


def row(outcome: Outcome) -> str:
    """One line of the table: part, state, seconds, and the error if there is one."""
    return f"{outcome.part:22} {outcome.state:8} {outcome.seconds:8.1f}  {outcome.error}".rstrip()


def main() -> None:
    """Run all parts, print a table, and exit with 1 if one is not done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, Gloo and the CPU; results in out/gpu")
    parser.add_argument("--again", action="store_true", help="also run the parts that are done")
    parser.add_argument("--only", help="only these parts, with commas between")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all parts (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of the packages that are not installed")
    options = parser.parse_args()
    sys.path.insert(0, str(PACKAGES))  # what an earlier run has installed is there
    absent = missing()
    if absent and options.wheels is None:
        sys.exit(f"gpu: {sys.executable} lacks {', '.join(absent)}, and there is no folder of wheels: {ADVICE}")
    if absent:
        install(options.wheels)
    every = parts(dry=options.dry)
    names = [part.name for part in every] if options.only is None else options.only.split(",")
    if unknown := sorted(set(names) - {part.name for part in every}):
        sys.exit(f"gpu: expected parts, got {', '.join(unknown)}; there are {', '.join(part.name for part in every)}")
    run = run_folder(dry=options.dry)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu: ended; the next run goes on with the part that was cut"))
    chosen = [part for part in every if part.name in names]
    outcomes = run_all(chosen, run, again=options.again, minutes=options.minutes)
    size = sum(path.stat().st_size for path in run.iterdir())
    print(f"\n{'part':22} {'state':8} {'seconds':>8}  error")
    print("\n".join(map(row, outcomes)))
    print(f"results: {run.relative_to(ROOT)}, {size / 1e6:.1f} MB")
    sys.exit(any(outcome.state != "done" for outcome in outcomes))


if __name__ == "__main__":
    main()
