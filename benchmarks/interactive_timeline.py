"""Redraws of the interactive timeline while one drags a boundary over ResNet-50's 161 gradients.

Prints for several numbers of buckets how many redraws headless Chromium makes in a second, and how long the script of
a redraw takes. "limited" is the browser's usual 60 frames a second; without that limit, the rate includes all of the
browser's own work, such as layout and painting. In the page the browser also computes each answer; with a kernel,
answers come 30 ms after their questions, one at a time. "processor" is the processor time of all processes of the
browser for one redraw, which depends less on what else the machine does. The last line is the time from question to
answer in the kernel. Never fails.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Sequence

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from figures import interactive_timeline
from simulator.interactive_timeline.simulate_choices import Question
from simulator.interactive_timeline.widget import InteractiveTimeline

UNLIMITED = ("--disable-frame-rate-limit", "--disable-gpu-vsync")
SETUP = """async ({ splits, delay_ms }) => {
  const text = document.querySelector("script[type=module]").textContent;
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  const el = document.getElementById("timeline");
  el.replaceChildren();
  document.getElementById("timeline").id = "unused";  // where the module would render the page's own widget
  const unused = document.createElement("div");
  unused.id = "timeline";
  const module = await import((document.body.append(unused), unused.hidden = true, url));
  const data = JSON.parse(document.getElementById("data").textContent);
  const model = module.modelWithoutKernel(data);
  const send = model.send;
  if (delay_ms) model.send = (message) => setTimeout(() => send(message), delay_ms);
  module.render({ model, el });
  window.el = el;
  const frame = () => new Promise(requestAnimationFrame);
  for (let count = 0; count < 60; count++) await frame();
  const split = [...el.querySelectorAll("button")].find((one) => one.textContent.startsWith("Split"));
  for (let count = 0; count < splits; count++) { split.click(); await frame(); await frame(); }
  const sliders = [...el.querySelectorAll(".boundary")];
  const movable = sliders.filter((one) => Number(one.ariaValueMin) < Number(one.ariaValueMax));
  return { boundary: sliders.indexOf(movable[movable.length >> 1]), buckets: sliders.length + 1 };
}"""
DRAG = """({ boundary, seconds }) => new Promise((done) => {
  const picture = el.querySelector(".picture");
  const middle = (slider) => slider.getBoundingClientRect().top + 12;
  const sliders = [...el.querySelectorAll(".boundary")];
  const top = boundary + 1 < sliders.length ? middle(sliders[boundary + 1]) : picture.getBoundingClientRect().top;
  const bottom = boundary ? middle(sliders[boundary - 1]) : middle(sliders[boundary]) + 100;
  const times = [];
  const frames = [];
  el.addEventListener("redraw", ({ detail }) => times.push(detail.ms));
  const begin = performance.now();
  const step = (now) => {
    frames.push(now);
    if (now > begin + 1000 * seconds) return done({ times, frames });
    const clientY = frames.length % 2 ? top : bottom;  // another layout in every frame
    picture.dispatchEvent(new PointerEvent("pointermove", { pointerId: 1, clientY, bubbles: true }));
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=4, help="how long each drag takes")
    seconds = options.parse_args().seconds
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("no chromium; run `apt-get install chromium`")
    print(__doc__)
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print("answers     frames     buckets  frames/s  redraws/s  script of a redraw, ms: median   p95  processor, ms")
    with sync_playwright() as playwright:
        for limit, flags in (("limited", ()), ("unlimited", UNLIMITED)):
            arguments = [*flags, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
            browser = playwright.chromium.launch(executable_path=path, args=arguments)
            for answers, delay_ms in (("page", 0), ("kernel", 30)):
                for splits in (0, 30, 120):
                    print(f"{answers:11} {limit:10} {measure(browser, splits, delay_ms, seconds)}")
            browser.close()
    median, p95 = kernel_ms()
    print(f"the kernel's answer, ms: median {median:.1f}, p95 {p95:.1f}")


def measure(browser: Browser, splits: int, delay_ms: int, seconds: float) -> str:
    """Drag the boundary that has most room; return a row of the table."""
    page = browser.new_page(viewport={"width": 1100, "height": 1000})
    page.goto(interactive_timeline.PATH.as_uri())
    layout = page.evaluate(SETUP, {"splits": splits, "delay_ms": delay_ms})
    press(page, layout["boundary"])
    before_s = processor_s()
    seen = page.evaluate(DRAG, {"boundary": layout["boundary"], "seconds": seconds})
    used_s = processor_s() - before_s
    page.mouse.up()
    page.close()
    took_s = (seen["frames"][-1] - seen["frames"][0]) / 1000
    median, p95 = _median_p95(seen["times"])
    return (
        f"{layout['buckets']:7} {len(seen['frames']) / took_s:9.1f} {len(seen['times']) / took_s:10.1f} "
        f"{median:32.2f} {p95:5.2f} {1000 * used_s / len(seen['times']):14.1f}"
    )


def processor_s() -> float:
    """Return the processor time that all processes of the browser have used, in seconds."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def press(page: Page, boundary: int) -> None:
    """Press the mouse on a boundary."""
    box = page.locator(".boundary").nth(boundary).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 200, box["y"] + 12)
    page.mouse.down()


def kernel_ms(count: int = 200) -> tuple[float, float]:
    """Return median and 95th percentile of the milliseconds from question to answer in the kernel."""
    widget = InteractiveTimeline(interactive_timeline.iteration().trace, interactive_timeline.fabric)
    first = interactive_timeline.iteration().first_question
    sequence = [index for bucket in first.plan for index in bucket]
    times = []
    for number in range(count):
        place = 20 + number % 120
        question = Question((tuple(sequence[:place]), tuple(sequence[place:])), 16, 25, 1.0 + (number % 2) * 0.3)
        begin = time.perf_counter()
        widget._handle_custom_msg({"id": "", "purpose": "now", "question": question._asdict()}, [])
        times.append(1000 * (time.perf_counter() - begin))
    return _median_p95(times)


def _median_p95(times: Sequence[float]) -> tuple[float, float]:
    return statistics.median(times), statistics.quantiles(times, n=20)[-1]


if __name__ == "__main__":
    main()
