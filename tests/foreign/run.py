"""Judges every adapter with `ddplab conform`, and prints the table of docs/conformance.md: `make test-foreign`.

Names of adapters as arguments judge those alone; `--write` writes the table into the guide.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from inspect import getdoc, getmembers, isfunction
from pathlib import Path
from typing import Any

from ddplab.conformance.check_runner import NOT_OF_ADAPTERS

from . import adapters

GUIDE = Path(__file__).parents[2] / "docs" / "conformance.md"
HEAD = "| implementation | version | refused or not supported | failed |\n| --- | --- | --- | --- |\n"
TIMEOUT_S = 600
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}


def all_adapters() -> dict[str, Callable[..., Any]]:
    """Return the adapters by name, in the order of the file."""
    public = [one for name, one in getmembers(adapters, isfunction) if not name.startswith("_")]
    found = [one for one in public if one.__annotations__.get("return") is adapters.Adapted]
    return {one.__name__: one for one in sorted(found, key=lambda one: one.__code__.co_firstlineno)}


def judged(name: str, folder: Path) -> dict[str, Any]:
    """Run the kit on an adapter, and return what it writes as JSON."""
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "ddplab", "conform", f"{adapters.__name__}:{name}", "--json", str(out)]
    with (folder / f"{name}.log").open("w") as log:
        environment = os.environ | QUIET | {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
        subprocess.run(command, stdout=log, stderr=log, timeout=TIMEOUT_S, check=False, env=environment)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def label(make: Callable[..., Any]) -> str:
    """Return what an adapter is of: the first line of its docstring."""
    return (getdoc(make) or "").partition("\n")[0].removesuffix(".")


def row(make: Callable[..., Any], result: dict[str, Any]) -> str:
    """Return the row of an adapter; checks that no adapter can have are left out."""
    ran = [one for one in result["checks"] if one["message"] != NOT_OF_ADAPTERS]
    failed = [one["check"] for one in ran if one["outcome"] == "failed"]
    refused = [
        one["check"] for one in ran if one["outcome"] not in ("passed", "failed") or "refuses" in one["message"]
    ]
    library = label(make).partition(" of ")[2].split()[0].strip(",;")
    cells = label(make), version(library), ", ".join(refused), ", ".join(failed)
    return f"| {' | '.join(cells)} |\n"


def prepare(folder: Path) -> None:
    """Compile what DeepSpeed compiles at its first use, longer than a check may take."""
    build = "from deepspeed.ops.op_builder import ShareMemCommBuilder; ShareMemCommBuilder().load()"
    environment = os.environ | QUIET | {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    subprocess.run([sys.executable, "-c", build], capture_output=True, check=True, env=environment)


def main() -> None:
    """Judge, print, and write."""
    began, chosen = time.monotonic(), [word for word in sys.argv[1:] if not word.startswith("--")]
    table = HEAD
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name, make in all_adapters().items():
            if not chosen or name in chosen:
                result = judged(name, Path(folder))
                table += row(make, result)
                print(f"{name}:", *result["problems"] or ["conforms"], sep="\n  ", flush=True)
    print(f"\n{table}\n{time.monotonic() - began:.0f} s")
    if "--write" in sys.argv:
        before, _, after = GUIDE.read_text().partition(HEAD)
        GUIDE.write_text(before + table + "\n" + after.partition("\n\n")[2])


if __name__ == "__main__":
    main()
