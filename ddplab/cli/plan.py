"""`ddplab plan`: how many of which GPU on which network, from names, traces or files."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date
from functools import partial
from math import lcm
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated

from typer import Argument, Exit, Option

from ..reference.files.value_ranges import YEAR_NS
from ..reference.trace import Trace
from ..simulator.capacity import judgement
from ..simulator.capacity.memory import Optimizer
from ..simulator.capacity.plan import CapacityPlan, SystemPlan
from ..simulator.capacity.plan import plan as make_plan
from ..simulator.capacity.scaling import Offer, Price, Question, Scaling, read_prices
from ..simulator.catalogue import Rate, entry_of, load_fabric, read_catalogue, unknown
from ..simulator.fabric import Fabric
from ..simulator.inputs_with_default_costs import NOT_IN_RANGES
from ..simulator.workload.roofline import counted_models, data_sheets, find_device, name_of_model, with_precision
from ..simulator.workload.trace_synthesis import check_measured, synthesize_batch, with_batch
from . import shared_options as options
from .terminal_output import say, show_table, write_json

DOUBLINGS = 6
"""From one node to 64 of them."""
AROUND = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Multiples of a single number of GPUs that are predicted with it, for the knee and for measurements."""
LARGER = "-224"
"""Ending of the names of models that have the size of published training, unlike small ones of the same name."""
SPARED = ("fixed total", "iteration ms", "MFU", "efficiency")
"""Columns to leave out on a narrow terminal, the first one first."""
ANSWERS = {"deadline": "in time", "budget": "in budget", "efficiency": "efficient", "memory": "fits"}
FILE = re.compile(r"[/:]|\.(ya?ml|log|txt|csv|json)$")
"""In the name of a file, rather than of a node or a device."""
LINKS = re.compile(r"((?:\d+ ?[x*] ?)?\d+) ?g(?:b|bit|bps|bit/s)?|nvlink|nvswitch|infiniband|ib|roce|ethernet|efa")
"""What names links, with their rate in Gbit/s, rather than a node."""
HELP = {
    "model": "A model that `ddplab show` lists, MODULE:CALLABLE, or a trace (.json, .json.gz).",
    "systems": "Nodes or devices that `ddplab show` lists, such as aws-p4d or a100, which get the links of a "
    "node with them; or files as for --fabric of `predict`, with --device.",
    "world_size": "Numbers of GPUs to choose from, such as 64 or 8,64,512. Default: one node to 64 nodes.",
    "network": "Rate of a node's network in each direction, such as 100gbit, instead of the catalogue's.",
    "device": "The device on which a model computes, such as h100 or h100-bf16: required with files. Default: that "
    "of the node, in the precision of the model's parameters, with tf32 for float32.",
    "batch": "Samples per GPU and iteration. Default: those of the model or of the trace.",
    "step_ms": "Measured time of an iteration on one GPU with this batch, such as 130; of one of several systems "
    "dgx-h100:80. Without it, the time is that of published training on such GPUs, within a third for known models.",
    "samples": "Samples to train on, over all epochs, such as 1.2e9.",
    "deadline": "Longest duration of the training, such as 24h, 3d or 90min.",
    "prices": "Price of a GPU for an hour, such as 2.50, 1.80-2.40 or 2.50EUR, of one of several systems "
    "dgx-h100:2.50; or a CSV file of prices: system, per_gpu_hour, currency, source, date. Without --samples, costs "
    "are those of a million samples, or tokens.",
    "budget": "Largest cost of the training, in the currency of the prices.",
    "optimizer": "Whose states are in a GPU's memory; adam-fp32 has them, and a copy of the parameters, in float32. "
    "Default: not known, so that training fits only if it does with each.",
    "efficiency": "Least part of the GPUs' time that has to be training, such as 0.9 or 90 %.",
    "details": "Also print the knee, other settings, sources, what makes ranges wide and everything assumed.",
}


