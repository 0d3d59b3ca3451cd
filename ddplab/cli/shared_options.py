"""Options that several subcommands share, and the parsing of their values; errors name the option."""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast

from typer import Argument, Option

from ..reference.bucketing import ORDERS, Order, cap_name
from ..reference.files.reading import Schema, one_line_errors, parse_json
from ..reference.files.value_ranges import MILLION
from ..reference.files.writing import STANDARD_OUTPUT, check_distinct, check_writable, open_descriptor
from ..reference.trace import Parameter
from ..simulator.catalogue import load_fabric
from ..simulator.fabric import Fabric
from ..simulator.fabric.measured_tables import ranks_and_log
from ..simulator.schedule.comm_hook_messages import CommHook, named_hook
from ..simulator.schedule.policy import Policy
from ..simulator.workload.roofline import Operations, built_in_operations
from ..simulator.workload.variation import Straggler, Variation
from ..user_modules import module_name
from .terminal_output import PrintableStream, progress

R = TypeVar("R", bound=Schema)

FABRIC = Path("out/fabric.json")
FABRIC_FILE = (
    "A fabric file of `calibrate`, a topology file (.yaml, .yml), a log of nccl-tests (.log, .txt; 40:FILE if "
    "the log does not show that it is of 40 ranks), or a node that `ddplab show` lists, such as dgx-h100"
)
PREDICT_CAPS = "0.5,1,5,default,single"
RECORDS = (Policy, Fabric, Variation)
"""Records whose fields `--set` changes; no two have a field of the same name."""

HELP = {
    "json": "Also write the result as JSON, for programs; `-` is the standard output.",
    "model": "A model that `ddplab show` lists, such as resnet50, or MODULE:CALLABLE of your own.",
    "processes": "Number of ranks, each a process. Default: all that torchrun, srun or mpirun has started; without "
    "these, {} on this machine.",
    "backend": "Backend of the process group; NCCL trains on the GPUs. Default: nccl where each rank has one, else "
    "gloo.",
    "caps": "Bucket caps in MB; `single` is one bucket in total, `default` is 25, and 1 for the first bucket.",
    "orders": f"Bucket orders: {', '.join(ORDERS)}.",
    "hooks": "Comm hooks: none, fp16, bf16, quantize_per_tensor, power_sgd:RANK, ...",
    "set": "Another setting, such as sync_every=4, extrapolate=true or kind=resampled; may be repeated. "
    "`ddplab show settings` lists all.",
    "fabric": f"{FABRIC_FILE}; may be repeated. Files are merged into one fabric.",
    "measured": "Median iteration times that you have measured on a few ranks, such as 4:1020.5ms,8:1.04s; they "
    "correct and narrow the prediction. They are times of the configuration that is predicted; if several are "
    "predicted, of the settings of --set and otherwise torch's defaults.",
}

TraceFile = Annotated[Path, Argument(metavar="TRACE", help="A trace of `record`, `import` or `synthesize`.")]
TraceOut = Annotated[Path, Option(metavar="PATH", help="Where to write the trace; .gz compresses it.")]
Json = Annotated[Path | None, Option("--json", metavar="PATH", help=HELP["json"])]
Model = Annotated[str, Option(metavar="MODEL", help=HELP["model"])]
WorldSize = Annotated[int, Option(min=1, metavar="N", help="Number of ranks.")]
Processes = Annotated[int | None, Option(min=1, metavar="N", help=HELP["processes"].format(2), show_default=False)]
Backend = Annotated[str | None, Option(metavar="NAME", help=HELP["backend"], show_default=False)]
Caps = Annotated[str | None, Option(metavar="MB,...", help=HELP["caps"], show_default=PREDICT_CAPS)]
Orders = Annotated[str | None, Option(metavar="ORDER,...", help=HELP["orders"], show_default="ready")]
Hooks = Annotated[str, Option(metavar="HOOK,...", help=HELP["hooks"])]
Changes = Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help=HELP["set"])]
FabricFiles = Annotated[list[Path] | None, Option(metavar="PATH", help=HELP["fabric"], show_default=str(FABRIC))]
Measured = Annotated[str | None, Option(metavar="N:TIME,...", help=HELP["measured"])]

