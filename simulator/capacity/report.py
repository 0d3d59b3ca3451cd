"""Report: a plan as one page, with four pictures, the numbers behind them, and what was assumed.

The page is made from `CapacityPlan.to_json` alone. Each number and name in its tables has the attribute `data-json`,
the place in that document as a JSON Pointer (RFC 6901); an interval has `data-low` and `data-high`. The page has no
script and makes no network requests.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from .. import plot_colours
from . import report_pictures as pictures
from .judgement import COVERAGE, band, carried, knee_sentence
from .scaling import Knee

UNITS = {"_ns": 1e6, "_bytes": 1e9, "efficiency": 0.01, "width": 0.01, "/ratio": 0.01}
"""Units of tables (ms, GB, %) by a part of the name of a field."""
PARTS = {
    "forward": "forward",
    "optimizer": "forward",
    "backward": "computation",
    "copies": "copies",
    "rebuild": "copies",
    "hook": "compression",
    "launch": "ink",
    "slowdown": "hidden",
    "exposed_comm": "exposed",
}
"""Colours of the parts of an iteration; other parts are `quiet`."""
SECTIONS = {
    "What one change alone must reach (-: no value suffices)": {
        "GPUs": "at",
        "efficiency to reach, %": "target_efficiency",
        "links, times as fast": "needed_rate_multiple",
        "their bus bandwidth, GB/s": "needed_bus_gb_per_s",
        "bus bandwidth now, GB/s": "bus_gb_per_s",
        "latencies, times as long": "needed_latency_multiple",
        "batch per GPU, times as large": "needed_batch_multiple",
        "iterations per synchronisation": "needed_accumulation",
    },
    "What to measure next": {
        "half of the interval over the median, %": "width",
        "the same after iterations on two numbers of GPUs, %": "width_with_sizes",
        "the smaller one": "measure_world_sizes/0",
        "the larger one": "measure_world_sizes/1",
        "the same after all-reduces of the largest message, %": "width_with_messages",
    },
    "Memory per GPU": {
        "does it fit": "fits",
        **{f"in use at the {name}, GB": f"memory_used_bytes/{end}" for end, name in enumerate(("least", "most"))},
        "of, GB": "memory_capacity_bytes",
        "largest batch that certainly fits": "largest_batch",
        **{f"{name}, GB": f"memory_bytes/{name}" for name in ("parameters", "buffers", "gradients", "buckets")},
        "states of the optimiser, GB": "memory_bytes/optimizer",
        "activations, GB": "memory_bytes/activations",
        "optimiser": "optimizer",
    },
}
"""Tables below the pictures: what a row contains, and its place in the plan of a system."""
CHANGES = {"setting": "name", "ms": "iteration_ns", "% of now": "ratio", "tie": "is_tie"}
SOURCES = {**{name: name for name in ("model", "device", "fabric")}, "samples per GPU": "batch"}
PRICES = {"system": "system", "per GPU and hour": "per_gpu_hour"} | {
    name: name for name in ("currency", "source", "date")
}
KNEE = ("knee", "knee_earliest", "knee_latest")


def report_page(document: Mapping[str, Any]) -> str:
    """Return the page of a plan as HTML.

    Args:
        document: The plan, as `CapacityPlan.to_json` returns it.
    """
    page = _Page(document)
    models = ", ".join(dict.fromkeys(one["model"] for one in document["systems"]))
    last = page.costs() if document["prices"] and document["question"]["samples"] else page.widths()
    return Template((Path(__file__).parent / "report.html").read_text()).substitute(
        title=escape(f"How many GPUs for {models}?"),
        colours="; ".join(f"--{name}: {getattr(plot_colours, name.upper())}" for name in pictures.COLOURS),
        verdict=escape(
            "; ".join([*filter(None, (one["contradiction"] for one in document["systems"])), document["verdict"]])
        ),
        question=page.question(),
        figures="\n".join([page.throughput(), page.efficiency(), page.iteration(), last]),
        sections="\n".join(page.sections()),
        json=quote(json.dumps(document)),
    )


class _Page:
    """The parts of the page of a plan, as HTML."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.sizes: Sequence[Mapping[str, Any]] = document["sizes"]
        self.systems: Sequence[Mapping[str, Any]] = document["systems"]

    # Numbers and tables

    def value(self, pointer: str) -> Any:
        """Return the value at a JSON Pointer, or None if there is none."""
        found: Any = self.document
        for key in pointer.split("/")[1:]:
            known = {str(at): one for at, one in enumerate(found)} if isinstance(found, list) else found
            found = known.get(key)
        return found

    def cell(self, pointer: str) -> str:
        """Return a value with its place, and with its interval if it has one; "-" if there is none."""
        value, low, high = (self.value(pointer + end) for end in ("", "_low", "_high"))
        unit = next((unit for part, unit in UNITS.items() if part in pointer), 1)
        if value in (None, ""):
            return "-"
        place = escape(pointer)
        if low is None:
            return f'<span data-json="{place}">{escape(_words(value, unit))}</span>'
        value, low, high = value / unit, low / unit, high / unit
        return (
            f'<span data-json="{place}">{carried(value, low, high)}</span> '
            f'<small data-low="{place}_low" data-high="{place}_high">{band(low, high)}</small>'
        )

    def sizes_table(self, columns: Mapping[str, str]) -> str:
        """Return a table with a row for each system and number of GPUs; columns without a value are left out."""
        fields = {"system": "system", "GPUs": "world_size", **columns}
        count = range(len(self.sizes))
        cells = {name: [self.cell(f"/sizes/{row}/{field}") for row in count] for name, field in fields.items()}
        shown = {name: column for name, column in cells.items() if set(column) != {"-"}}
        return _table(shown, zip(*shown.values(), strict=True))

    def systems_table(self, rows: Mapping[str, str]) -> str:
        """Return a table with a column for each system."""
        count = range(len(self.systems))
        cells = (
            [escape(name), *(self.cell(f"/systems/{at}/{field}") for at in count)] for name, field in rows.items()
        )
        return _table(["", *(self.cell(f"/systems/{at}/system") for at in count)], cells)

    def list_table(self, place: str, columns: Mapping[str, str]) -> str:
        """Return a table with a row for each element of the list at a place, or nothing if it is empty."""
        count = range(len(self.value(place)))
        rows = [[self.cell(f"{place}/{row}/{field}") for field in columns.values()] for row in count]
        return _table(columns, rows) if rows else ""

    # Pictures

    def throughput(self) -> str:
        """Return throughput by number of GPUs, and the knee."""
        knees = [
            f"{one['system']}: {knee_sentence(Knee(*(one[key] for key in KNEE)), self.sizes[-1]['world_size'])}."
            for one in self.systems
        ]
        return _figure(
            "Throughput",
            pictures.legend(self.systems)
            + pictures.svg(pictures.draw_throughput, self.document, "Throughput by number of GPUs"),
            f"{COVERAGE}. Dashed: an efficiency of 100 %. Shaded: where the knee may lie. {' '.join(knees)}",
            self.sizes_table(
                {
                    "samples/s": "samples_per_s",
                    "with one total batch": "strong_samples_per_s",
                    "hours": "hours",
                    "in time": "answer_deadline",
                }
            ),
        )

    def efficiency(self) -> str:
        """Return efficiency by number of GPUs, and the target."""
        columns = {
            "efficiency, %": "efficiency",
            "iteration, ms": "iteration_ns",
            "efficient": "answer_efficiency",
        }
        return _figure(
            "Efficiency",
            pictures.legend(self.systems)
            + pictures.svg(pictures.draw_efficiency, self.document, "Efficiency by number of GPUs"),
            "The part of the GPUs' time that is training.",
            self.sizes_table(columns),
        )

    def iteration(self) -> str:
        """Return what an iteration consists of, and what limits it."""
        parts, limits = (self.systems[0][field] for field in ("breakdown_ns", "saved_ns"))
        bars = {
            f"{one['system']}, {one['at']:,} GPUs, limit: {one['limit']}": one["breakdown_ns"] for one in self.systems
        }
        return _figure(
            "What an iteration consists of",
            pictures.stacked_bars(bars, {name: PARTS.get(name, "quiet") for name in parts}),
            "The slowest rank's iteration. The limit is that without which an iteration would be shortest. Times "
            "overlap, so without two of them an iteration is not shorter by their sum.",
            self.systems_table(
                {f"{name.replace('_', ' ')}, ms": f"breakdown_ns/{name}" for name in parts}
                | {f"shorter without {name}, ms": f"saved_ns/{name}" for name in limits}
            ),
        )

    def widths(self) -> str:
        """Return what makes the interval wide."""
        shares = [one["shares_of_width"] for one in self.systems]
        causes = sorted(
            {name for one in shares for name in one},
            key=lambda name: (-max(one.get(name, 0.0) for one in shares), name),
        )
        colours = dict.fromkeys(causes, "quiet") | dict(zip(causes, pictures.LINES, strict=False))
        bars = {f"{one['system']}, {one['at']:,} GPUs": one["shares_of_width"] for one in self.systems}
        return _figure(
            "What makes the range wide",
            pictures.stacked_bars(bars, colours),
            " ".join(f"{one['system']}: {one['sensitivity']}." for one in self.systems),
            self.systems_table({f"{name}, %": f"shares_of_width/{name}" for name in causes}),
        )

    def costs(self) -> str:
        """Return time against cost, with the choices than which no other is both faster and cheaper."""
        columns = {
            "hours": "hours",
            self.document["currency"]: "cost",
            "in time": "answer_deadline",
            "in budget": "answer_budget",
            "unbeaten": "on_front",
        }
        priced = {**self.document, "sizes": [row for row in self.sizes if row["cost"] is not None]}
        return _figure(
            "Time against cost",
            pictures.legend(self.systems) + pictures.svg(pictures.draw_costs, priced, "Cost by duration"),
            "Labels: GPUs of the unbeaten choices, than which no other is both faster and cheaper."
            + " Systems without a price are left out." * (len(priced["sizes"]) < len(self.sizes)),
            self.sizes_table(columns),
        )

    # Text

    def question(self) -> str:
        """Return what was asked, as a sentence."""
        units = {
            "samples": "samples",
            "deadline_hours": "hours at most",
            "budget": f"{self.document['currency']} at most",
            "efficiency": "% efficiency at least",
        }
        asked = {unit: self.cell(f"/question/{name}") for name, unit in units.items()}
        words = ", ".join(f"{amount} {unit}" for unit, amount in asked.items() if amount != "-")
        return f"Asked: {words}." if words else ""

    def sections(self) -> list[str]:
        """Return what follows the pictures."""
        origins = {f"origin: {name.replace('_', ' ')}": f"origins/{name}" for name in self.systems[0]["origins"]}
        changes, assumed = "", ""
        for at, one in enumerate(self.systems):
            name = self.cell(f"/systems/{at}/system")
            changes += f"<h3>{name}</h3>" + self.list_table(f"/systems/{at}/changes", CHANGES)
            assumed += "".join(
                f"<li>{name}: {self.cell(f'/systems/{at}/assumed/{number}')}</li>"
                for number in range(len(one["assumed"]))
            )
        tables = {heading: self.systems_table(rows) for heading, rows in SECTIONS.items()} | {
            "An iteration with other settings (tie: errors of the costs may explain the difference)": changes,
            "Assumptions and their sources": self.systems_table(SOURCES | origins) + f"<ul>{assumed}</ul>",
            "Prices": self.list_table("/prices", PRICES),
        }
        return [f"<section><h2>{heading}</h2>{table}</section>" for heading, table in tables.items() if table]


def _words(value: Any, unit: float) -> str:
    """Return a value in words: whole numbers in full, others with three digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    value = value if unit == 1 else value / unit
    return f"{value:,.15g}" if value == int(value) else carried(value, value, value)


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML; the first cell of a row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "\n".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _figure(heading: str, picture: str, caption: str, table: str) -> str:
    """Return a figure; picture and table are HTML, the caption is text."""
    return (
        f"<figure><h2>{heading}</h2>\n{picture}\n<figcaption>{escape(caption)}</figcaption>\n"
        f"<details><summary>Numbers</summary>{table}</details></figure>"
    )
