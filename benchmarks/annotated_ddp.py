"""The Annotated DDP in headless Chromium: redraws while one drags, and the import of a large profile.

Prints for several scenes how many redraws the browser makes in a second, and how long the script of a redraw takes,
which includes the prediction. "limited" is the browser's usual 60 frames a second; without that limit, the rate
includes all of the browser's own work, such as layout and painting. Then follow the seconds from a dropped profile to
its picture, and the time from question to answer in the notebook widget's kernel. Never fails.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from figures.annotated_ddp import page as annotated
from figures.interactive_timeline.simulate_choices import Question
from figures.interactive_timeline.widget import InteractiveTimeline

UNLIMITED = ("--disable-frame-rate-limit", "--disable-gpu-vsync")
PROFILE = annotated.ROOT / "validation" / "profiler" / "a100x8_recommendation_rank3.json.gz"
SCENES = {
    "naive, network slider": ("#scene=naive&gpus=256", 0),
    "rebuilt, 5 buckets": ("#scene=rebuilt", 0),
    "rebuilt, 35 buckets": ("#scene=rebuilt", 30),
    "rebuilt, BERT-Large": ("#scene=rebuilt&model=BERT-Large&cap=10&straggler=1.5", 0),
}
DRAG = """({ splits, seconds }) => new Promise(async (done) => {
  const live = document.querySelector(".live");
  const frame = () => new Promise(requestAnimationFrame);
  const split = [...live.querySelectorAll("button")].find((one) => one.textContent === "Split");
  for (let count = 0; count < splits; count++) { split.click(); await frame(); await frame(); }
  const sliders = [...live.querySelectorAll(".boundary")];
  const movable = sliders.filter((one) => Number(one.ariaValueMin) < Number(one.ariaValueMax));
  const boundary = movable[movable.length >> 1];
  const network = live.querySelector(".controls input");
  const times = [];
  live.addEventListener("redraw", ({ detail }) => times.push(detail.ms));
  const begin = performance.now();
  for (let count = 0; performance.now() < begin + 1000 * seconds; count++) {
    const now = await frame();
    if (boundary) {
      const key = count % 2 ? "ArrowUp" : "ArrowDown";  // another layout in every frame
      boundary.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    } else {
      network.value = count % 13;
      network.dispatchEvent(new Event("input", { bubbles: true }));
    }
  }
  done({ times, took_s: (performance.now() - begin) / 1000 });
})"""


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=4, help="how long each drag takes")
    options.add_argument("--megabytes", type=float, default=20, help="size of the dropped profile")
    given = options.parse_args()
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("no chromium; run `apt-get install chromium`")
    print(__doc__)
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print("scene                  frames     redraws/s  script of a redraw, ms: mean  median   p95")
    with sync_playwright() as playwright:
        for limit, flags in (("limited", ()), ("unlimited", UNLIMITED)):
            arguments = [*flags, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
            browser = playwright.chromium.launch(executable_path=path, args=arguments)
            for name, (address, splits) in SCENES.items():
                print(f"{name:22} {limit:10} {drag(browser, address, splits, given.seconds)}")
            if not flags:
                imported = import_s(browser, given.megabytes)
            browser.close()
    print(imported)
    median, p95 = kernel_ms()
    print(f"the kernel's answer, ms: median {median:.1f}, p95 {p95:.1f}")


def drag(browser: Browser, address: str, splits: int, seconds: float) -> str:
    """Move a boundary, or in a scene without any the network slider, in every frame; return a row of the table."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(annotated.PATH.as_uri() + address)
    page.wait_for_timeout(500)
    seen = page.evaluate(DRAG, {"splits": splits, "seconds": seconds})
    page.close()
    times = seen["times"]
    median, p95 = _median_p95(times)
    return f"{len(times) / seen['took_s']:9.1f} {statistics.fmean(times):29.2f} {median:7.2f} {p95:5.2f}"


def import_s(browser: Browser, megabytes: float) -> str:
    """Open a profile of this size, which repeats the steps of a committed one; return a line about it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        path.write_text(repeated(json.loads(gzip.decompress(PROFILE.read_bytes())), 1e6 * megabytes))
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(annotated.PATH.as_uri())
        page.wait_for_selector(".boundary, .picture svg text")
        begin = time.perf_counter()
        page.get_by_label("Open a profile").set_input_files(path)
        page.wait_for_function("document.querySelector('dialog').open")
        took_s = time.perf_counter() - begin
        page.close()
        return (
            f"import of {path.stat().st_size / 1e6:.1f} MB of a profile: {took_s:.2f} s from the file to the picture"
        )


def repeated(profile: dict[str, list[dict[str, object]]], least_bytes: float) -> str:
    """Repeat the events of a profile, one after the other in time, until the JSON has this many bytes."""
    events = [one for one in profile["traceEvents"] if one.get("ph") == "X"]
    times = int(least_bytes / len(json.dumps(events))) + 1
    length_us = max(float(one["ts"]) + float(one.get("dur", 0)) for one in events) + 1000
    most = max(int(one.get("args", {}).get("correlation", 0)) for one in events) + 1
    every = []
    for turn in range(times):
        for one in events:
            copy = {**one, "ts": float(one["ts"]) + turn * length_us, "args": {**one.get("args", {})}}
            if copy["args"].get("correlation"):
                copy["args"]["correlation"] += turn * most
            every.append(copy)
    return json.dumps({**profile, "traceEvents": every})


def kernel_ms(count: int = 200) -> tuple[float, float]:
    """Return median and 95th percentile of the milliseconds from question to answer in the kernel."""
    trace = annotated.models()["ResNet-50"]
    widget = InteractiveTimeline(trace, lambda gbit_per_s: annotated.fabric(trace, gbit_per_s))
    sequence = [index for bucket in widget.plan for index in bucket]
    times = []
    for number in range(count):
        place = 20 + number % 120
        question = Question((tuple(sequence[:place]), tuple(sequence[place:])), 16, 25, 1.0 + (number % 2) * 0.3)
        begin = time.perf_counter()
        widget._handle_custom_msg({"id": "", "question": question._asdict()}, [])
        times.append(1000 * (time.perf_counter() - begin))
    return _median_p95(times)


def _median_p95(times: Sequence[float]) -> tuple[float, float]:
    return statistics.median(times), statistics.quantiles(times, n=20)[-1]


if __name__ == "__main__":
    main()
