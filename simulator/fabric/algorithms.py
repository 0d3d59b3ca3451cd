"""Algorithms: the cost of each collective algorithm on a hierarchy of links, by closed formulas and by NCCL's model.

`levels` is the hierarchy from the innermost level outwards, each level with its number of members in use; the product
of these numbers is the world size. A level with one member costs nothing. A link carries its full rate in both
directions at the same time. Additions cost no time because they overlap with the transfer. In the formulas S is the
size of the message, B a level's rate and m its number of members.

NCCL's own cost model, with which NCCL chooses algorithm and protocol, is restated from NVIDIA/nccl, tag v2.30.7-1,
src/graph/tuning.cc, and from the same file of earlier versions. A time is a latency of hops plus bytes over a rate.
Both depend on the algorithm (ring or tree) and on the protocol: LL and LL128 send flags with the data and have short
latencies; Simple has the full rate. NCCL takes the pair with the least time. The innermost level of links is NVLink
or PCI, inside a node; all outer levels are the network. Units of that part are NCCL's: microseconds, and bytes per
nanosecond, which are 10^9 bytes per second.

Measured times agree with the model for small and for large messages, and are longer between 16 KiB and 32 MiB, where
buckets lie (`BEYOND_THE_MODEL`): the model knows neither chunks in a pipeline nor congestion.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2, prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...reference.message_sizes import GLOO_THREADS
from .measured_tables import Sizes, Table
from .topology import Level

Pattern = Literal["ring", "tree"]
PROTOCOLS = ("LL", "LL128", "Simple")
Times = NDArray[np.float64]
Latencies = tuple[float, float, float]
"""Microseconds by protocol."""


class Version(NamedTuple):
    """Latencies of one range of versions, in microseconds by protocol."""

    base: dict[Pattern, Latencies]  #: fixed part of a collective, by algorithm
    hop: dict[str, dict[Pattern, Latencies]]  #: of one hop, by kind of link and algorithm
    lonely_ll128: float  #: part of LL128's rate that a ring reaches with one GPU per node


def _version(base_tree: float, tree_simple: tuple[float, float, float], lonely_ll128: float) -> Version:
    nvlink, pci, network = tree_simple
    return Version(
        {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, base_tree)},
        {
            "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, nvlink)},
            "pci": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, pci)},
            "network": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, network)},
        },
        lonely_ll128,
    )


VERSIONS: dict[tuple[int, int], Version] = {
    (2, 18): _version(0.0, (4.0, 6.0, 14.0), 0.7),
    (2, 19): _version(0.0, (28.0, 28.0, 28.0), 0.7),
    (2, 23): _version(8.4, (4.0, 4.0, 14.0), 1.0),
}
"""By the first version of each range; earlier versions than the first count as the first."""
LATEST = "2.30"


class Generation(NamedTuple):
    """Upper limits of rates by generation of GPUs, in 10^9 bytes per second on 1, 2 and more nodes."""

    up_to: float  #: largest rate of a GPU's NVLinks; it identifies the generation
    ll: float  #: limit of LL on one node, for the whole ring or tree
    ring_ll128: float  #: limit of one channel of a ring with LL128
    tree_ll128: tuple[float, float, float]  #: the same for a tree
    tree: tuple[float, float, float]  #: limit of one channel of a tree with any protocol
    nvls: float  #: part of the links' rate, in both directions, that reduction in the switches uses


GENERATIONS = (
    Generation(160, 39.0, 20.0, (20.0, 20.0, 20.0), (26.5, 18.5, 10.0), 0.69),  # Volta
    Generation(310, 87.7, 20.0, (20.0, 20.0, 20.0), (24.0, 23.6, 17.8), 0.69),  # Ampere
    Generation(480, 141.0, 36.7, (36.7, 36.7, 29.0), (38.7, 41.4, 36.0), 0.69),  # Hopper
    Generation(np.inf, 282.0, 40.0, (55.6, 31.67, 20.0), (70.0, 42.8, 24.0), 0.64),  # Blackwell
)
"""`nvls` is measured: 8 H200 reach 473 GB/s with it and 365 without, 8 B200 838 and 680
(stas00/ml-engineering@744d01e1); NCCL expects 0.85 and 0.74."""
LL_BETWEEN_NODES = (39.0, 20.4)
"""Limit of LL on 2 and on more nodes, with processors of Intel or Arm."""
NVLINK_FROM = 40.0
"""Slower links inside a node count as PCI."""
CHANNEL = 24.0
"""Rate of a channel from which the number of channels follows; at least `LEAST_CHANNELS`."""
LEAST_CHANNELS = 16
NET_OVERHEAD_US = 1.0
"""Work of the processor for each step on the network; three times as much with Simple."""
LATE_RING = 1.4
"""Multiple of the latency of a ring with Simple between nodes, for messages of at least 64 bytes per step."""
NVLS = "NVLS Simple"
NVLS_US, NVLS_NETWORK_US = 25.0, 18.0
"""Latencies of reduction in NVSwitches."""
NVLS_FROM = (2, 18)
"""Version from which NCCL reduces in NVSwitches also on several nodes, between which it uses trees. On two nodes each
byte passes the network once, so that its rate counts twice."""

TREE_RATES = np.array(
    [
        [1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1],
        [0.9] * 7 + [0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 1],
    ]
)
"""Part of a tree's rate that is reached, by protocol and by powers of two of the message from 64 bytes on."""