def plan(
    model: Annotated[str, Argument(metavar="MODEL", help=HELP["model"])],
    systems: Annotated[list[str], Argument(metavar="SYSTEM...", help=HELP["systems"])],
    world_size: Annotated[
        list[str] | None, Option("--world-size", "--gpus", metavar="N,...", help=HELP["world_size"])
    ] = None,
    nodes: Annotated[list[str] | None, Option(metavar="N,...", help="The same in nodes, such as 1,2,4.")] = None,
    network: Annotated[str | None, Option(metavar="RATE", help=HELP["network"])] = None,
    device: Annotated[str | None, Option(metavar="DEVICE", help=HELP["device"])] = None,
    batch: Annotated[int | None, Option(min=1, max=10**6, metavar="N", help=HELP["batch"])] = None,
    step_ms: Annotated[list[str] | None, Option(metavar="[SYSTEM:]MS", help=HELP["step_ms"])] = None,
    samples: Annotated[float | None, Option(metavar="N", help=HELP["samples"])] = None,
    deadline: Annotated[str | None, Option(metavar="TIME", help=HELP["deadline"])] = None,
    prices: Annotated[
        list[str] | None, Option("--prices", "--price", metavar="[SYSTEM:]PRICE|PATH", help=HELP["prices"])
    ] = None,
    budget: Annotated[float | None, Option(metavar="COST", help=HELP["budget"])] = None,
    efficiency: Annotated[str | None, Option(metavar="PART", help=HELP["efficiency"])] = None,
    optimizer: Annotated[Optimizer | None, Option(help=HELP["optimizer"])] = None,
    changes: options.Changes = None,
    measured: options.Measured = None,
    details: Annotated[bool, Option("--details", help=HELP["details"])] = False,  # noqa: FBT002 - an option
    json_path: options.Json = None,
) -> None:
    """Answer how many of which GPU on which network a training run needs.

    The first line is the verdict. Then one table: throughput, efficiency and iteration by system and number of GPUs.
    Then, for each system: the limit, memory, and what to measure next; with --efficiency, how far one thing alone
    would have to improve. --details has more. The exit status is 1 if the answer is "no", also because training
    does not fit into a GPU, or if the range is wider than the decision, in one line.
    """
    files = [Path(one) for one in (model, *systems, *(prices or ())) if Path(one).is_file()]
    options.check_outputs(json_path, inputs=[*files, *options.files_of(model)])
    without = samples is None
    options.refuse({"--deadline": without and deadline, "--budget": without and budget}, "expected --samples with it")
    asked = None if world_size is None else options.read_world_sizes("--world-size", world_size)
    described = {name: _read_system(name, network, device) for name in dict.fromkeys(systems)}
    settings = options.read_settings(changes, refused={})
    fabrics = {name: settings.changed(fabric) for name, (_, fabric) in described.items()}
    if nodes is not None:
        asked = sorted({*(asked or ()), *_gpus_of(options.read_world_sizes("--nodes", nodes), fabrics)})
    sizes = _sizes(asked, fabrics)
    if network is not None and asked is None:  # the question is about GPUs that use this network
        asked = [size for size in sizes if not any(judgement.inside_one_node(one, size) for one in fabrics.values())]
    steps_ms = _read_steps(step_ms, systems)
    workloads = {name: _workload(model, one, batch, steps_ms.get(name)) for name, (one, _) in described.items()}
    result = make_plan(
        {name: trace for name, (trace, _) in workloads.items()},
        fabrics,
        world_sizes=sizes,
        asked=asked,
        batch=batch,
        samples=samples,
        deadline_hours=None if deadline is None else options.read_hours("deadline", deadline),
        budget=budget,
        efficiency=None if efficiency is None else _read_efficiency(efficiency),
        prices=_prices(prices or (), systems),
        optimizer=optimizer,
        policy=settings.policy,
        variation=settings.variation,
        measured=options.read_measured(measured),
        rebatched={name: rebatched for name, (_, rebatched) in workloads.items() if rebatched is not None},
    )
    if json_path is not None:
        write_json(json_path, result.to_json())
    if result.verdict.answer == "open":
        raise ValueError(_open_sentence(result))
    _show(result, details=details, of_trace=None in [rebatched for _, rebatched in workloads.values()])
    if result.verdict.answer == "no":
        raise Exit(1)


