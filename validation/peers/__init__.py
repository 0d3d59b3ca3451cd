"""Predictors of other projects, run by their own code; one module a tool, with a function `method` for the board.

`python -m validation.board --method validation.peers.simai:method` fetches the pinned sources into `out/peers`,
builds them on first use and predicts all rows. Nothing of these sources is in this repository.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

PEERS = Path(__file__).parents[2] / "out" / "peers"
"""Sources and builds of all tools; git ignores the folder."""
LIMIT_S = 1800
"""Seconds that fetching or building may take by default."""


def checkout(
    url: str,
    revision: str,
    name: str,
    submodules: Mapping[str, tuple[str, str]] | None = None,
    *,
    paths: Sequence[str] = (),
) -> Path:
    """Clone a revision of a repository into `out/peers/<name>`; once, as long as the revision stays the same.

    Args:
        url: Address of the repository.
        revision: Full hash of the commit.
        name: Name of the folder.
        submodules: Other repositories by the folder where they belong, each as address and hash of the commit. They
            stand in for the submodules that the repository names, none of which is fetched otherwise.
        paths: Patterns of the files to check out, as in `.gitignore`; empty: all files.

    Raises:
        RuntimeError: git fails. The message is one line with the command and its last words.
    """
    folder, finished = PEERS / name, PEERS / f"{name}.revision"
    wanted = "\n".join([url, revision, *map(str, sorted((submodules or {}).items())), *paths])
    if finished.exists() and finished.read_text() == wanted and folder.exists():
        return folder
    finished.unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    _clone(url, revision, folder, paths)
    for path, (submodule_url, submodule_revision) in (submodules or {}).items():
        _clone(submodule_url, submodule_revision, folder / path, ())
    finished.write_text(wanted)
    return folder


def _clone(url: str, revision: str, folder: Path, paths: Sequence[str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    run("git", "clone", "--quiet", "--no-checkout", url, str(folder), cwd=folder.parent)
    if paths:
        run("git", "sparse-checkout", "set", "--no-cone", *paths, cwd=folder)
    run("git", "checkout", "--quiet", "--detach", revision, cwd=folder)


def run(*command: str, cwd: Path, limit_s: float = LIMIT_S, env: Mapping[str, str] | None = None) -> str:
    """Run a command of a foreign tool and return its standard output.

    Args:
        command: Program and arguments.
        cwd: Folder in which it runs.
        limit_s: Seconds after which it is killed.
        env: All its environment variables; None: ours.

    Raises:
        RuntimeError: The program is missing, fails or exceeds the limit. The message is one line.
    """
    shown = " ".join(command)
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
    except FileNotFoundError:
        raise RuntimeError(f"{shown}: expected {command[0]} on the path; install it") from None
    with process:
        try:
            printed, reported = process.communicate(timeout=limit_s)
        except BaseException as error:  # also if the user interrupts: a compiler's processes are in its session
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{shown}: not finished after {limit_s:g} s, in {cwd}") from None
            raise
    if process.returncode:
        words = (reported.strip() or printed.strip() or "without a message").splitlines()[-1]
        raise RuntimeError(f"{shown}: exit code {process.returncode}, in {cwd}: {words}")
    return printed