class NcclCost(NamedTuple):
    """Time of an all-reduce with one algorithm and protocol."""

    latency_ns: float  #: nanoseconds of an empty message
    ns_per_byte: float  #: nanoseconds per byte at the full rate
    rates: tuple[float, ...] = ()  #: part of the rate that is reached, as in `TREE_RATES`; empty: all of it
    late_from_bytes: float = np.inf  #: message size from which the latency is `LATE_RING` times as long

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Return the nanoseconds by size."""
        sizes = sizes_bytes.astype(np.float64)
        late = np.where(sizes >= self.late_from_bytes, LATE_RING, 1.0)
        bytes_ns = sizes * self.ns_per_byte
        if self.rates:
            place = np.log2(np.maximum(sizes, 64) / 64).astype(np.int64)
            bytes_ns = bytes_ns / np.array(self.rates)[np.minimum(place, len(self.rates) - 1)]
        return late * self.latency_ns + bytes_ns


def nccl_all_reduce(levels: Sequence[Level], version: str = LATEST) -> dict[str, NcclCost]:
    """Return the cost of an all-reduce by algorithm and protocol, such as "ring LL128", on links in use.

    Args:
        levels: Links from the innermost level outwards, with the members in use. A level's `latency_ns` is that of
            a hop of a ring with Simple; below NCCL's, the latencies of all protocols and algorithms change in
            proportion, and what a network takes longer adds to each of them.
        version: NCCL's version, such as 2.21.5.
    """
    inside, *network = levels
    gpus, nodes = inside.size, prod(level.size for level in network)
    ranks = gpus * nodes
    inside_rate = 1 / inside.ns_per_byte
    network_rate = min((1 / level.ns_per_byte for level in network if level.size > 1), default=np.inf)
    rate = min(inside_rate if gpus > 1 else np.inf, network_rate)
    constants, generation = _constants(version), next(one for one in GENERATIONS if inside_rate <= one.up_to)
    link = "nvlink" if inside_rate >= NVLINK_FROM else "pci"
    hop, between = constants.hop[link], constants.hop["network"]
    of_nodes = min(nodes, 3) - 1
    channels = max(LEAST_CHANNELS, ceil(rate / CHANNEL))
    ll_limit = generation.ll if nodes == 1 else LL_BETWEEN_NODES[of_nodes - 1]
    usual_us = between["ring"][2]
    network_us = max((level.latency_ns / 1e3 for level in network), default=usual_us)
    nearer, further_us = min(1.0, network_us / usual_us), max(0.0, network_us - usual_us)
    costs = {}
    for place, protocol in enumerate(PROTOCOLS):
        if protocol == "LL128" and link != "nvlink":
            continue
        ring, tree = hop["ring"][place], hop["tree"][place]
        inner_ring, inner_tree = (us * inside.latency_ns / 1e3 / hop["ring"][2] for us in (ring, tree))
        outer_tree = nearer * between["tree"][place] + further_us
        outer_ring = outer_tree if gpus == 1 else nearer * between["ring"][place] + further_us
        overhead = NET_OVERHEAD_US * (3 if protocol == "Simple" else 1) if nodes > 1 else 0.0

        ring_us = constants.base["ring"][place] + 2 * (nodes - 1) * outer_ring
        ring_us += 2 * (ranks - nodes) * max(inner_ring, overhead)
        ring_rate = {
            "LL": min(ll_limit, rate / 2),
            "LL128": min((0.92 if gpus > 1 else constants.lonely_ll128) * rate, channels * generation.ring_ll128),
            "Simple": rate,
        }[protocol]
        late = 64.0 * channels * ranks if protocol == "Simple" and nodes > 1 else np.inf
        costs[f"ring {protocol}"] = NcclCost(1e3 * ring_us, sent_share(ranks) / ring_rate, late_from_bytes=late)

        tree_us = constants.base["tree"][place] + 2 * ((gpus - 1) * inner_tree + int(log2(nodes)) * outer_tree)
        tree_rate = min(0.92 * rate, channels * generation.tree[of_nodes])
        tree_rate = {
            "LL": min(tree_rate / 3.8, ll_limit),
            "LL128": min(
                tree_rate * (7 / 9 if nodes == 1 else 120 / 128), channels * generation.tree_ll128[of_nodes]
            ),
            "Simple": tree_rate,
        }[protocol]
        costs[f"tree {protocol}"] = NcclCost(1e3 * tree_us, 2 / tree_rate, tuple(TREE_RATES[place].tolist()))
    if inside.reduces and gpus > 1 and _number(version) >= NVLS_FROM:
        switches = inside_rate * generation.nvls * (channels - 1) / channels * 2
        reduced = min(switches, network_rate * (2 if nodes <= 2 else 1))
        us = NVLS_US + 2 * int(log2(nodes)) * (nearer * NVLS_NETWORK_US + further_us)
        costs[NVLS] = NcclCost(1e3 * us, sent_share(ranks) / reduced)
    return costs


def nccl_broadcast(levels: Sequence[Level], version: str = LATEST) -> dict[str, NcclCost]:
    """Return the cost of a broadcast by protocol; it passes the ring once, `nccl_all_reduce` twice."""
    all_reduces, ranks = nccl_all_reduce(levels, version), prod(level.size for level in levels)
    costs = {}
    for protocol, base_us in zip(PROTOCOLS, _constants(version).base["ring"], strict=True):
        if ring := all_reduces.get(f"ring {protocol}"):
            once_ns = (ring.latency_ns + 1e3 * base_us) / 2
            costs[f"ring {protocol}"] = NcclCost(once_ns, ring.ns_per_byte / sent_share(ranks))
    return costs


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _constants(version: str) -> Version:
    return VERSIONS[max((first for first in VERSIONS if first <= _number(version)), default=min(VERSIONS))]


BEYOND_THE_MODEL = {
    False: np.array(
        [
            [4, 64, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144],
            [1.15, 1.88, 1.67, 1.38, 1.16, 1.15, 1.18, 1.10, 1.06, 1.04],
            [0.50, 0.56, 0.43, 0.32, 0.23, 0.17, 0.19, 0.13, 0.08, 0.06],
        ]
    ),
    True: np.array(
        [
            [4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288],
            [0.20, 0.37, 0.26, 0.24, 0.58, 0.45, 0.53, 0.78, 1.10, 0.97, 0.70, 0.65, 0.46, 0.53],
            [0.11, 0.22, 0.25, 0.11, 0.21, 0.24, 0.28, 0.30, 0.19, 0.16, 0.11, 0.09, 0.09, 0.07],
        ]
    ),
}
"""What published logs add to the model: message sizes in KiB, the figure, and standard deviations of the logarithm
between systems. True: pieces of a message wait for the first one, as in `extrapolation`, so that all-reduces with
long latencies wait longer. So it is on several nodes (13 systems, 2 to 16 nodes), whose figures also hold on one node
of H200 and B200, where switches reduce. The figure is the measured time minus the modelled one, divided by the root
of the modelled time times that of an empty message, a median over InfiniBand, RoCE and EFA. Over Slingshot it is 2.7
times as large on Alps and 2.3 times on GH200s elsewhere, so `Level.wait` is 2.5. Over TCPXO (A3 Mega) it grows from
0.5 to 4 times with the message, so its wait counts as not known, and so does that of switches on one node, of which
two systems were measured. False: on other nodes (8 systems) it is measured over modelled time, a geometric mean.