def _read_system(name: str, network: str | None, device: str | None) -> tuple[str | None, Fabric]:
    """Find the device, if known, and the network of a node, a device or a file."""
    listed = read_catalogue()
    is_file = Path(name).exists()
    node = None if is_file else listed.node_of(name)
    found = None if is_file or listed.node_like(name) is not None else listed.device_like(name)
    if is_file or (node is None and found is None and FILE.search(name)):
        options.refuse({"--network": network}, "expected nodes or devices with it; change the rate in the file")
        return device, load_fabric(name)
    if node is None:
        if found is None:
            if match := LINKS.fullmatch(name.lower()):
                way = f"name a node, and its network with it: aws-p4d --network {match[1] or 100}gbit"
                raise ValueError(f"SYSTEM: expected a node, a device or a file, got links, {name!r}; {way}")
            raise ValueError(unknown("SYSTEM", name, [*listed.nodes, *listed.devices], others="a file or"))
        raise ValueError(f"SYSTEM: no node of the catalogue has a {found}; give a topology file and --device {found}")
    own, given = listed.nodes[node].device, device and listed.bare_device(device)
    if given and listed.devices[given].peaks != listed.devices[own].peaks:
        cure = "name a node that has it, or give the links as a file"
        raise ValueError(f"--device: expected {own}, the GPU of {name}, in any precision, got {device}; {cure}")
    rate = None
    if network is not None:
        with options.naming("--network"):
            adapters = re.fullmatch(r"(?:([1-9]\d{0,3}) ?[x*] ?)?(.*)", network.strip())
            assert adapters is not None
            rate = Rate(gbit_per_s=int(adapters[1] or 1) * options.bits_per_s(adapters[2]) / 1e9, source="")
    return device or found or own, Fabric.from_topology(listed.topology(node, network=rate))


def _prices(given: Sequence[str], systems: Sequence[str]) -> list[Price]:
    """Read the prices of the systems, from files, which may have other names of the same nodes, or as they are."""
    listed, own = read_catalogue(), list(dict.fromkeys(systems))
    names = {listed.node_of(name) or name: name for name in own}
    prices: list[Price] = []
    for word in given:
        if Path(word).is_file() or word.endswith(".csv"):
            of_file = {price: names.get(listed.node_of(price.system) or price.system) for price in read_prices(word)}
            prices += [price.model_copy(update={"system": name or price.system}) for price, name in of_file.items()]
            continue
        system, _, amount = word.rpartition(":")
        number, name = amount.rstrip(ascii_uppercase), system or own[0]
        if name not in own or (not system and len(own) > 1):
            expected = "expected a file, or the price of one of the systems, such as"
            raise ValueError(f"--price: {expected} {' --price '.join(f'{one}:2.50' for one in own)}, got {word!r}")
        with options.naming("--price"):
            about = {"currency": amount[len(number) :] or "USD", "source": "--price", "date": f"{date.today()}"}
            prices.append(Price(system=name, per_gpu_hour=number, **about))  # type: ignore[arg-type]
    if twice := [name for name, count in Counter(price.system for price in prices).items() if count > 1]:
        raise ValueError(f"--price: expected one price of a system, got several of {twice[0]}")
    return prices


def _gpus_of(nodes: Sequence[int], fabrics: Mapping[str, Fabric]) -> list[int]:
    """Return how many GPUs these numbers of nodes have, if those of all systems have equally many."""
    levels = {name: one.topology.levels if one.topology is not None else () for name, one in fabrics.items()}
    members = {name: of[0].members or 0 if len(of) > 1 else 0 for name, of in levels.items()}
    (first, *others) = set(members.values())
    if others or not first:
        found = ", ".join(f"{many or 'unknown'} in {name}" for name, many in members.items())
        raise ValueError(f"--nodes: expected systems with equally many GPUs in a node, got {found}; give --gpus")
    return [first * one for one in nodes]