OPTIONS = {"bucket_cap_mb": "--caps", "order": "--orders", "hook": "--hooks"}
"""Fields of `Policy` that accept several values, each with its option."""


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Begin the messages of errors in the value of an option with the name of the option."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def read_caps(text: str) -> list[float | None]:
    """Parse bucket caps in MB, with or without the unit; `single` becomes infinite, and `default` None."""
    caps: list[float | None] = []
    for word in text.split(","):
        if word.strip() == "default":
            caps.append(None)
            continue
        number, cap = word.strip().lower().removesuffix("mb").removesuffix("mib"), math.nan
        with suppress(ValueError):
            cap = math.inf if number == "single" else float(number)
        if not cap > 0:
            expected = "expected sizes in MB above 0, `single` or `default`, separated by commas, such as 1,25,single"
            raise ValueError(f"--caps: {expected}; got {word!r}")
        caps.append(cap)
    return caps


def read_orders(text: str) -> list[Order]:
    """Parse bucket orders."""
    words = _words(text)
    if unknown := [word for word in words if word not in ORDERS]:
        raise ValueError(f"--orders: expected {', '.join(ORDERS)}, separated by commas, got {unknown[0]!r}")
    return cast(list[Order], words)


def read_hooks(text: str) -> list[CommHook]:
    """Parse comm hooks."""
    with naming("--hooks"):
        return list(map(named_hook, _words(text)))


def read_world_sizes(option: str, texts: Sequence[str]) -> list[int]:
    """Parse numbers of ranks or nodes; those of an option that is given several times are collected."""
    words = [word for text in texts for word in _words(text)]
    if wrong := [word for word in words if not (word.isdecimal() and 0 < int(word) <= MILLION)]:
        raise ValueError(f"{option}: expected numbers from 1 to a million, separated by commas, got {wrong[0]!r}")
    return list(map(int, words))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def read_stragglers(words: Sequence[str] | None) -> list[Straggler]:
    """Parse stragglers."""
    stragglers = []
    for word in words or ():
        rank, _, factor = word.partition(":")
        with naming(f"--straggler: expected RANK:FACTOR, such as 3:1.5, got {word!r}"):
            stragglers.append(Straggler(rank=None if rank == "random" else int(rank), factor=float(factor)))
    return stragglers


UNITS_NS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
HOURS = {"s": 1 / 3600, "min": 1 / 60, "h": 1.0, "d": 24.0}


def read_hours(option: str, text: str) -> float:
    """Read a time with its unit as hours; raises ValueError if it is none."""
    found = re.fullmatch(r"(\d*\.?\d+) ?(s|min|h|d)", text.strip())
    if found is None:
        raise ValueError(f"--{option}: expected a time with its unit, such as 24h, 3d or 90min, got {text!r}")
    return float(found[1]) * HOURS[found[2]]


def read_measured(text: str | None) -> dict[int, int] | None:
    """Parse measured iteration times, in nanoseconds by number of ranks."""
    if text is None:
        return None
    measured: dict[int, int] = {}
    for word in _words(text):
        found = re.fullmatch(r"0*([1-9]\d*):(\d+(?:\.\d+)?)(ns|us|ms|s)", word)
        if found is None or not (time_ns := round(float(found[2]) * UNITS_NS[found[3]])):
            meant = f"; did you mean {word}ms?" if re.fullmatch(r"[1-9]\d*:\d+(\.\d+)?", word) else ""
            expected = "expected ranks and a time above 0, such as 4:1020.5ms,8:1.04s"
            raise ValueError(f"--measured: {expected}; got {word!r}{meant}")
        if int(found[1]) in measured:
            raise ValueError(f"--measured: expected one time for each number of ranks, got two for {found[1]}")
        measured[int(found[1])] = time_ns
    return measured


