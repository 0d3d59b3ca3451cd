"""The demo: three ways to check predictions, from exact ones to those that the noise of a machine blurs.

1. In virtual time, the real reducer takes the predicted time to the nanosecond.
2. By the clock, emulated V100s sleep for recorded times, while the reducer and the network are real.
3. On the processor, a real model computes, on the cores that communication also needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from reference.bucketing import cap_name
from reference.errors import LinkError
from reference.launch import Progress, RankPool
from reference.trace import Trace
from simulator.fabric import Fabric, Level, Topology

from ..emulation.emulate import emulate
from ..emulation.time_dilation import ScaleModel
from .machine_conditions import ConditionsError
from .validate import validate
from .validate_emulated import validate_emulated
from .validation_report import (
    Configuration,
    Measurement,
    ValidationReport,
    draw_validation,
    make_row,
    policy_of,
    predict_targets,
    summarize,
)

TRACE = Path(__file__).parent / "resnet50_v100.json.gz"
"""Three iterations of ResNet-50 on one V100, batch 32, from the test data of HolisticTraceAnalysis."""
RATE = 10e9
"""Rate of the emulated network, in bits per second."""
NETWORK = Topology(levels=(Level(name="ethernet", latency_ns=20_000, bytes_per_s=RATE / 8),))
CONFIGURATIONS = (
    *(Configuration(cap) for cap in (1.0, 5.0, 25.0)),
    Configuration(25.0, "forward"),
    Configuration(float("inf")),
)
VIRTUAL_RANKS, EMULATED_RANKS, REAL_RANKS = 8, 4, 2
SCALE = ScaleModel(dilation=4, byte_scale=1 / 16)
"""With it, four emulated devices fit two cores."""
REAL_MODEL = "resnet18"
REAL_CONFIGURATIONS = (Configuration(1.0), Configuration(25.0), Configuration(float("inf")))
TURNS = 2


class Ladder(NamedTuple):
    """The reports of the demo: in virtual time, by the clock (None if the machine is too slow), on the processor.

    The model of each row describes the run.
    """

    virtual: ValidationReport
    wall: ValidationReport | None
    processor: ValidationReport


def demo(out: Path, *, on_progress: Progress) -> Ladder:
    """Predict and run all three.

    `out` gets a folder of each report, `demo.png`, and `perfetto.json`, the timeline in virtual time with the default
    cap.
    """
    on_progress(f"virtual time: emulating {VIRTUAL_RANKS} V100s", 0, 1)
    virtual = _in_virtual_time(out)
    virtual.save(out / "1-virtual")
    try:
        wall = _by_the_clock(out / "2-wall", on_progress)
    except ConditionsError as error:
        on_progress(f"by the clock: not reported: {error}", 0, 1)
        wall = None
    ladder = Ladder(virtual, wall, _on_the_processor(out / "3-processor", on_progress))
    ladder_figure(ladder).savefig(out / "demo.png", dpi=120)
    return ladder


def _in_virtual_time(out: Path) -> ValidationReport:
    trace, fabric = Trace.load(TRACE), Fabric.from_topology(NETWORK)
    title = f"virtual time: ResNet-50 on {VIRTUAL_RANKS} emulated V100s, 10 Gbit/s"
    rows = []
    targets = predict_targets(trace, fabric, CONFIGURATIONS, VIRTUAL_RANKS)
    for configuration, target in zip(CONFIGURATIONS, targets, strict=True):
        emulated = emulate(trace, fabric, world_size=VIRTUAL_RANKS, policy=policy_of(configuration), assume=False)
        rows.append(make_row(title, configuration, target, [Measurement(emulated.samples_ns)]))
        if configuration == Configuration(25.0):
            emulated.save_perfetto(out / "perfetto.json")
    return summarize(rows, "")


def _by_the_clock(out: Path, on_progress: Progress) -> ValidationReport:
    """Validate over virtual links, or over a modelled network where these are not permitted."""
    run = partial(
        validate_emulated,
        trace=Trace.load(TRACE),
        configurations=CONFIGURATIONS,
        scale=SCALE,
        out=out,
        repeat=TURNS,
        on_progress=on_progress,
    )
    try:
        with RankPool(EMULATED_RANKS, link_rate=SCALE.rate(RATE)) as pool:
            network, report = "virtual links", run(pool)
    except LinkError:
        with RankPool(EMULATED_RANKS) as pool:
            network, report = "a modelled network", run(pool, modelled=Fabric.from_topology(NETWORK, library="gloo"))
    return _titled(report, f"by the clock: ResNet-50 on {EMULATED_RANKS} emulated V100s, {network}")


def _on_the_processor(out: Path, on_progress: Progress) -> ValidationReport:
    with RankPool(REAL_RANKS, pinned=True) as pool:
        report = validate(pool, REAL_MODEL, REAL_CONFIGURATIONS, out=out, repeat=TURNS, on_progress=on_progress)
    return _titled(report, f"on the processor: ResNet-18 on {REAL_RANKS} ranks")


def _titled(report: ValidationReport, title: str) -> ValidationReport:
    return replace(report, rows=tuple(replace(row, model=title) for row in report.rows))


def ladder_table(reports: Sequence[dict[str, Any] | None]) -> list[dict[str, str]]:
    """Return one row of text for each configuration, from the JSON of the reports."""
    return [
        {
            "run": row["model"].partition(":")[0],
            "ranks": str(ranks),
            "cap": cap_name(row["cap_mb"] or float("inf")),
            "order": row["order"],
            "reducer ms": f"{row['paired_ns'] / 1e6:.1f}",
            "predicted ms": f"{row['predicted_ns'] / 1e6:.1f}",
            "error": f"{row['paired_error']:+.1%}",
            "perfect scaling": f"{row['perfect_scaling_error']:+.0%}",
            "no overlap": f"{row['no_overlap_error']:+.0%}",
        }
        for report, ranks in zip(reports, (VIRTUAL_RANKS, EMULATED_RANKS, REAL_RANKS), strict=True)
        if report is not None
        for row in report["rows"]
    ]


def ladder_sentences(reports: Sequence[dict[str, Any] | None]) -> list[str]:
    """Return a sentence about each report, from its JSON."""
    virtual, *others = reports
    assert virtual is not None
    largest_ns = max(abs(row["predicted_ns"] - row["paired_ns"]) for row in virtual["rows"])
    sentences = [f"In virtual time, the reducer differs from the prediction by at most {largest_ns} ns."]
    for report in others:
        if report is not None:
            baselines = [f"{name.replace('_', ' ')} {error:.1%}" for name, error in report["yardsticks"].items()]
            title = report["rows"][0]["model"]
            sentences.append(
                f"{title[0].upper()}{title[1:]}: mean error {report['paired_mape']:.1%} (baselines: "
                f"{', '.join(baselines)}); nine in ten repeated measurements differ by less than "
                f"{report['noise']:.1%}."
            )
    return sentences


def ladder_figure(ladder: Ladder) -> Figure:
    """Draw a figure with one panel per report, one above the other, all with the same scale of errors."""
    reports = [report for report in ladder if report is not None]
    heights = [len(report.rows) + 2 for report in reports]
    figure = Figure(figsize=(8, 1 + 0.25 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(reports), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for report, ax in zip(reports, panels, strict=True):
        draw_validation(report.to_frame(), ax, named=ax is panels[0])
    panels[-1].set_xlabel(panels[0].get_xlabel())
    panels[0].set_xlabel("")
    return figure
