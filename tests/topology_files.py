"""Topology files for tests: the YAML of a topology."""

import os
from pathlib import Path

import yaml

from ddplab.simulator.fabric import Topology


def save_topology(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Write a topology file; rates are rounded to whole bytes per second."""
    levels = {}
    for level, below in zip(topology.levels, (None, *topology.levels[:-1]), strict=True):
        rates = {n: rate / 1e9 for n, rate in level.bytes_per_s_by_members.items()}
        levels[level.name] = {
            "latency_us": level.latency_ns / 1000,
            "gb_per_s": rates | {"other": level.bytes_per_s / 1e9} if rates else level.bytes_per_s / 1e9,
            **({} if below is None else {"of": below.name}),
            **({} if level.members is None else {"members": level.members}),
        }
    in_network = [level.name for level in topology.levels if level.reduces]
    written = {"source": topology.source, "levels": levels, "in_network": in_network}
    Path(path).write_text(yaml.safe_dump(written, sort_keys=False))