The rate of the largest message is given. `python -m validation.nccl_model_error` computes the figures from published
logs and names them. Deviations of sizes that fewer than four systems measured are set to 0.5.
"""

UNKNOWN_WAIT = 1.21
"""`Level.wait` where it is not known: the geometric mean over 12 systems, from 0.36 (A100s over InfiniBand) and 0.49
(MI300X over RoCE) to 3.2 (H100s over TCPXO), without two of which messages do not wait or that are out of order
(`python -m validation.nccl_model_error`)."""


def published_ns(model_ns: Times, sizes_bytes: Sizes, *, empty_ns: float, waits: NDArray[np.number]) -> Times:
    """Return the nanoseconds by size that published logs let expect where the model says `model_ns`.

    `empty_ns`: the model's time of an empty message; `waits`: by size, how many times as long as usual the pieces
    wait for the first one, 0 where they do not.
    """
    figures = _beyond_the_model(1, sizes_bytes, waits > 0)
    waiting_ns = waits * figures * np.sqrt(model_ns * empty_ns)
    return np.where(waits > 0, model_ns + waiting_ns, model_ns * figures)


def published_deviations(sizes_bytes: Sizes, waits: NDArray[np.bool_]) -> Times:
    """Return the standard deviations of the logarithm of measured times between systems, by size."""
    return _beyond_the_model(2, sizes_bytes, waits)


def _beyond_the_model(row: int, sizes_bytes: Sizes, waits: NDArray[np.bool_]) -> Times:
    """Interpolate a row of `BEYOND_THE_MODEL` over the logarithm of the size; beyond its sizes it is constant."""
    places = np.log2(np.maximum(sizes_bytes, 1))
    found = {key: np.interp(places, np.log2(1024 * table[0]), table[row]) for key, table in BEYOND_THE_MODEL.items()}
    figures: Times = np.where(waits, found[True], found[False])
    return figures


Levels = Sequence[Level]
POWERS_OF_TWO = 2 ** np.arange(41)
"""Message sizes in bytes, up to 1 TiB."""


class Cost(NamedTuple):
    """The cost of a collective by its size: `latency_ns + ns_per_byte * size`, or that of a pipeline."""

    latency_ns: float  #: of an empty message
    ns_per_byte: float
    fill: int = 0  #: steps after the first one until the first piece reaches the last rank; 0: no pipeline

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Return the nanoseconds by size; a pipeline uses the number of pieces that is best for the size.

        N pieces take `(fill + N) (a + b / N)`, where a is the latency of a step and b the time of the bytes. The best
        N is `sqrt(fill b / a)`, at least 1 (the usual trade of pipelined trees; Sanders, Speck and Träff 2009).
        """
        step_ns = self.latency_ns / (self.fill + 1)
        bytes_ns = sizes_bytes.astype(np.float64) * self.ns_per_byte
        whole = (self.fill + 1) * (step_ns + bytes_ns)
        if not self.fill:
            return whole
        waiting_ns = self.fill * step_ns
        pieces = waiting_ns + bytes_ns + 2 * np.sqrt(waiting_ns * bytes_ns)
        return np.where(self.fill * bytes_ns <= step_ns, whole, pieces)


