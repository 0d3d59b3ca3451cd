"""The picture of README: the Annotated DDP in a headless browser, from one way to the next, as a GIF.

`python -m figures.annotated_ddp.tour` needs chromium, whose version and fonts decide the pixels, so no test draws it
again.
"""

import os
import shutil
from io import BytesIO

from PIL import Image
from playwright.sync_api import sync_playwright

from ddplab.reference.files.writing import write_atomically

from ..drawing import FOLDER
from . import page

GIF = FOLDER / "annotated_ddp.gif"
VIEWS = (
    *(f"scene={scene.title.lower()}" for scene in page.SCENES),
    "scene=rebuilt&gbit=25",
    "scene=rebuilt&gbit=100",
)
"""Addresses within the page: the five ways, then a faster network."""
SHOWN = {"width": 1280, "height": 700}
WIDTH, COLOURS = 960, 256
MS = 2_200
"""How long each view stays."""


def main() -> None:
    """Write the GIF."""
    frames = []
    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        for view in VIEWS:
            shown = browser.new_page(viewport=SHOWN)  # type: ignore[arg-type]
            shown.goto(f"{page.PATH.as_uri()}#{view}")
            shown.wait_for_timeout(1000)
            image = Image.open(BytesIO(shown.screenshot())).convert("RGB")
            frames.append(
                image.resize((WIDTH, WIDTH * SHOWN["height"] // SHOWN["width"])).quantize(
                    COLOURS, dither=Image.Dither.NONE
                )
            )
            shown.close()
        browser.close()
    written = BytesIO()
    frames[0].save(written, "GIF", save_all=True, append_images=frames[1:], duration=MS, loop=0, optimize=True)
    write_atomically(GIF, written.getvalue())


if __name__ == "__main__":
    main()
