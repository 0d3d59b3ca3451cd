"""The command `ddplab`, which answers signals before the slow imports; see `ddplab.cli` for the rest."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the command in order: ranks end, temporary folders are removed, and no file is incomplete."""


def main() -> None:
    """Run the command line. A signal ends it with one line, and with 128 plus its number as the exit status."""
    try:
        _run()
    except SystemExit as ended:
        if any(thread.name.startswith("rank ") for thread in threading.enumerate()):
            _exit_beside_threads(ended.code)
        raise


def _exit_beside_threads(code: object) -> None:
    """Exit while ranks of virtual time still run, as those of a class that never returns.

    Python would stop their threads inside torch, which then aborts the process, whatever its exit status.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run() -> None:
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # closed at exit
    if sys.stdout is None:
        sys.exit("ddplab: the standard output is closed; redirect it, for example to /dev/null")
    os.environ["MPLBACKEND"] = "agg"  # pictures become files; matplotlib refuses to load with an unknown name
    received: list[signal.Signals] = []

    def end(number: int, _frame: FrameType | None) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)  # another signal would interrupt the end
        received.append(signal.Signals(number))
        raise KeyboardInterrupt

    def ignored(unraisable: Any) -> None:
        """Python drops what is raised in a destructor or a callback of a weak reference, as each import has one."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = ignored
    for number in (*SIGNALS, signal.SIGALRM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)
    try:
        from .cli.main import main as run

        run()
    except KeyboardInterrupt:
        pass
    finally:
        for one in (*SIGNALS, signal.SIGALRM):
            signal.signal(one, signal.SIG_IGN)  # the work is over; while Python shuts down, folders are removed
        if received:
            ended = f"ended by {received[0].name}; all ranks have ended, and no file is incomplete"
            print(f"ddplab: {ended}", file=sys.stderr)
            sys.exit(128 + received[0])
