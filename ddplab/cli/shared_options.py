"""Options that several subcommands share, and the parsing of their values; errors name the option."""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from matplotlib.figure import Figure

from reference.bucketing import ORDERS, Order, cap_name
from reference.files.reading import Schema, one_line_errors, parse_json
from reference.files.writing import STANDARD_OUTPUT, check_distinct, check_writable, open_descriptor, write_atomically
from simulator.fabric import Fabric, Processor
from simulator.schedule.hook_messages import CommHook, named_hook
from simulator.schedule.policy import Policy
from simulator.workload.compute_times import Straggler, Variation

from ..emulation.scale_model import ORIGINAL, ScaleModel
from .terminal_output import PrintableStream

if TYPE_CHECKING:
    from reference.virtual_links import Uplinks

R = TypeVar("R", bound=Schema)

FABRIC_FILE = "A fabric file of `calibrate`, a topology file (.yaml, .yml), or a log of nccl-tests (.log, .txt)"

MODELS = (
    "resnet50, resnet18, mlp, transformer, small-tensors, resnet50-224, bert-large, gpt2, emulated:TRACE (sleeps for "
    "the times of a trace), or MODULE:CALLABLE of your own."
)
FABRIC = Path("out/fabric.json")
PREDICT_CAPS = "0.5,1,5,25,single"
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace of `record`, `synthesize` or `rescale`.")]
FabricFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help=f"{FABRIC_FILE}; may be repeated. Files are merged as by `ddplab fabric`.",
        show_default=str(FABRIC),
    ),
]
Inputs = Annotated[
    str | None, typer.Option(metavar="N,...", help="Number of batches of each rank; the ranks then train under Join.")
]
PerfettoFile = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Write the timeline of the fastest configuration as a Chrome trace, for ui.perfetto.dev."
    ),
]
TimelinePicture = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Plot the timeline of the fastest configuration to this file (.png, .svg, .pdf)."
    ),
]
Model = Annotated[str, typer.Option(metavar="MODEL", help=MODELS)]
ChosenModel = Annotated[str | None, typer.Option(metavar="MODEL", help=MODELS, show_default="resnet50")]
WorldSize = Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")]
Processes = Annotated[
    int, typer.Option(min=1, max=256, metavar="N", help="Number of ranks, each a process of this machine.")
]
Dilation = Annotated[
    float,
    typer.Option(
        metavar="K",
        help="Emulated devices on a wall clock: run K times slower, links included. Reported times are divided by K.",
    ),
]
ByteScale = Annotated[
    float,
    typer.Option(
        metavar="S", help="Emulated devices on a wall clock: multiply tensors, bucket caps and link rates by S."
    ),
]
Repeat = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Turns of each configuration; a turn measures 3 iterations.",
        show_default="10, or 3 with --emulate",
    ),
]
Caps = Annotated[str, typer.Option(metavar="MB,...", help="Bucket caps in MB; `single` is one bucket in total.")]
Orders = Annotated[str, typer.Option(metavar="ORDER,...", help=f"Bucket orders: {', '.join(ORDERS)}.")]
Hooks = Annotated[
    str,
    typer.Option(metavar="HOOK,...", help="Comm hooks: none, fp16, bf16, quantize_per_tensor, power_sgd:RANK, ..."),
]
TraceOut = Annotated[Path, typer.Option(metavar="PATH", help="Where to write the trace; .gz compresses it.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME=VALUE",
        help="Another setting of the reducer; may be repeated: "
        + ", ".join(name for name in Policy.model_fields if name not in ("bucket_cap_mb", "order", "hook", "plan"))
        + ".",
    ),
]
FabricSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--fabric-set",
        metavar="NAME=VALUE",
        help="Change a field of the fabric; may be repeated: extrapolate=true, slow_link=2, library=gloo, "
        "algorithm=tree, scale=0.5, ...",
    ),
]
ProcessorFile = Annotated[
    Path | None,
    typer.Option(
        "--processor",
        metavar="PATH",
        help="Take the costs of copies, launches, hooks and slow-downs from this fabric file, or count them as free "
        "with `none`. Topology files and logs have none; traces of GPUs then get the usual costs of the GPU.",
    ),
]
VariationSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--variation",
        metavar="NAME=VALUE",
        help="How iterations vary; may be repeated: kind=recorded|resampled|correlated|fitted, iterations=, seed=, "
        "correlation=, device_spread=.",
    ),
]
Stragglers = Annotated[
    list[str] | None,
    typer.Option(
        "--straggler",
        metavar="RANK:FACTOR",
        help="A rank that computes FACTOR times as long; may be repeated. random:FACTOR chooses a rank in each "
        "iteration.",
    ),
]
LinkRate = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Connect the ranks by virtual links of this rate, such as 1gbit, instead of the loopback interface; "
        "requires Linux and root.",
    ),
]
UplinksText = Annotated[
    str | None,
    typer.Option(
        "--uplinks",
        metavar="K:RATE",
        help="With --link-rate: nodes of K ranks, each connected to the others by an uplink of this rate.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="PATH", help="Also write the result as JSON, for programs; `-` is the standard output."
    ),
]

