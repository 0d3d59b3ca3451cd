"""Plot colours: readers who see fewer colours still see two of them apart."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from ddplab.simulator import plot_colours

ROOT = Path(__file__).parent.parent.parent
SEEN = {
    "normal": np.eye(3),
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
"""Linear RGB as seen: Machado, Oliveira and Fernandes, 2009, table for severity 1.0."""
XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
WHITE = np.array([0.9505, 1.0, 1.0888])
COLOURS = {name: colour for name, colour in vars(plot_colours).items() if isinstance(colour, str) and name.isupper()}


def lab(colour: str, seen: object) -> np.ndarray:
    """A colour in CIELAB, in which equal distances look alike."""
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    light = np.cbrt(np.clip(np.asarray(seen) @ linear, 0, 1) @ XYZ.T / WHITE + 1e-9)
    return np.array([116 * light[1] - 16, 500 * (light[0] - light[1]), 200 * (light[1] - light[2])])


@pytest.mark.parametrize("sight", SEEN)
def test_any_two_colours_are_seen_apart(sight):
    """The least distance that a reader notices is 2.3; lines and thin bars need several times as much."""
    for (name, colour), (other, its_colour) in combinations(COLOURS.items(), 2):
        distance = np.linalg.norm(lab(colour, SEEN[sight]) - lab(its_colour, SEEN[sight]))
        assert distance > 10, (name, other)


def test_plots_take_their_colours_from_one_module():
    for folder in ("simulator", "figures", "validation", "benchmarks", "tutorials"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "plot_colours.py":
                for colour in COLOURS.values():
                    assert colour not in path.read_text(), path
    for path in (ROOT / "tutorials").glob("*.ipynb"):
        assert not [colour for colour in COLOURS.values() if colour in path.read_text()], path


def test_the_interactive_timeline_has_the_same_colours():
    """A style sheet cannot import them."""
    sheet = (ROOT / "figures" / "interactive_timeline" / "timeline.css").read_text()
    declared = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", sheet))
    assert declared.pop("on-colour") == plot_colours.INK
    assert declared == {name: COLOURS[name.upper()] for name in declared}
    assert len(declared) >= 5