def ring(levels: Levels) -> Cost:
    """One flat ring through all ranks: 2 (n - 1) steps that send S / n each (Patarasu and Yuan 2009).

    Every link of the ring carries the same bytes, so the slowest level sets the pace. A piece goes from the first
    rank to the last twice, once to be reduced and once to be distributed, and enters each group once on each way.
    """
    n = prod(level.size for level in levels)
    return Cost(2 * _latency_ns(_chain_hops(levels)), sent_share(n) * _slowest_ns_per_byte(levels))


def tree(levels: Levels) -> Cost:
    """Two binary trees, each for half of the message, with chains inside the innermost groups; NCCL since 2.4.

    A member that has two children in one tree is a leaf in the other (Sanders, Speck and Träff 2009). It therefore
    has at most four neighbours, fewer where a level has few members, and sends half of the message to each. The
    chains of different pieces start at different ranks, so each rank sends 2 (m - 1) / m of S. A single level has no
    inner groups and so no chains.
    """
    chain, trees = (levels[0], levels[1:]) if len(levels) > 1 else (None, levels)
    depths = [(ceil(log2(level.size)), level) for level in trees]
    loads = [min(level.size, 4) / 2 * level.ns_per_byte for level in trees if level.size > 1]
    if chain is not None:
        depths.append((chain.size - 1, chain))
        loads.append(sent_share(chain.size) * chain.ns_per_byte)
    return _pipeline(2, depths, max(loads, default=0.0))


