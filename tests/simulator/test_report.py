"""Report of a plan: numbers, points and names are those of the JSON document, and a browser shows them anywhere."""

import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from ddplab.simulator import Fabric
from ddplab.simulator.capacity.plan import plan
from ddplab.simulator.capacity.report import report_page
from ddplab.simulator.capacity.report_pictures import draw_costs, draw_efficiency, draw_throughput
from ddplab.simulator.capacity.scaling import Price

from ..chromium import Watched
from ..explore import examples
from ..strategies import iteration, rate_fabrics, trace_of, traces
from .test_digits import number

SIZES = st.lists(st.sampled_from([1, 2, 3, 8, 64, 1024, 16_384]), min_size=1, max_size=4, unique=True)
HOSTILE = """</title><script>alert(1)</script><img src=x onerror="alert('2')">'"&amp;$title"""
MS = 10**6


class Cells(HTMLParser):
    """Marked values as (attributes, text), the text of table cells outside of them, and all tags."""

    def __init__(self, page):
        super().__init__()
        self.marked, self.unmarked, self.tags, self.open = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append((tag, dict(attrs)))
        if {"data-json", "data-low"} & dict(attrs).keys():
            self.marked.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        while self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.open and {"data-json", "data-low"} & self.open[-1][1].keys():
            self.marked[-1][1] += data
        elif {"td", "tbody"} & {tag for tag, _ in self.open}:
            self.unmarked.append((self.open[-1][0], data.strip()))


def found(document, pointer):
    for key in pointer.split("/")[1:]:
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def unit(pointer):
    """What 1 on the page stands for: ms, GB or percent."""
    last = pointer.split("/")[-1]
    if "_ns" in pointer:
        return 1e6
    if "/memory_" in pointer:
        return 1e9
    percent = ("efficiency", "efficiency_low", "efficiency_high", "target_efficiency", "ratio")
    return 0.01 if last in percent or "width" in pointer else 1


def place(words):
    """The value of the last digit that is not 0, at least as large as that to which the number was rounded."""
    digits = words.replace(",", "").partition("e")[0]
    if not digits.strip("0."):
        return 10.0 ** -len(digits.partition(".")[2])
    decimals = len(digits.partition(".")[2])
    whole = digits.replace(".", "")
    return 10.0 ** (len(whole) - len(whole.rstrip("0")) - decimals) * 10.0 ** int(words.partition("e")[2] or 0)


def assert_is_shown(document, attributes, words):
    if "data-json" not in attributes:
        first, _, last = words.partition("-")
        low, high = (found(document, attributes[end]) / unit(attributes[end]) for end in ("data-low", "data-high"))
        last = last or first
        assert -1e-5 * place(first) <= low - number(first) <= place(first), "rounded outwards"
        assert -1e-5 * place(last) <= number(last) - high <= place(last)
        return
    value = found(document, attributes["data-json"])
    if isinstance(value, str | bool):
        assert words == {True: "yes", False: "no"}.get(value, value)
        return
    value /= unit(attributes["data-json"])
    assert abs(number(words) - value) <= (0.5 + 1e-5) * place(words)
    assert abs(number(words) - value) <= 0.5 * value, "one digit is right"


def assert_points_are_those_of_the_document(document):
    priced = {**document, "sizes": [row for row in document["sizes"] if row["cost"] is not None]}
    drawn = [
        (draw_throughput, "world_size", "samples_per_s", document),
        (draw_efficiency, "world_size", "efficiency", document),
    ]
    for draw, across, up, shown in [*drawn, (draw_costs, "hours", "cost", priced)][: 3 if document["prices"] else 2]:
        axes = Figure().add_subplot()
        draw(shown, axes)
        points = [tuple(point) for curve in axes.containers for point in curve.lines[0].get_xydata()]
        assert points == [(row[across], row[up]) for row in shown["sizes"]]


def priced(names):
    return [
        Price(system=name, per_gpu_hour=1.5 + at, currency="EUR", source=f"<{name}>", date="2026-01-01")
        for at, name in enumerate(names)
    ]