def _workload(
    model: str, device: str | None, batch: int | None, step_ms: float | None
) -> tuple[Trace, Callable[[float], Trace] | None]:
    """Load a trace, or make one of a model; also return a function that makes it with a multiple of the batch."""
    if Path(model).is_file() or model.endswith((".json", ".json.gz")):
        options.refuse({"--step-ms": step_ms}, "expected a model, not a trace, with it")
        trace = _on_device(Trace.load(model), device)
        known = trace.workload.batch or batch
        trace = trace.model_copy(update={"workload": trace.workload.model_copy(update={"batch": known})})
        return (with_batch(trace, batch / known) if batch and known and batch != known else trace), None
    if device is None:
        raise ValueError("--device: expected the device on which the model computes, because a file has none")
    name = name_of_model(model)
    name = f"{name}{LARGER}" if f"{name}{LARGER}" in counted_models() else name
    operations = options.operations_of(name)
    sheet = find_device(with_precision(device, options.element_type(operations.parameters)))
    operations = operations if sheet.autocast is None else options.operations_of(name, sheet.autocast)
    operations = options.with_samples(operations, batch)
    if step_ms is not None:
        with options.naming("--step-ms"):
            check_measured(operations, sheet, {"step_ns": round(step_ms * 1e6)})
    made = partial(synthesize_batch, operations, sheet, None if step_ms is None else step_ms * 1e6)
    return made(1.0), made


def _on_device(trace: Trace, device: str | None) -> Trace:
    """Name the GPU of a trace whose own name is not in the catalogue; refuse another one than that of its name."""
    workload, listed = trace.workload, read_catalogue()
    if device is None:
        return trace
    if (bare := listed.bare_device(device)) is None:
        raise ValueError(unknown("--device", device, listed.devices))
    entry, known = listed.devices[bare], entry_of(workload.device_name)
    sheet = data_sheets().get(listed.device_like(device) or device)
    expected = entry.product if sheet is None else sheet.name  # which begins the name of a synthesised trace's device
    is_other = known is not None and (known.memory.gib, known.product) != (entry.memory.gib, entry.product)
    is_other |= known is not None and workload.device == "meta" and not workload.device_name.startswith(expected)
    if workload.device == "cpu" or is_other:
        raise ValueError(
            f"trace: expected a trace of {expected}, as the system has, got {workload.device_name.split(' by ')[0]}; "
            "convert it with `ddplab synthesize --rescale`, or name the system that has its GPUs"
        )
    if known is not None or workload.device != "cuda":
        return trace
    return trace.model_copy(update={"workload": workload.model_copy(update={"device_name": entry.product})})


def _sizes(asked: Sequence[int] | None, fabrics: Mapping[str, Fabric]) -> list[int]:
    """Return the numbers of GPUs to predict: those asked for, with others around a single one, that all systems have.

    By default, one node to 64 nodes, or the measured numbers if the fabric of a system is a table of such.
    """
    if asked is not None and len(asked) > 1:
        return list(asked)
    if asked is not None:
        sizes = [round(asked[0] * factor) for factor in AROUND if (asked[0] * factor).is_integer()]
    else:
        nodes = [one.topology.levels[0].members or 1 for one in fabrics.values() if one.topology is not None]
        sizes = [lcm(*nodes) * 2**number for number in range(DOUBLINGS + 1)]
        tables = [one.world_sizes for one in fabrics.values() if one.topology is None and not one.extrapolate]
        sizes = sorted(set.intersection(*map(set, tables))) if tables else sizes
    return [size for size in sizes if size in (asked or ()) or all(_has(one, size) for one in fabrics.values())]


def _has(fabric: Fabric, world_size: int) -> bool:
    with suppress(ValueError):
        return fabric.all_reduce_ns(2**20, world_size) >= 0
    return False


