"""End `record`, `calibrate`, `validate` and `predict` at random moments, and look at what they leave.

Run `python -m tests.scripts.end_at_random_moments 100`. Each command runs in a folder that has its outputs already.
It is ended by a signal, or its disk is full (a small one in memory, which only root can mount; others leave this
ending out). Afterwards every file must be as before or complete, and nothing else may be left: neither in the folder
nor in that of temporary files. After SIGKILL something may be left; the next run must remove it from the folder.
"""

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "tests.models_for_cli:tiny"
ROOT = Path(__file__).parent.parent.parent
COMMANDS = {
    "record": ["--model", MODEL, "--world-size", "2", "--iterations", "3", "--out", "trace.json.gz"],
    "calibrate": ["--model", MODEL, "--out", "fabric.json"],
    "validate": ["--model", MODEL, "--caps", "1", "--repeat", "1", "--out", "run"],
    "predict": ["input.json.gz", "--fabric", "pod.yaml", "--json", "rows.json", "--heat-map", "map.png"],
}
ENDINGS = ["SIGKILL", "SIGTERM", "SIGHUP"]
FULL = "full disk"
DISK_BYTES = 8 * 2**20
MOST_FREE_BYTES = 64 * 2**10


def main() -> None:
    """Print what went wrong, one line each, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=100, help="how often to end a command (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args()
    chance, wrong = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        endings = [*ENDINGS, FULL] if os.geteuid() == 0 else ENDINGS
        try:
            durations = {command: prepare(top / command, command) for command in COMMANDS}
            for number in range(options.count):
                command, ending = list(COMMANDS)[number % 4], endings[number // 4 % len(endings)]
                share = chance.random()
                for problem in end(top / command, command, ending, share, share * durations[command]):
                    wrong += 1
                    print(f"{command}, {ending}, at {share:.0%}: {problem}", flush=True)
        finally:
            for folder in top.glob("*/out"):
                subprocess.run(["umount", folder], check=False, stderr=subprocess.DEVNULL)
    print(f"{options.count} times: {wrong} problems")
    sys.exit(wrong > 0)


def prepare(folder: Path, command: str) -> float:
    """Run a command to its end; return its duration in seconds."""
    (folder / "out").mkdir(parents=True)
    (folder / "tmp").mkdir()
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder / "out"], check=True)
    run = ROOT / "validation" / "runs" / "gru-1gbit-3ranks" / "trace.json.gz"
    shutil.copy(run, folder / "out" / "input.json.gz")
    (folder / "out" / "pod.yaml").write_text("levels:\n  network: {latency_us: 5, gb_per_s: 12}\n")
    start = time.monotonic()
    with started(folder, command) as running:
        _, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    return time.monotonic() - start


def started(folder: Path, command: str) -> "subprocess.Popen[str]":
    """Start a command."""
    return subprocess.Popen(
        [Path(sys.executable).parent / "ddplab", command, *COMMANDS[command]],
        cwd=folder / "out",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGHUP, signal.SIGTERM)],
    )


def end(folder: Path, command: str, ending: str, share: float, after_s: float) -> list[str]:
    """End a command; return what is wrong afterwards.

    Args:
        folder: Its folder.
        command: Its name.
        ending: How it ends.
        share: Share of `MOST_FREE_BYTES` that is free on a full disk.
        after_s: When a signal is sent, in seconds.
    """
    before, ballast = contents(folder), folder / "out" / "ballast"
    if ending == FULL:
        free = shutil.disk_usage(folder / "out").free
        ballast.write_bytes(bytes(max(0, free - int(share * MOST_FREE_BYTES))))
    with started(folder, command) as running:
        if ending != FULL:
            time.sleep(after_s)
            running.send_signal(signal.Signals[ending])
        _, errors = running.communicate(timeout=300)
    ballast.unlink(missing_ok=True)
    wrong = [f"a traceback: {errors.splitlines()[-1]}"] if "Traceback" in errors else []
    wrong += [f"{path} is damaged" for path in contents(folder) if not is_complete(folder / path)]
    wrong += [f"{path} is missing" for path in before if path not in contents(folder)]
    if ending == "SIGKILL":
        time.sleep(1)  # its ranks end by themselves
        shutil.rmtree(folder / "tmp")
        (folder / "tmp").mkdir()
        with started(folder, command) as running:
            running.communicate(timeout=300)
    return wrong + [f"{path} is left" for path in contents(folder) - before]


def contents(folder: Path) -> set[str]:
    """Paths of all files, folders of temporary files included."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {"out", "tmp"}


def is_complete(path: Path) -> bool:
    """Whether a file can be read to its end."""
    try:
        match path.suffix:
            case ".gz":
                json.loads(gzip.decompress(path.read_bytes()))
            case ".json":
                json.loads(path.read_bytes())
            case ".png":
                return path.read_bytes().endswith(b"IEND\xaeB`\x82")
            case ".part":
                return True
    except (ValueError, EOFError, OSError):
        return False
    return True


if __name__ == "__main__":
    main()
