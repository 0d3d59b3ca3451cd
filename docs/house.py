"""What a reader must hold in his head: sizes of the code base, beside targets. `make house` prints them.

The table marks a row that is worse than its target with an asterisk, and the exit status is then 1.

A *pass* is one forward and backward pass on rank 0 of two Gloo ranks, after 20 iterations. Its files are those of the
three packages in which a line of a function runs. Autograd calls hooks in the thread of `backward`, so their lines
count; callbacks in threads that Gloo starts do not.

A *route* follows one argument of a call: the named functions of the three packages that receive the argument, or
something that such a function has returned, in the order of their first calls. Consecutive functions of one module
are one *stay*; a stay in a module left before is a *return*.

A *part* is one of the three packages, or a direct sub-package of one. Files that lie directly in a package are no
part: some stand below its sub-packages, others above. Imports under `if TYPE_CHECKING` do not count, nor do those of
the `__init__` of one of the three.

A *parameter* is an argument or option of a command; a *setting* is a field of a record that `ddplab show settings`
lists. A new command, parameter or setting needs another's removal.
"""

import ast
import inspect
import sys
import textwrap
import threading
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from enum import Enum
from functools import partial
from io import StringIO
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import typer
from torch import nn

from ddplab.cli.main import app
from ddplab.cli.show import SETTINGS
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.launch import run_ranks
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, Policy, predict

ROOT = Path(__file__).parent.parent
PACKAGES = ("ddplab.reference", "ddplab.simulator", "ddplab")
TRACE = ROOT / "benchmarks" / "resnet50.json.gz"
ALL_REDUCES = [(8, 1_000, 100_000), (8, 100_000_000, 50_000_000)]
"""Ranks, bytes and nanoseconds."""
WARM_UP = 20
"""Iterations before the traced pass: buckets are rebuilt after the first, and each of the first ten is timed."""
PREDICT = ("predict", str(TRACE), "--fabric", "FABRIC", "--world-size", "8")
"""FABRIC is a file of `ALL_REDUCES`."""
PLAN = ("plan", "resnet50", "aws-p4d")
LAYERS, WIDTH = 12, 1024
"""48 MiB of parameters: three buckets with the default caps."""


class Row(NamedTuple):
    """One number, its target if there is one, and the names that the number counts."""

    name: str
    value: int
    target: int | None = None
    sign: Literal["<=", ">="] = "<="
    names: Iterable[str] = ()

    @property
    def is_worse(self) -> bool:
        """Whether the number misses its target."""
        return self.target is not None and (
            self.value > self.target if self.sign == "<=" else self.value < self.target
        )

    def __str__(self) -> str:
        target = "" if self.target is None else f"{self.sign} {self.target:,}"
        row = f"{self.name:50} {self.value:>8,} {target:>10}{' *' * self.is_worse}".rstrip()
        return "\n    ".join([row, *textwrap.wrap(", ".join(self.names), 110, break_on_hyphens=False)])


