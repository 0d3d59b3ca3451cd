"""Run a script with our class where it uses torch's: `python -m ddplab.replace_ddp SCRIPT ARGUMENTS...`.

Under a launcher: `torchrun --nproc-per-node 2 -m ddplab.replace_ddp SCRIPT ARGUMENTS...`. Ranks that the script
starts itself, as Lightning's trainer and `torch.multiprocessing.spawn` do, get our class too.
"""

import os
import runpy
import sys
import tempfile
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
    already, and subclasses of torch's class, stay as they are. Inside another `replace_ddp()` nothing changes.
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

AT_THE_START_OF_PYTHON = """
import sys

sys.path = [folder for folder in sys.path if folder != {folder!r}]
this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # another one, which this one hides
except ImportError:
    sys.modules["sitecustomize"] = this


class AfterTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_replace(module):
            execute(module)
            from ddplab.replace_ddp import replace_ddp

            self.context = replace_ddp()
            self.context.__enter__()

        spec.loader.exec_module = execute_and_replace
        return spec


sys.meta_path.insert(0, AfterTorch())
"""
"""Replaces the class as soon as torch is imported: Python imports a module `sitecustomize` when it starts."""


@contextmanager
def _children_replace_too() -> Iterator[None]:
    """Have Python processes that this one starts replace the class."""
    with tempfile.TemporaryDirectory(prefix="ddplab-") as folder:
        Path(folder, "sitecustomize.py").write_text(AT_THE_START_OF_PYTHON.format(folder=folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        yield


def main() -> None:
    """Run the script that `sys.argv` names, as `python SCRIPT ARGUMENTS...` would."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit(
            f"expected the path of a Python script, got {' '.join(sys.argv[1:]) or 'nothing'}: "
            "python -m ddplab.replace_ddp SCRIPT ARGUMENTS..."
        )
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    with replace_ddp(), _children_replace_too():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