OPTIONS = {"bucket_cap_mb": "--caps", "order": "--orders", "hook": "--hooks"}
"""Fields of `Policy` that accept several values, each with its option."""


def read_caps(text: str) -> list[float]:
    """Parse bucket caps in MB, with or without the unit; `single` becomes infinite."""
    caps = []
    for word in text.split(","):
        number = word.strip().lower().removesuffix("mb").removesuffix("mib")
        try:
            cap = math.inf if number == "single" else float(number)
        except ValueError:
            cap = math.nan
        if not cap > 0:
            raise ValueError(
                "--caps: expected sizes in MB above 0 or `single`, separated by commas, such as 1,25,single; "
                f"got {word!r}"
            )
        caps.append(cap)
    return caps


def read_orders(text: str) -> list[Order]:
    """Parse bucket orders."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in ORDERS]:
        raise ValueError(f"--orders: expected {', '.join(ORDERS)}, separated by commas, got {unknown[0]!r}")
    return [order for word in words for order in ORDERS if order == word]


def read_hooks(text: str) -> list[CommHook]:
    """Parse comm hooks."""
    try:
        return [named_hook(word.strip()) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--hooks: {error}") from None


def read_counts(option: str, text: str, *, least: int = 1) -> list[int]:
    """Parse whole numbers of at least `least`."""
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not (word.isdecimal() and int(word) >= least)]:
        raise ValueError(f"{option}: expected numbers of at least {least}, separated by commas, got {wrong[0]!r}")
    return [int(word) for word in words]


def read_stragglers(words: Sequence[str] | None) -> list[Straggler]:
    """Parse stragglers."""
    stragglers = []
    for word in words or ():
        rank, _, factor = word.partition(":")
        try:
            slow = None if rank == "random" else int(rank)
            stragglers.append(Straggler(rank=slow, factor=float(factor)))
        except ValueError as error:
            raise ValueError(f"--straggler: expected RANK:FACTOR, such as 3:1.5, got {word!r}: {error}") from None
    return stragglers


def read_policy(words: Sequence[str] | None) -> Policy:
    """Return the default policy with these settings.

    Raises:
        ValueError: A setting is malformed, or has its own option, which would override it.
    """
    for word in words or ():
        if (name := word.partition("=")[0]) in OPTIONS:
            raise ValueError(f"--policy: expected {OPTIONS[name]} for {name}, got {word!r}")
    return _changed(Policy(), "--policy", words)


def read_variation(words: Sequence[str] | None) -> Variation:
    """Return the default variation with these settings."""
    return _changed(Variation(), "--variation", words)


def read_fabric(paths: Sequence[Path], words: Sequence[str] | None, processor: Path | None) -> Fabric:
    """Merge fabric files and apply these settings; take the processor costs from `processor` if it is given."""
    fabric = _changed(Fabric.merged(*map(Fabric.load, paths)), "--fabric-set", words)
    return fabric if processor is None else fabric.model_copy(update={"processor": _processor_of(processor)})


def read_links(
    link_rate: str | None, uplinks: str | None, scale: ScaleModel = ORIGINAL
) -> "tuple[float | None, Uplinks | None]":
    """Parse the rates of links and uplinks in a scale model, in bits per second; None stays None.

    Raises:
        ValueError: An option is malformed, or there are uplinks without --link-rate.
    """
    from reference.virtual_links import Uplinks, bits_per_s

    if uplinks is not None and link_rate is None:
        raise ValueError(f"--uplinks: expected --link-rate with it, the rate inside a node, got only {uplinks!r}")
    option = "--link-rate"
    try:
        rate = None if link_rate is None else scale.rate(bits_per_s(link_rate))
        if uplinks is None:
            return rate, None
        ranks, _, uplink_rate = uplinks.partition(":")
        option = "--uplinks"
        if not (ranks.isdecimal() and int(ranks) > 0):
            raise ValueError(f"expected K:RATE, such as 4:1gbit, got {uplinks!r}")
        return rate, Uplinks(int(ranks), scale.rate(bits_per_s(uplink_rate)))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def read_scale(dilation: float, byte_scale: float) -> ScaleModel:
    """Make a scale model from its factors."""
    try:
        return ScaleModel(dilation=dilation, byte_scale=byte_scale)
    except ValueError as error:
        raise ValueError(f"--{str(error).replace('_', '-')}") from None


def refuse(given: Mapping[str, object], reason: str) -> None:
    """Raise an error for the first of these options that is given: its value here is true."""
    for option in (option for option, value in given.items() if value):
        raise ValueError(f"{option}: {reason}")


def check_outputs(*paths: Path | None, inputs: Iterable[Path | None] = (), folder: Path | None = None) -> None:
    """Check that these files can be written, before anything is computed; None: no file.

    If one of them is the standard output, the rest of the command prints to the standard error instead.

    Args:
        paths: The outputs.
        inputs: The files that the command reads.
        folder: A folder to which the command writes a report and other data.

    Raises:
        OSError: A file cannot be written.
        ValueError: An output would overwrite an input or another output, or an input lies in `folder`.
    """
    outputs = [*(path for path in paths if path is not None), *([] if folder is None else [folder / "report.json"])]
    for path in outputs:
        check_writable(path)
    read = [path for path in inputs if path is not None]
    check_distinct(outputs, read)
    for path in read:
        if folder is not None and path.suffix != ".py" and path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path}: expected inputs outside of {folder}, which the command fills; change --out")
    if STANDARD_OUTPUT in map(open_descriptor, outputs):
        sys.stdout = PrintableStream(sys.stderr)  # `main` restores it


def files_of(name: str) -> list[Path]:
    """Return the files from which a model or class is loaded; print the file of a MODULE:NAME."""
    if name.startswith("emulated:"):
        return [Path(name.removeprefix("emulated:"))]
    first, *rest = name.partition(":")[0].split(".")
    here = os.getcwd()
    sys.path.insert(0, here)  # as `import_first_here` does
    try:
        found = find_spec(first) if ":" in name else None
        for depth, _ in enumerate(rest, start=1):  # without importing the packages
            if found is None or found.submodule_search_locations is None:
                break
            found = PathFinder.find_spec(".".join([first, *rest[:depth]]), found.submodule_search_locations)
    except (ImportError, ValueError):  # whoever imports the module raises the error
        found = None
    finally:
        sys.path.remove(here)
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return []
    print(f"{name} comes from {found.origin}", file=sys.stderr)
    return [Path(found.origin)]


def _processor_of(path: Path) -> Processor:
    if str(path) == "none":
        return Processor()
    processor = Fabric.load(path).processor
    if processor == Processor():
        raise ValueError(
            f"--processor: expected a fabric file of `ddplab calibrate`, got {path}, which has no processor costs"
        )
    return processor


def _changed(record: R, option: str, words: Sequence[str] | None) -> R:
    """Return a copy of `record` with each NAME=VALUE set; a value is parsed as JSON, or else kept as text.

    Defaults are computed again, because a default may depend on other fields. The copy is validated as JSON, so that
    lists are accepted for tuples.
    """
    if not words:
        return record
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in type(record).model_fields:
            names = ", ".join(type(record).model_fields)
            raise ValueError(f"{option}: expected NAME=VALUE, NAME being one of {names}, got {word!r}")
        try:
            settings[name] = parse_json(value)
        except json.JSONDecodeError:
            settings[name] = value
        except ValueError as error:
            raise ValueError(f"{option}: {name}: {error}") from None
    document = record.model_dump(mode="json", exclude_unset=True) | settings
    try:
        with one_line_errors():
            return type(record).model_validate_json(json.dumps(document))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


CAPS = "Bucket caps in MB; `single` is one bucket in total, `default` is 25, and 1 for the first bucket."
ChosenCaps = Annotated[str | None, typer.Option("--caps", metavar="MB,...", help=CAPS, show_default=PREDICT_CAPS)]
ChosenOrders = Annotated[
    str | None,
    typer.Option("--orders", metavar="ORDER,...", help=f"Bucket orders: {', '.join(ORDERS)}.", show_default="ready"),
]


def choose_caps(text: str | None, policy: Policy, usual: str) -> list[float | None]:
    """Return the bucket caps to predict, in MB; None is DDP's default.

    If the other settings fix the buckets or caps, the result is the policy's cap alone.

    Raises:
        ValueError: The option is malformed, or was given although the policy fixes the buckets or caps.
    """
    if _is_overruled("--caps", "bucket_cap_mb", text, policy):
        return [policy.bucket_cap_mb]
    words = (usual if text is None else text).split(",")
    return [None if word.strip() == "default" else read_caps(word)[0] for word in words]


def choose_orders(text: str | None, policy: Policy) -> list[Order]:
    """Return the bucket orders to predict; see `choose_caps`."""
    if _is_overruled("--orders", "order", text, policy):
        return [policy.order]
    return read_orders("ready" if text is None else text)


def cap_word(cap_mb: float | str | None) -> str:
    """Format a cap for a table: a size in MB, `single` or `default`; text is returned unchanged."""
    if isinstance(cap_mb, str):
        return cap_mb
    return "default" if cap_mb is None or math.isnan(cap_mb) else cap_name(cap_mb)


def cap_json(cap_mb: float | str | None) -> float | str | None:
    """Convert a cap for JSON: a size in MB, null for a single bucket (JSON has no infinity), or `default`."""
    word = cap_word(cap_mb)
    return {"single": None, "default": word}.get(word, cap_mb)


def _is_overruled(option: str, axis: str, text: str | None, policy: Policy) -> bool:
    field = policy.overruled.get(axis)
    if field is not None and text is not None:
        raise ValueError(f"{option}: expected no value with --policy {field}=..., which determines it, got {text!r}")
    return field is not None


ENDINGS = (".png", ".svg", ".pdf")


def check_picture(option: str, path: Path | None) -> None:
    """Check that the name of a picture, if given, ends in one of `ENDINGS`.

    Raises:
        ValueError: The name has another ending.
    """
    if path is not None and path.suffix not in ENDINGS:
        raise ValueError(f"{option}: expected a name that ends in {', '.join(ENDINGS)}, got {path}")


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture and print its path."""
    data = BytesIO()
    figure.savefig(data, format=path.suffix.lstrip("."), dpi=120)
    write_atomically(path, data.getvalue())
    print(f"plot written to {path}")
