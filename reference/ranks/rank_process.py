"""The process of a rank: runs the functions that a pool sends, one after the other, as a member of a process group.

The process was forked for the pool (`serve`), or a launcher has started it (`join`).
"""

import builtins
import contextlib
import copyreg
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any process group exists, as its default arguments hold the group
from pydantic import BaseModel
from torch import Tensor
from torch._C._distributed_c10d import FileStore, TCPStore

from ..errors import CollectiveError, Error, RankError
from .fork_server import IMPORTED, Surroundings
from .process_settings import choose_network, keep_freed_memory, pin

RESULT, FAILURE, PROGRESS, LEFT = range(4)
"""Kinds of messages from a rank to its pool."""
LEAVE = b""
"""Message to a rank, in place of a body: its pool has ended."""
FINISH_PAUSE_S, FINISH_TIMEOUT_S = 0.01, 2.0
"""How often and how long to look whether Gloo's threads have freed the last collectives."""
LOST_PEER = re.compile("gloo/transport|remote process")
"""In the error of a rank whose connection to another was lost, with Gloo and with NCCL."""
_NUMPY = {"_reconstruct", "_frombuffer", "scalar"}
DATA: Mapping[str, Collection[str]] = {
    "builtins": {"set", "frozenset", "complex", "bytearray", "slice", "range"}
    | {name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, BaseException)},
    "collections": {"OrderedDict", "deque", "Counter"},
    "numpy": {"ndarray", "dtype"},
    **{f"numpy.{core}.{part}": _NUMPY for core in ("core", "_core") for part in ("multiarray", "numeric")},
    __name__: {"tensor_of"},
    "torch": {"Size", "device", "sparse_coo", *(n for n, one in vars(torch).items() if isinstance(one, torch.dtype))},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_sparse_tensor"},
    "torch.serialization": {"_get_layout"},
}
"""What may be in data, by module."""
_pool: "tuple[Connection, Membership] | None" = None  # in a rank's process: the pipe to its pool, and its place there


class Membership(NamedTuple):
    """What makes a process a rank of a pool: see `launch.RankPool` and `_meet`.

    `local_rank` counts among the `local_size` ranks of this machine. `address` is that of the machine on the network
    that connects the ranks; None: all of them are on one machine.
    """

    world_size: int
    store: Path | tuple[str, int]
    backend: str
    timeout_s: float
    pinned: bool
    device: str | None
    rank: int
    local_rank: int
    local_size: int
    address: str | None


def report_progress(step: str, done: int, total: int) -> None:
    """Report progress from a body to the pool's `on_progress`; does nothing outside of a pool's rank."""
    if _pool is not None:
        _send(_pool[0], PROGRESS, (step, done, total))


def spans_nodes() -> bool:
    """Return whether this process is a rank, and others are on other machines, whose clocks differ from its own."""
    return _pool is not None and _pool[1].address is not None


def rank_device() -> torch.device:
    """Return the device on which this rank trains: that of its pool, or else its GPU with NCCL, otherwise the CPU."""
    given = None if _pool is None else _pool[1].device
    uses_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    if given == "cuda" or (given is None and uses_nccl):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def serve(pipes: Sequence[Connection], surroundings: Surroundings, membership: Membership) -> None:
    """Main function of a rank's process: run bodies, as a member of a pool, until the pipe closes."""
    connection, writes_stack, writes_errors = pipes
    surroundings.enter()
    for name in IMPORTED:  # a new interpreter must not take the time for this in the middle of a body
        importlib.import_module(name)
    gc.freeze()  # what is imported stays; a collection that visits it takes 0.2 s, and copies the server's pages
    os.dup2(writes_errors.fileno(), 2)
    writes_errors.close()
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=writes_stack.fileno(), all_threads=False)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the launcher has exited
        _run_bodies(connection, membership)


def join(connection: Connection, membership: Membership) -> None:
    """Run bodies in a launcher's process, as a member of a pool, and leave the pool."""
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else None
    _run_bodies(connection, membership)
    if dist.is_initialized():
        gc.collect()  # the group's last reference may be in a cycle of a body's objects
        with contextlib.suppress(RuntimeError):  # another rank was lost
            dist.destroy_process_group()
        let_gloo_finish()
    if cores is not None:
        os.sched_setaffinity(0, cores)
    _send(connection, LEFT, None)