def _read_steps(words: Sequence[str] | None, systems: Sequence[str]) -> dict[str, float]:
    """Parse measured times of an iteration on one GPU, in milliseconds by system."""
    names = list(dict.fromkeys(systems))
    steps: dict[str, float] = {}
    for word in words or ():
        system, _, number = word.rpartition(":")
        name = system or names[0]
        found = re.fullmatch(r"(\d*\.?\d+)(ms|s)?", number)
        step_ms = float(found[1]) * options.UNITS_NS[found[2] or "ms"] / 1e6 if found else 0.0
        if not 0 < step_ms <= YEAR_NS / 1e6 or name not in names or (not system and len(names) > 1):
            expected = "expected milliseconds above 0, such as 130, or for one of several systems"
            meant = f"; did you mean {' --step-ms '.join(f'{one}:{number}' for one in names)}?" if step_ms else ""
            raise ValueError(f"--step-ms: {expected} {names[0]}:130, got {word!r}{meant}")
        if name in steps:
            raise ValueError(f"--step-ms: expected one time of {name}, got {steps[name]:g} and {step_ms:g} ms")
        steps[name] = step_ms
    return steps


def _read_efficiency(text: str) -> float:
    number, part = text.strip().removesuffix("%"), 0.0
    with suppress(ValueError):
        part = float(number) / (100 if number != text.strip() or float(number) > 1 else 1)
    if not 0 < part <= 1:
        raise ValueError(f"--efficiency: expected a part of the time above 0, such as 0.9 or 90%, got {text!r}")
    return part


# The screen


def _open_sentence(result: CapacityPlan) -> str:
    """Say why the answer is open, and what would decide."""
    offer, sentence = result.verdict.offer, result.verdict.sentence
    about = next(one for one in result.systems if one.name == offer.system)
    if [name for name, answer in offer.answers.items() if answer == "open"] == ["memory"]:
        return f"whether it fits is open: {sentence}"
    if found := judgement.contradiction_sentence(offer.size.prediction, about.scaling.system.inputs.fabric):
        return f"the answer is open, because {found}: {sentence}"
    doubt = about.scaling.system.inputs.trace.workload.doubt
    width = _of_system(about.sensitivity, about.name) if len(result.systems) > 1 else about.sensitivity
    return "; ".join(filter(None, (f"the range is wider than the decision: {sentence}", doubt, width)))


def _show(result: CapacityPlan, *, details: bool, of_trace: bool) -> None:
    """Print the verdict, one table, and what follows for each system."""
    say(result.verdict.sentence)
    for one in result.systems:
        if found := judgement.contradiction_sentence(one.scaling.system.at(one.at), one.scaling.system.inputs.fabric):
            say(f"{one.name}: {found}")
    several = len(result.systems) > 1
    shown = [
        (one.scaling, offer)
        for one in result.systems
        for offer in (one.offers if details else result.asked)
        if offer.system == one.name
    ]
    told = {pair[0] for _, offer in shown for pair in offer.answers.items() if pair != ("memory", "yes")}
    cost = next((judgement.cost_unit(offer) for _, offer in shown if offer.cost is not None), None)
    rows = [
        ({"system": offer.system} if several else {})
        | _row(offer, result.question, told, cost)
        | ({"fixed total": _strong(offer, scaling)} if details else {})
        for scaling, offer in shown
    ]
    title = judgement.coverage_words((scaling.system, offer.size.world_size) for scaling, offer in shown)
    show_table(rows, title, optional=SPARED)
    for one in result.systems:
        said = _sentences(one, asks_efficiency=result.question.efficiency is not None, details=details)
        step = "--measured 1:TIME" if of_trace or one.scaling.system.inputs.trace.workload.doubt else "--step-ms"
        for sentence in (*said, judgement.measure_sentence(one.limits, one.next_measurement, step)):
            say(_of_system(sentence, one.name) if several and sentence else sentence)
    front = [
        f"{one.size.world_size:,} of {one.system} ({judgement.duration(*one.hours_band)}, {judgement.cost(one)})"
        for one in result.front
        if one.hours_band is not None
    ]
    if len(front) > 1:
        say(f"fastest and cheapest by their medians, from fast to cheap: {'; '.join(front)}")


def _of_system(sentence: str, name: str) -> str:
    """Name the system of a sentence, and in options; measured iterations can only be given of one system alone."""
    alone = re.sub("--measured( 1:TIME)?", lambda found: f"{found[0]} with {name} alone", sentence)
    return f"{name}: {alone.replace('--step-ms', f'--step-ms {name}:MS')}"