def in_network(levels: Levels) -> Cost:
    """Reduction in the switches (SHARP, NVLS): on a level that reduces, each byte goes up once and comes down once.

    Both directions overlap, so the level takes S / B. A level that does not reduce is a ring inside its groups. The
    levels work on different pieces at the same time, so the slowest sets the pace; filling the pipeline is free.
    """
    used = [level for level in levels if level.size > 1]
    hops = [(2 if level.reduces else 2 * (level.size - 1), level) for level in used]
    loads = [(1.0 if level.reduces else sent_share(level.size)) * level.ns_per_byte for level in used]
    return Cost(_latency_ns(hops), max(loads, default=0.0))


def tree_broadcast(levels: Levels) -> Cost:
    """Gloo's broadcast, along a binomial tree (Thakur, Rabenseifner and Gropp 2005).

    In each of log2 m steps every rank that has the whole message sends it to one that does not.
    """
    depths = [(ceil(log2(level.size)), level) for level in levels]
    return Cost(_latency_ns(depths), sum(depth * level.ns_per_byte for depth, level in depths))


def ring_broadcast(levels: Levels) -> Cost:
    """NCCL's broadcast: a pipeline of pieces along a chain of all ranks."""
    return _pipeline(1, _chain_hops(levels), _slowest_ns_per_byte(levels))


def _pipeline(passes: int, hops_by_level: Sequence[tuple[int, Level]], ns_per_byte: float) -> Cost:
    """Return the cost of a pipeline whose pieces make all these hops (count, level) `passes` times."""
    steps = passes * sum(hops for hops, _ in hops_by_level)
    return Cost(passes * _latency_ns(hops_by_level), ns_per_byte, fill=max(steps - 1, 0))


def _latency_ns(hops_by_level: Iterable[tuple[int, Level]]) -> float:
    return sum(hops * level.latency_ns for hops, level in hops_by_level)


def sent_share(members: int) -> float:
    """Fraction of the message that each member must send in an all-reduce (Patarasu and Yuan 2009): 2 (n - 1) / n."""
    return 2 * (members - 1) / members


def _slowest_ns_per_byte(levels: Levels) -> float:
    """Nanoseconds per byte on the slowest link in use."""
    return max((level.ns_per_byte for level in levels if level.size > 1), default=0.0)


def _chain_hops(levels: Levels) -> list[tuple[int, Level]]:
    """Hops on each level of a chain through all ranks that visits one group after the other; n - 1 in total."""
    groups = [prod(outer.size for outer in levels[position + 1 :]) for position in range(len(levels))]
    return [((level.size - 1) * count, level) for level, count in zip(levels, groups, strict=True)]


Library = Literal["nccl", "gloo"]
Algorithm = Literal["ring", "tree", "in_network"]
AlgorithmSetting = Literal["library", Algorithm, "cheapest"]
"""An algorithm, `library`: the one that the library chooses, or `cheapest`: of ring, tree and in_network."""

ALL_REDUCE = {"ring": ring, "tree": tree, "in_network": in_network}
BROADCAST = {"nccl": ring_broadcast, "gloo": tree_broadcast}
CONCURRENCY: dict[str, int] = {"gloo": GLOO_THREADS, "nccl": 1}
"""Collectives of one process group that the backend runs at a time: Gloo has two threads, NCCL one stream."""