@examples(6)
@given(traces(), rate_fabrics(), SIZES, st.integers(0, 3), st.floats(0.01, 1), st.floats(1, 1e15))
def test_every_number_in_the_tables_is_in_the_json(trace, fabrics, world_sizes, count, efficiency, samples):
    named = {f"fabric {at}": fabric for at, fabric in enumerate(fabrics)}
    asked = {"samples": samples, "deadline_hours": 10.0, "prices": priced(named)[:count]} if count else {}
    asked |= {"budget": 1e6} if count >= len(named) else {}
    document = plan(trace, named, world_sizes=world_sizes, efficiency=efficiency, **asked).to_json()
    page = report_page(document)
    cells = Cells(page)
    for attributes, words in cells.marked:
        assert_is_shown(document, attributes, words)
    for tag, words in cells.unmarked:
        assert words in ("", "-") or (tag == "th" and not re.search(r"\d", words))
    shown = {attributes.get("data-json") for attributes, _ in cells.marked}
    for at in range(len(document["sizes"])):
        assert {
            f"/sizes/{at}/{name}" for name in ("world_size", "samples_per_s", "efficiency", "iteration_ns")
        } <= shown
    assert_points_are_those_of_the_document(document)
    (link,) = re.findall(r'href="data:application/json,([^"]*)"', page)
    assert json.loads(unquote(link)) == document


def two_systems(name="fast", model="small", **asked):
    """A plan of two systems, one with a knee."""
    trace = trace_of([[iteration(10 * MS, (90 * MS, 50 * MS), 90 * MS, MS)]], (80 * MS, 40 * MS))
    trace = trace.model_copy(update={"workload": trace.workload.model_copy(update={"model": model})})
    fabrics = {name: Fabric.from_alpha_beta(1000, 1e11), "slow": Fabric.from_alpha_beta(MS, 1e9)}
    return plan(trace, fabrics, world_sizes=[1, 2, 8, 64, 512], **asked).to_json()


def with_costs(name="fast", **more):
    asked = {"samples": 1e9, "deadline_hours": 100.0, "budget": 1e5}
    return two_systems(name, prices=priced([name, "slow"]), **asked, **more)


def test_names_are_text():
    unpaired = f"{HOSTILE} \ud800"  # the name of a file whose bytes are not UTF-8
    for document in (two_systems(unpaired, HOSTILE), with_costs(HOSTILE, model=HOSTILE)):
        page = report_page(document)
        cells = Cells(page)
        assert not {"script", "img"} & set(cells.tags)
        shown = {attributes["data-json"]: words for attributes, words in cells.marked if "data-json" in attributes}
        assert shown["/systems/0/system"] == document["systems"][0]["system"]
        assert shown["/systems/0/model"] == HOSTILE
        assert page.encode(errors="xmlcharrefreplace")


def test_knees_and_limits_are_drawn():
    document = with_costs()
    assert document["systems"][1]["knee"] is not None
    page = report_page(document)
    assert page.count(">knee</text>") == sum(one["knee"] is not None for one in document["systems"])
    assert page.count(">deadline</text>") == 2
    assert page.count(">budget</text>") == 1
    assert page.count("target 90%") == 1
    assert "What makes the range wide" not in page
    assert "What makes the range wide" in report_page(two_systems())


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map((byte) => byte / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const page = luminance(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll("h1, h2, p, li, th, td, small, figcaption, summary, a, text")].map((one) => {
    const style = getComputedStyle(one);
    const ink = luminance(one.tagName === "text" ? style.fill : style.color);
    return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
  });
}"""

CUT_OFF = """() => [...document.querySelectorAll("svg text")].filter((one) => {
  const [inside, whole] = [one, one.ownerSVGElement].map((part) => part.getBoundingClientRect());
  return inside.left < whole.left || inside.right > whole.right || inside.bottom > whole.bottom;
}).map((one) => one.textContent)"""


@pytest.fixture(scope="module", params=["widths", "costs"])
def document(request):
    return two_systems("n" * 200) if request.param == "widths" else with_costs(HOSTILE, model=HOSTILE)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_in_a_browser(browser, tmp_path, document, width, scheme):
    path = tmp_path / "report.html"
    path.write_bytes(report_page(document).encode(errors="xmlcharrefreplace"))
    watched = Watched(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = watched.page
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("[role=img]").count() >= 4
    assert page.evaluate("[...document.querySelectorAll('[data-json]')].every((one) => one.offsetHeight > 0)")
    assert page.evaluate(CUT_OFF) == []
    contrasts = page.evaluate(CONTRAST)
    assert len(contrasts) > 100
    assert min(contrasts) >= 4.5
    assert watched.problems == []
    assert watched.requested == [path.as_uri()]
    watched.context.close()