class _Asked(NamedTuple):
    """The records that the words of `--set` change: settings of the reducer, of the fabric and of the variation."""

    policy: Policy
    variation: Variation
    fabric_words: tuple[str, ...]

    def fabric(self, paths: Sequence[Path]) -> Fabric:
        """Merge fabrics from files or the catalogue, and change the result."""
        return self.changed(Fabric.merged(*map(load_fabric, paths)))

    def changed(self, fabric: Fabric) -> Fabric:
        return _changed(fabric, self.fabric_words)


def read_settings(words: Sequence[str] | None, *, refused: Mapping[str, str] = OPTIONS) -> _Asked:
    """Parse the words of `--set`, each NAME=VALUE; `refused` names are errors, each with what to use in its place."""
    by_record: dict[type, list[str]] = {record: [] for record in RECORDS}
    for word in words or ():
        name, equals, _ = word.partition("=")
        record = next((one for one in RECORDS if name in one.model_fields), None)
        if record is None or not equals:
            names = ", ".join(name for one in RECORDS for name in one.model_fields if name not in refused)
            raise ValueError(f"--set: expected NAME=VALUE, NAME being one of {names}, got {word!r}")
        if earlier := next((one for one in by_record[record] if one.startswith(f"{name}=")), None):
            raise ValueError(f"--set: expected one value of {name}, got {earlier!r} and {word!r}")
        if name in refused:
            raise ValueError(f"--set: expected {refused[name]} for {name}, got {word!r}")
        by_record[record].append(word)
    policy, variation = _changed(Policy(), by_record[Policy]), _changed(Variation(), by_record[Variation])
    return _Asked(policy=policy, variation=variation, fabric_words=tuple(by_record[Fabric]))


def combined(base: Policy, caps: str | None, orders: str | None, hooks: str) -> list[Policy]:
    """Return the settings of each combination of cap, order and hook; all others are those of `base`.

    The cap `default` is None. If another setting determines buckets or caps, a value of the option is an error.
    """
    for axis, text in (("bucket_cap_mb", caps), ("order", orders)):
        field = base.overruled.get(axis)
        if field is not None and text is not None:
            expected = f"expected no value with --set {field}=..., which determines it"
            raise ValueError(f"{OPTIONS[axis]}: {expected}, got {text!r}")
    caps_mb, of_orders = [base.bucket_cap_mb], [base.order]
    if "bucket_cap_mb" not in base.overruled:
        caps_mb = read_caps(PREDICT_CAPS if caps is None else caps)
    if "order" not in base.overruled:
        of_orders = read_orders("ready" if orders is None else orders)
    axes = product(caps_mb, of_orders, read_hooks(hooks))
    return [base.model_copy(update=dict(zip(OPTIONS, values, strict=True))) for values in axes]


def values_of_axes(policy: Policy) -> dict[str, Any]:
    """Return cap, order and hook for JSON; a field that overrides the axis stands in place of the value."""
    cells, cap_mb = cells_of_axes(policy), policy.overruled.get("bucket_cap_mb", policy.bucket_cap_mb)
    words = {"single": None, "default": "default"}  # JSON has no infinity
    return {"cap_mb": words.get(cells.pop("cap"), cap_mb), **cells}


def cells_of_axes(policy: Policy) -> dict[str, str]:
    """Return cap, order and hook for a table, as `values_of_axes`."""
    cap = "default" if policy.bucket_cap_mb is None else cap_name(policy.bucket_cap_mb)
    cells = {"bucket_cap_mb": cap, "order": policy.order, "hook": policy.hook.name} | policy.overruled
    return {"cap": cells.pop("bucket_cap_mb"), **cells}


def _changed(record: R, words: Sequence[str]) -> R:
    """Return a copy of `record` with each NAME=VALUE set; a value is parsed as JSON, or else kept as text.

    Numbers in a text field stay text, such as version 2.20. Defaults are computed again, because a default may depend
    on other fields. The copy is validated as JSON, so that lists are accepted for tuples.
    """
    if not words:
        return record
    settings = record.model_dump(mode="json", exclude_unset=True)
    for word in words:
        name, _, value = word.partition("=")
        with naming(f"--set: {name}"):
            try:
                parsed = parse_json(value)
            except json.JSONDecodeError:
                parsed = value
        is_text = type(record).model_fields[name].annotation is str and not isinstance(parsed, str)
        settings[name] = value if is_text else parsed
    with naming("--set"), one_line_errors():
        return type(record).model_validate_json(json.dumps(settings))


FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
"""Bits per second of each unit, by its first letter."""


def bits_per_s(text: str) -> float:
    """Parse a rate such as `1gbit`, `500mbit`, `100GbE` or `2.5Gbit/s`.

    Raises ValueError if the text is not a rate, has no unit, or the rate is not above 0.
    """
    pattern = r"(\d*\.?\d+)\s*(?:([kmg])(?:b|be|b/s)?|([kmg]?)(?:bits?/s|bits?|bps))"
    is_of_bytes = re.search(r"[kKmMgG]B(?!E)", text)
    match = None if is_of_bytes else re.fullmatch(pattern, text.strip().lower())
    rate = float(match[1]) * FACTORS[match[2] or match[3]] if match else 0.0
    if rate <= 0:
        meant = f"; did you mean {text.strip()}gbit?" if re.fullmatch(r"(?=.*[1-9])\d*\.?\d+", text.strip()) else ""
        raise ValueError(
            f"link rate: expected one above 0 with its unit, such as 1gbit or 500mbit, got {text!r}{meant}"
        )
    return rate


def refuse(given: Mapping[str, object], reason: str) -> None:
    """Raise an error for the first of these options that is given: its value here is true."""
    for option, value in given.items():
        if value:
            raise ValueError(f"{option}: {reason}")


def check_outputs(*paths: Path | None, inputs: Iterable[Path | None] = (), folder: Path | None = None) -> None:
    """Check that these files can be written, before anything is computed; None: no file.

    If one of them is the standard output, the rest of the command prints to the standard error instead. None of the
    `inputs`, which the command reads, may be an output, or lie in the `folder` that it fills with a report and data.
    """
    outputs = [path for path in (*paths, folder and folder / "report.json") if path is not None]
    for path in outputs:
        check_writable(path)
    read = [path for path in inputs if path is not None]
    check_distinct(outputs, [*read, *(Path(ranks_and_log(path)[1]) for path in read)])
    for path in read:
        if folder is not None and path.suffix != ".py" and path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path}: expected inputs outside of {folder}, which the command fills; change --out")
    if STANDARD_OUTPUT in map(open_descriptor, outputs):
        sys.stdout = PrintableStream(sys.stderr)  # `main` restores it


def files_of(name: str) -> list[Path]:
    """Return the file of a model or class, if it lies in the working directory; see `check_outputs`."""
    module = module_name(name.partition(":")[0]).replace(".", "/")
    return [path for path in (Path(f"{module}.py"), Path(f"{module}/__init__.py")) if path.is_file()]


def element_type(parameters: Sequence[Parameter]) -> str:
    """Return the element type of most bytes of the parameters."""
    sizes = Counter[str]()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.size_bytes
    return sizes.most_common(1)[0][0]


def operations_of(model: str, autocast: str | None = None) -> Operations:
    """Return the operations of a model: from the file of the built-in ones, or else counted, which loads torch."""
    known = built_in_operations(model, autocast)
    if known is not None:
        return known
    what = f"counting the operations and the memory of {model}"
    with progress(what) as on_progress:
        if ":" in model:  # other names are mistakes
            on_progress(what, 0, 1)  # before torch is loaded, which takes seconds
        from ..memory_counter import measure_memory
        from ..operation_counter import measure_operations

        operations = measure_operations(model, autocast=autocast)
        return operations.model_copy(update={"memory": measure_memory(model, autocast=autocast)})


def with_samples(operations: Operations, batch: int | None) -> Operations:
    """Return the operations with this batch; None: as they are."""
    if batch is None:
        return operations
    if operations.batch is None:
        raise ValueError(
            f"--batch: expected a model with a known batch, {operations.model} has none; let its callable take "
            "`batch`, as in `def build(batch=64):`"
        )
    return operations.with_batch(batch / operations.batch)
