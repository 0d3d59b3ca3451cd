"""What a reader of the interactive timeline does with it in a browser, and the numbers that it shows."""

from ddplab.reference.bucketing import plan_buckets
from ddplab.simulator import Fabric
from figures.annotated_ddp import page
from figures.interactive_timeline.simulate_choices import (
    EVERY_CHOICE,
    PARTS,
    InteractiveIteration,
    Question,
    Start,
)


def v100_ring(gbit_per_s: float) -> Fabric:
    """A ring, and the usual costs of copies and launches on a V100."""
    return page.fabric(page.models()["ResNet-50"].model_copy(), gbit_per_s)


SHOWN = InteractiveIteration(
    page.models()["ResNet-50"], v100_ring, title="ResNet-50", choices=EVERY_CHOICE, start=Start()
)
"""ResNet-50 on a V100, the iteration of median duration."""
COUNT = len(SHOWN.trace.sizes_bytes)


def number(page, part, row="now") -> float:
    """A number of the table, in milliseconds."""
    words = page.locator(f"tr.{row} td.{part}").inner_text()
    return float(words.replace("\N{MINUS SIGN}", "-"))


def frames(page, count=3) -> None:
    """Wait until the browser has drawn some frames."""
    page.evaluate(
        "count => new Promise(done => { const next = n => n ? requestAnimationFrame(() => next(n - 1)) : done();"
        " next(count); })",
        count,
    )


def settle(page) -> None:
    """Wait until the page has put the state into its address; its timers end in the order in which they are due."""
    page.evaluate("() => new Promise(done => setTimeout(done, 400))")


def cuts(page) -> list[int]:
    return [int(one.get_attribute("aria-valuenow")) for one in page.locator(".boundary").all()]


def predicted(places, *, order="ready", world_size=16, gbit_per_s=25, factor=1.0):
    """The prediction for boundaries at these places."""
    sequence = plan_buckets(order, SHOWN.trace.sizes_bytes, [2**62], ready_order=SHOWN.model.ready_order)[0]
    plan = [sequence[low:high] for low, high in zip([0, *places], [*places, COUNT], strict=True)]
    return SHOWN.predict(Question(tuple(map(tuple, plan)), world_size, gbit_per_s, factor))


def drag(page, boundary, by_px) -> None:
    knob = page.locator(".boundary .knob").nth(boundary).bounding_box()
    x, y = knob["x"] + knob["width"] / 2, knob["y"] + knob["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y + by_px, steps=8)
    page.mouse.up()
    frames(page)


def assert_parts_add_up(page) -> None:
    """The shown parts add up to the iteration, now and in the start layout."""
    for row in ("now", "baseline"):
        shown = [number(page, part, row) for part in PARTS if page.locator(f"tr.now td.{part}").is_visible()]
        assert round(10 * sum(shown)) == round(10 * number(page, "iteration_ns", row)), row