def _sentences(one: SystemPlan, *, asks_efficiency: bool, details: bool) -> list[str]:
    """Return what follows for a system: what trains, the limit and memory; all else with details."""
    workload, system, batch = one.scaling.system.inputs.trace.workload, one.scaling.system, one.scaling.batch
    note = "; samples are batches, whose size is not known" if not workload.batch else ""
    device = re.sub(r"\.0+(?= ms)" if details else " by [^;]*", "", workload.device_name)  # 90 ms, not 90.000
    said = [
        f"{workload.model}, {batch} sample{'s' * (batch > 1)} per GPU, on {device}{note}",
        judgement.limit_sentence(one.limits, details=details),
    ]
    if asks_efficiency or details:
        fitting = (use.largest_batch for use in one.memory.values() if use.largest_batch is not None)
        largest = min(fitting, default=None)  # which certainly fits with each optimiser
        said.append(judgement.needs_sentence(one.limits, one.needs, one.target, batch, largest))
    first = next(iter(one.memory.values()))
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in first.parts.items() if size and size > 5e6)
    lacks = "" if first.peak_bytes is not None else " (without activations, which the trace lacks)"
    said.append(f"{judgement.memory_sentence(one.memory)}{lacks}{f'; of that {parts}' * details}")
    if details:
        said += [
            re.split(r"; all-red| \(sources", system.inputs.fabric.source)[0],
            judgement.knee_sentence(one.scaling.knee, one.scaling.world_sizes[-1]),
            _changes_sentence(one),
            _fsdp_sentence(one),
            one.sensitivity,
        ]
    return [*said, *(text for text in system.at(one.at).assumed if details or text.startswith(NOT_IN_RANGES))]


def _row(offer: Offer, question: Question, told: Set[str], cost: str | None) -> dict[str, str]:
    """Return what a table has of an offer: the answers that are `told`, and the `cost` in a column of this name."""
    size = offer.size
    unit, rates = judgement.throughput(size)
    low_ns, high_ns = size.prediction.interval_ns
    row = {
        "GPUs": f"{size.world_size:,}",
        f"{unit}/s": judgement.band(*rates),
        "efficiency": judgement.percent(*size.prediction.efficiency_interval, limit=question.efficiency),
    }
    if size.tokens is not None and size.mfu_band is not None:
        row["MFU"] = judgement.percent(*size.mfu_band)
    row["iteration ms"] = judgement.band(low_ns / 1e6, high_ns / 1e6)
    if offer.hours_band is not None:
        row["hours"] = judgement.duration(*offer.hours_band, limit=question.deadline_hours).removesuffix(" h")
    if cost is not None:
        row[cost] = judgement.cost(offer, limit=question.budget)
    return row | {ANSWERS[name]: answer for name, answer in offer.answers.items() if name in told}


def _strong(offer: Offer, scaling: Scaling) -> str:
    """Return the throughput with a fixed total batch, with the digits of that with a fixed batch per GPU."""
    size, strong = offer.size, scaling.strong_samples_per_s(offer.size.world_size)
    if strong is None:
        return "-"
    part = strong / size.samples_per_s
    return judgement.carried(strong, *(part * end for end in size.samples_per_s_band))


def _changes_sentence(one: SystemPlan) -> str:
    whole = max(1, one.scaling.system.at(one.at).iteration_ns)
    changes = (
        f"{change.name} {round(100 * (change.iteration_ns - whole) / whole):+d}%{' (a tie)' * change.is_tie}"
        for change in one.changes
    )
    return f"iteration with other settings: {', '.join(changes)}"


def _fsdp_sentence(one: SystemPlan) -> str:
    """Return lower bounds of FSDP, which gathers parameters and scatters gradients, all but a rank's own part."""
    size = next(iter(one.memory.values())).parts["parameters"] or 0
    return (
        f"FSDP (ZeRO-3), not simulated, would send at least {2 * size * (one.at - 1) / one.at / 1e9:.3g} GB a step "
        f"from each of {one.at} GPUs, 1.5 times as much if it frees parameters after forward, and hold at least "
        f"{size / one.at / 1e9:.3g} GB of parameters; docs/comparison.md names a simulator of it"
    )
