"""Run a script with our class where it uses torch's: `python -m ddplab.replace_ddp SCRIPT ARGUMENTS...`.

Under a launcher: `torchrun --nproc-per-node 2 -m ddplab.replace_ddp SCRIPT ARGUMENTS...`. Every rank must be started
in this way. So a script that starts its own ranks needs `with ddplab.replace_ddp():` in each of them.
"""

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.nn.parallel.distributed as home

from .reference.data_parallel import DistributedDataParallel

_TORCHS = home.DistributedDataParallel


class _Home(ModuleType):
    """The module of torch's class while ours replaces it: importers get ours, its own functions still see torch's."""

    DistributedDataParallel = property(lambda _module: DistributedDataParallel)


@contextmanager
def replace_ddp() -> Iterator[None]:
    """Put our class in place of torch's, under all names by which modules have imported it or will import it.

    Inside torch only `torch.nn.parallel` changes: all that asks `isinstance` accepts our class. Modules that exist
    already, and subclasses of torch's class that have been defined, stay as they are. Inside another `replace_ddp()`
    nothing changes.
    """
    if isinstance(home, _Home):
        yield
        return
    places: list[tuple[dict[str, Any], str]] = []
    for name, module in list(sys.modules.items()):
        if name == "torch.nn.parallel" or name.partition(".")[0] not in ("torch", "ddplab"):
            names = vars(module) if isinstance(module, ModuleType) else {}
            places += [(names, key) for key, value in list(names.items()) if value is _TORCHS]
    for names, key in places:
        names[key] = DistributedDataParallel
    home.__class__ = _Home
    try:
        yield
    finally:
        home.__class__ = ModuleType
        for names, key in places:
            names[key] = _TORCHS


class _Callable(ModuleType):
    """This module, whose name in the package is that of the function too: `ddplab.replace_ddp()`."""

    __call__ = staticmethod(replace_ddp)


sys.modules[__name__].__class__ = _Callable


def main() -> None:
    """Run the script that `sys.argv` names, as `python SCRIPT ARGUMENTS...` would."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit(
            f"expected the path of a Python script, got {' '.join(sys.argv[1:]) or 'nothing'}: "
            "python -m ddplab.replace_ddp SCRIPT ARGUMENTS..."
        )
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    with replace_ddp():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