def _run_bodies(connection: Connection, own: Membership) -> None:
    global _pool
    _pool = connection, own
    if own.pinned:
        pin(own.local_rank, own.local_size)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // own.local_size))
    choose_network(own.address)
    keep_freed_memory()
    while request := connection.recv_bytes():
        try:
            body, args = pickle.loads(request)
            if not dist.is_initialized():
                if own.backend == "nccl" or own.device == "cuda":
                    if not torch.cuda.device_count():
                        raise Error("ranks: expected a CUDA device, got none; use Gloo and the CPU")
                    torch.cuda.set_device(own.local_rank % torch.cuda.device_count())
                _meet(own)
            _send(connection, RESULT, body(own.rank, own.world_size, *args))
        except BaseException as error:  # noqa: BLE001 - also an exit, and a result that cannot be pickled
            _send(connection, FAILURE, _failure(own.rank, error))


def _failure(rank: int, error: BaseException) -> Error:
    """Return what a rank reports of an error: an `Error` of ours that is no `RankError` needs no traceback."""
    if isinstance(error, Error) and not isinstance(error, RankError):
        return error
    text = traceback.format_exc()
    kind: type[RankError] = CollectiveError if LOST_PEER.search(text) else RankError
    if isinstance(error, RankError):  # a class of another module may have another constructor
        kind = next(ancestor for ancestor in type(error).__mro__ if ancestor.__module__ == RankError.__module__)
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return kind(rank, next(line for line in lines if line and not line.startswith(" ")), traceback=text)


def _meet(own: Membership) -> None:
    """Initialise the process group with a store: a file, or the address and port of the launcher's."""
    timeout = timedelta(seconds=own.timeout_s)
    if not all(dist.is_backend_available(name.rpartition(":")[2]) for name in own.backend.split(",")):
        raise Error(f"ranks: expected a backend that this torch has, such as gloo, got {own.backend!r}; name another")
    meet = partial(dist.init_process_group, own.backend, rank=own.rank, world_size=own.world_size, timeout=timeout)
    if isinstance(own.store, tuple):
        meet(store=TCPStore(*own.store, is_master=False, timeout=timeout))
        return
    try:
        meet(store=FileStore(str(own.store), own.world_size))
    except dist.DistStoreError as error:
        advice = "make room there, or set TMPDIR"
        raise Error(f"ranks: cannot meet through a file in {own.store.parent}: {error}; {advice}") from None


def _end_with_launcher() -> None:
    """End this rank when its launcher has ended or was killed, even while the rank waits for other ranks."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _send(connection: Connection, kind: int, value: Any) -> None:
    """Send a plain pickle: `Connection.send` passes tensors in shared memory, which is freed when a rank exits."""
    pickler = pickle.Pickler(message := io.BytesIO())
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced}
    pickler.dump((kind, value))
    connection.send_bytes(message.getbuffer())


def received(message: bytes, *, only_data: bool) -> Any:
    """Return what a rank has sent; with `only_data`, nothing in it runs code here, as anything in a pickle could."""
    return (_Data if only_data else pickle.Unpickler)(io.BytesIO(message)).load()


class _Data(pickle.Unpickler):
    """Refuses all but arrays, tensors, containers, errors, and classes of ddplab that hold values."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if name in DATA.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("ddplab.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (
                is_dataclass(found) or issubclass(found, BaseException | tuple | BaseModel)
            ):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no data")


def tensor_of(array: Any) -> Tensor:
    """Return a tensor in the memory of an array."""
    return torch.from_numpy(array)


def _reduced(tensor: Tensor) -> Any:
    """Return how to pickle a tensor: as an array, if it can be one, in a thirtieth of the time of torch's way."""
    # Raised if it is sparse, differentiable, on a GPU, or of a dtype that NumPy lacks.
    with contextlib.suppress(RuntimeError, TypeError):
        if tensor.is_contiguous() and not vars(tensor):
            return tensor_of, (tensor.numpy(),)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def let_gloo_finish() -> None:
    """Wait until Gloo's threads have freed the last collectives, which must happen before Python ends.

    The destructor of a group joins these threads. If something still holds the group, such as a data-parallel module,
    they go on while Python ends, and a thread that then needs Python's lock, to free an object that a collective
    holds, ends the process: "terminate called without an active exception". This thread holds no lock while it
    sleeps, so a thread of Gloo that sleeps as well, at two moments, has nothing left to free.
    """
    calm = 0
    deadline = time.monotonic() + FINISH_TIMEOUT_S
    while calm < 2 and time.monotonic() < deadline:
        time.sleep(FINISH_PAUSE_S)  # Gloo has no event for the end of its threads' work, so they are looked at twice
        calm = 0 if "R" in _states_of_threads("pt_gloo_runloop") else calm + 1


def _states_of_threads(name: str) -> set[str]:
    """States of this process's threads of a name, as in proc(5); without Linux, none."""
    states = set()
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            of_name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
            if of_name == name:
                states.add(rest.split()[0])
    return states