def modules(root: Path) -> dict[str, Path]:
    """Files of the three packages by module name; an `__init__.py` has the name of its package.

    The first two are links in the third, which `rglob` does not follow.
    """
    files = [path for name in PACKAGES for path in sorted(root.joinpath(*name.split(".")).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def plain_modules(root: Path) -> list[str]:
    """All modules except `__init__` and `__main__`."""
    return [name for name, path in modules(root).items() if path.stem not in ("__init__", "__main__")]


def untested_modules(root: Path) -> list[str]:
    """Plain modules for which `tests` has no file `test_<module>.py`."""
    tested = {path.stem.removeprefix("test_") for path in (root / "tests").rglob("test_*.py")}
    return [name for name in plain_modules(root) if name.rpartition(".")[2] not in tested]


def torch_imports(root: Path) -> list[str]:
    """Modules of `simulator` that import torch, at their top or in a function."""
    ours = {name: path for name, path in modules(root).items() if name.startswith("ddplab.simulator")}
    return [name for name, path in ours.items() if any(i.partition(".")[0] == "torch" for i in imports(path, root))]


def mutual_imports(root: Path) -> list[str]:
    """Pairs of parts that import each other."""
    files, arrows = modules(root), set()
    for path in (path for name, path in files.items() if name not in PACKAGES):
        for name in imports(path, root):
            target = files.get(name) or files.get(name.rpartition(".")[0])
            if target is not None:
                (package, part), (other, its_part) = (_package_and_part(one, root) for one in (path, target))
                arrows |= {(package, other)} | (
                    {(part, its_part)} if part != package and its_part != other else set()
                )
    return sorted(f"{one}<->{other}" for one, other in arrows if one < other and (other, one) in arrows)


def imports(path: Path, root: Path) -> set[str]:
    """Full names of what a file imports: of modules, and of names in modules."""
    found = set()
    package = path.parent.relative_to(root).parts
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *([node.module] if node.module else [])]
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without what only type checkers read."""
    left = [node]
    while left:
        yield (node := left.pop())
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"
        left += node.orelse if isinstance(node, ast.If) and typing_only else ast.iter_child_nodes(node)


def _package_and_part(path: Path, root: Path) -> tuple[str, str]:
    module = ".".join(path.parent.relative_to(root).parts)
    package = next(name for name in PACKAGES if f"{module}.".startswith(f"{name}."))
    return package, ".".join(module.split(".")[: package.count(".") + 2])


def repeated_class_names(root: Path) -> list[str]:
    """Names that more than one class has."""
    nodes = (node for path in modules(root).values() for node in ast.walk(ast.parse(path.read_text())))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in counts.items() if count > 1)


def hidden_loads(root: Path) -> list[str]:
    """Entry points in `pyproject.toml`, without commands."""
    groups = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("entry-points", {})
    return [f"{group}: {name}" for group in groups for name in groups[group]]


def stays(route: Iterable[str]) -> list[str]:
    """Modules of a route, consecutive equal ones once."""
    return [module for module, _ in groupby(route)]


def returns(route: Iterable[str]) -> int:
    """Number of stays in modules that were left before."""
    visited = stays(route)
    return len(visited) - len(set(visited))


def route_of(action: Callable[[], object], followed: object, apart: object = None) -> list[str]:
    """Files of the named functions that an action passes `followed` to, or what has become of it, by first calls.

    `apart` has other arguments of the action: their parts are not followed, although functions may return them.
    """
    first_calls: dict[tuple[str, int], str] = {}
    passed_on: dict[int, object] = {}  # held, so that no other object gets its id
    receiving: set[FrameType] = set()
    others = {id(part) for part in _with_parts(apart, depth=3)}

    def on_event(frame: FrameType, event: str, returned: object) -> None:
        code = frame.f_code
        if not _is_our_function(code) or code.co_name.startswith("<"):
            return
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(id(frame.f_locals.get(name)) in passed_on for name in names):
                receiving.add(frame)
                first_calls.setdefault((code.co_filename, code.co_firstlineno), _short(code.co_filename))
        elif event == "return" and frame in receiving:
            receiving.remove(frame)
            made = frame.f_locals.get("self") if code.co_name == "__init__" else returned
            passed_on.update((id(part), part) for part in _with_parts(made, depth=2) if id(part) not in others)

    passed_on.update((id(part), part) for part in _with_parts(followed, depth=2))
    sys.setprofile(on_event)
    try:
        action()
    finally:
        sys.setprofile(None)
    return list(first_calls.values())


def _with_parts(value: object, depth: int) -> Iterator[object]:
    """A value, its attributes and items and theirs down to a depth, without numbers, texts, arrays and functions.

    Without empty tuples too: all of them are one object, so an empty field of the fabric would count as the trace's.
    """
    if (
        value is None
        or (isinstance(value, tuple) and not value)
        or isinstance(value, int | float | str | bytes | type | Enum | np.ndarray)
        or inspect.isroutine(value)
    ):
        return
    yield value
    parts: list[object] = list(getattr(value, "__dict__", {}).values())
    parts += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    if isinstance(value, list | tuple | dict):
        parts += list(value.values() if isinstance(value, dict) else value)[:100]
    for part in parts if depth else ():
        yield from _with_parts(part, depth - 1)


def lines_of(action: Callable[[], object]) -> dict[str, set[int]]:
    """Lines of our functions that an action runs, by file; in this thread and in those that Python starts."""
    lines: defaultdict[str, set[int]] = defaultdict(set)

    def on_event(frame: FrameType, event: str, _argument: object) -> Any:
        if not _is_our_function(frame.f_code):
            return None
        if event == "line":
            lines[_short(frame.f_code.co_filename)].add(frame.f_lineno)
        return on_event

    threading.settrace(on_event)
    sys.settrace(on_event)
    try:
        action()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return dict(lines)


def _is_our_function(code: CodeType) -> bool:
    """Whether the code is of a function in the three packages; bodies of modules and classes are not optimized."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_filename.startswith(f"{ROOT / 'ddplab'}/")


def _short(file: str) -> str:
    return Path(file).relative_to(ROOT).as_posix()


def run_command(words: Iterable[str]) -> None:
    """Run a command of ddplab in this process, without its output."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        fabric = Path(folder) / "fabric.json"
        Fabric.from_table(ALL_REDUCES).save(fabric)
        given = [str(fabric) if word == "FABRIC" else word for word in words]
        typer.main.get_command(app)(given, standalone_mode=False)


def train(_rank: int, _world_size: int) -> tuple[list[str], dict[str, set[int]]]:
    """Route of the constructor, and the lines of a pass; both of a small model."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    models: list[nn.Module] = []
    route = route_of(lambda: models.append(DistributedDataParallel(module)), module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    inputs = torch.ones(2, WIDTH)

    def one_pass() -> None:
        models[0](inputs).sum().backward()

    for _ in range(WARM_UP):
        one_pass()
        optimizer.step()
        optimizer.zero_grad()
    return route, lines_of(one_pass)


def commands_of(typer_app: typer.Typer) -> dict[str, list[str]]:
    """Commands of an app by their full names, each with its parameters."""
    found: dict[str, list[str]] = {}

    def walk(name: str, command: Any) -> None:
        for below, one in getattr(command, "commands", {}).items():
            walk(f"{name} {below}".strip(), one)
        if not hasattr(command, "commands"):
            found[name] = [parameter.name for parameter in command.params]

    walk("", typer.main.get_command(typer_app))
    return found


def rows() -> Iterator[Row]:
    """All rows of the table."""
    construction, lines = run_ranks(train, 2)[0]
    trace, fabric = Trace.load(TRACE), Fabric.from_table(ALL_REDUCES)
    policy = Policy()
    prediction = route_of(lambda: predict(trace, fabric, world_size=8, policy=policy), trace, (fabric, policy))
    yield Row("files of one forward and backward pass", len(lines), 5, names=lines)
    yield Row("lines of these files", _length(ROOT / file for file in lines), 1_300)
    yield Row("lines of them that run", sum(map(len, lines.values())))
    yield Row("stays on the route of predict", len(stays(prediction)), 12, names=_stems(prediction))
    yield Row("modules on it", len(set(prediction)), 7)
    yield Row("returns on it", returns(prediction), 4)
    for target, words in ((30, PREDICT), (40, PLAN)):
        entered = lines_of(partial(run_command, words))
        yield Row(f"files that `ddplab {words[0]}` enters", len(entered), target, names=entered)
    yield Row("stays on the route of the constructor", len(stays(construction)), 18, names=_stems(construction))
    for name, target, find in (
        ("modules of simulator that import torch", 0, torch_imports),
        ("pairs of parts that import each other", 0, mutual_imports),
        ("loads hidden in metadata", 0, hidden_loads),
        ("class names of more than one class", 3, repeated_class_names),
    ):
        found = find(ROOT)
        yield Row(name, len(found), target, names=found)
    count, untested = len(plain_modules(ROOT)), len(untested_modules(ROOT))
    yield Row("modules", count)
    yield Row("% of modules with a test file of their name", 100 * (count - untested) // count, 70, ">=")
    files = modules(ROOT).values()
    for package in PACKAGES:
        own = [path for path in files if _package_and_part(path, ROOT)[0] == package]
        yield Row(f"lines of {package}", _length(own))
    yield Row("lines of the three packages", _length(files), 34_900)
    commands = commands_of(app)
    yield Row("commands", len(commands), 14, names=[f"{name} {len(own)}" for name, own in commands.items()])
    yield Row("parameters of the commands", sum(map(len, commands.values())), 120)
    yield Row("settings", sum(len(record.model_fields) for record in SETTINGS.values()), 75)
    for page, target in (("DESIGN.md", 2_000), ("CHANGELOG.md", 500)):
        yield Row(f"words of {page}", len((ROOT / page).read_text().split()), target)
    for path in (path for path in files if path.stem == "minimal"):
        yield Row(f"lines of {_short(str(path))}", _length([path]), 130)


def _stems(route: Iterable[str]) -> list[str]:
    return [Path(file).stem for file in stays(route)]


def _length(files: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def main() -> None:
    """Print the table; exit with 1 if a number is worse than its target."""
    print(f"{'':50} {'today':>8} {'target':>10}")
    worse = 0
    for row in rows():
        print(row, flush=True)
        worse += row.is_worse
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