@dataclass(frozen=True, eq=False)
class AlgorithmCosts:
    """The cost of an all-reduce at one world size by each algorithm that may be chosen."""

    costs: Mapping[str, Cost | NcclCost]  #: by name of the algorithm
    nodes: int | None = None
    """Number of nodes of NCCL's model, to which published logs add (`BEYOND_THE_MODEL`). None: of another model."""
    wait: float = 1.0
    """How many times as long as over InfiniBand the pieces of a message wait for the first one."""

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Return the nanoseconds by size, each with the cheapest algorithm.

        NCCL chooses by its own model; published measurements then tell how much longer the chosen algorithm takes.
        """
        return self._cheapest_ns(sizes_bytes) if self.nodes is None else self._published.costs_ns(sizes_bytes)

    @cached_property
    def _published(self) -> Table:
        """Times of powers of two, between which they are interpolated. A larger message never takes less."""
        assert self.nodes is not None
        model_ns = self._cheapest_ns(POWERS_OF_TWO)
        waits = self.wait * self.waits(POWERS_OF_TWO)
        expected_ns = published_ns(model_ns, POWERS_OF_TWO, empty_ns=float(model_ns[0]), waits=waits)
        return Table(POWERS_OF_TWO, np.maximum.accumulate(expected_ns))

    def waits(self, sizes_bytes: Sizes) -> NDArray[np.bool_]:
        """Return by size whether pieces of a message wait for the first one: between nodes, and in NVSwitches."""
        chosen = np.argmin([cost.costs_ns(sizes_bytes) for cost in self.costs.values()], axis=0)
        in_switches: NDArray[np.bool_] = np.array(list(self.costs))[chosen] == NVLS
        return in_switches | ((self.nodes or 1) > 1)

    def _cheapest_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        costs_ns: NDArray[np.float64] = np.min([cost.costs_ns(sizes_bytes) for cost in self.costs.values()], axis=0)
        return costs_ns

    def cheapest(self, size_bytes: int) -> tuple[str, Cost | NcclCost]:
        """Return name and cost of the cheapest algorithm for a size; the first one if several cost the same."""
        size = np.array([size_bytes])
        return min(self.costs.items(), key=lambda item: float(item[1].costs_ns(size)[0]))


def all_reduce_costs(
    levels: Levels, library: Library, setting: AlgorithmSetting, nccl_version: str
) -> AlgorithmCosts:
    """Return the cost of an all-reduce with the given algorithm, or with each that the library may choose.

    Gloo always runs a ring when torch calls it. NCCL reduces in the network only if a level in use supports that.
    """
    reducing = [place for place, level in enumerate(levels) if level.reduces and level.size > 1]
    if setting != "library" or library == "gloo":
        several = ("ring", "tree", "in_network") if reducing else ("ring", "tree")
        names = {"library": ("ring",), "cheapest": several}.get(setting, (setting,))
        return AlgorithmCosts({name: ALL_REDUCE[name](levels) for name in names})
    costs: dict[str, Cost | NcclCost] = {**nccl_all_reduce(levels, nccl_version)}
    if any(reducing[-1:]):  # beyond the innermost level, whose switches NCCL's model knows
        costs["in_network"] = in_network(levels)
    return AlgorithmCosts(costs, _nodes(levels), _wait(levels))


def broadcast_costs(levels: Levels, library: Library, setting: AlgorithmSetting, nccl_version: str) -> AlgorithmCosts:
    """Return the cost of a broadcast; NCCL chooses the protocol if it also chooses the algorithm of an all-reduce."""
    levels = *levels[:1], *(level.one_way() for level in levels[1:])
    if library == "gloo" or setting != "library":
        return AlgorithmCosts({library: BROADCAST[library](levels)})
    return AlgorithmCosts(nccl_broadcast(levels, nccl_version), _nodes(levels), _wait(levels))


def _nodes(levels: Levels) -> int:
    return prod(level.size for level in levels[1:])


def _wait(levels: Levels) -> float:
    """Return the wait over the outermost links in use."""
    return next((level.wait for level in reversed(levels) if level.size > 1), None) or UNKNOWN_WAIT
