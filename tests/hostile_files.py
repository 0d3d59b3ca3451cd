"""Small files that would take a machine, or end in a traceback; as a program, reads them with limits."""

import base64
import gzip
import json
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIZE = 100_000
"""Bytes of a file, roughly, before a bomb is unpacked."""
MOST_S, MOST_BYTES = 5.0, 500 * 2**20
"""Of the processor and of memory, for a file."""
RECORD = {
    "name": "AllReduce", "ranks": 8, "size": 1024, "type": "float", "redop": "sum", "inPlace": 0, "time": 10.0,
    "algBw": 0.1, "busBw": 0.18, "wrong": "0",
}  # fmt: skip
PRICES = "system,per_gpu_hour,currency,source,date\n"


def times(unit: str, size: int = SIZE) -> str:
    return unit * (size // len(unit))


def documents() -> Iterator[str]:
    """JSON that no reader takes."""
    yield from ("", "{", "[", "null", "1e999", "NaN", '"x"', times("["), times('{"a":'), times("[{") + "}")
    yield "9" * SIZE
    yield '{"schema_version": ' + "9" * SIZE + "}"
    yield "{" + ",".join(f'"{number}":0' for number in range(SIZE // 10)) + "}"
    yield "{" + ",".join(f'"{number}":0' for number in range(500)) + ',"1":0}'
    for field in ("ranks", "layouts", "all_reduce", "schedules", "traceEvents", "results"):
        for unit in ("{},", "[],", "0,", '{"x":0},'):
            yield f'{{"schema_version":1,"{field}":[{times(unit)}0]}}'
        yield from (f'{{"{field}":{value}}}' for value in ("5", '"x"', "[5]", "{}", "null", "[[]]", "1e999"))


def records() -> Iterator[str]:
    """Results of nccl-tests and rccl-tests in which something is wrong."""
    wrong: tuple[Any, ...] = (
        [],
        {},
        None,
        "x",
        -1,
        1e999,
        float("nan"),
        10**30,
        "inf",
        True,
        "1 2",
        "\n# Rank 0 Pid 0",
    )
    for name in RECORD:
        yield from (json.dumps([RECORD | {name: value}]) for value in wrong)
        yield json.dumps([{key: value for key, value in RECORD.items() if key != name}])
    yield json.dumps([RECORD | {"ranks": 100_000 + number % 2} for number in range(300)])
    for devices in (5, [5], [[]], [{}], [{"rank": "x"}], [{"rank": 10**30}], "x", {}, [None]):
        yield json.dumps({"config": {"devices": devices}, "results": [{"out_of_place": {}}]})
    yield '{"busBw":0,"results":[' + times("{},") + "{}]}"
    yield json.dumps({"config": 5, "results": [5]})
    header = ", ".join(RECORD)
    yield from (f"numCycle, {header}\n0, {row}\n" for row in ('"', "\r", ",,,", 'x"y', times(","), times('"\n')))
    yield "numCycle, " + times("x,") + "\n" + times("1,")


def lines() -> Iterator[str]:
    """Logs whose lines a pattern might read more than once."""
    units = (
        "Pid ",
        "Rank ",
        "# ",
        "#",
        "1 ",
        "1",
        "...",
        ". ",
        "\u2026",
        "1 1 float ",
        "Rank 0 Pid ",
        "device Pid ",
        " ",
    )
    for unit in units:
        for end in ("", "x", " device"):
            yield f"# Rank 0 Pid 0\n{times(unit)}{end}"
        yield times(f"{unit}\n")
    yield times("\n", 100 * SIZE)
    yield times("Rank Pid \n")


def mappings() -> Iterator[str]:
    """YAML that no reader takes."""
    yield from (
        times(unit)
        for unit in ("[", "{a: ", "- ", "? ", "a: b\n", "'", '"', "&a ", "!!x ", "*", "a:\n ", "[a,", "|\n")
    )
    yield "".join(f"{number}: 0\n" for number in range(SIZE // 9))
    yield "".join(f"[{number}]: 0\n" for number in range(SIZE // 9))
    yield "levels:\n" + "".join(f"  l{number}: {{}}\n" for number in range(SIZE // 9))
    yield "must-pass: [" + times("x,") + "]"
    yield "levels: {a: {members: " + "9" * SIZE + "}}"
    inner = "".join(
        f"  l{n}: {{of: l{n - 1}, members: 1000000, latency_us: 1, gb_per_s: 1}}\n" for n in range(1, 900)
    )
    yield "levels:\n  l0: {members: 8, latency_us: 1, gb_per_s: 1}\n" + inner
    yield from ("source: !a%0Addplab:forged x", '"a\\nb": 1\n"a\\nb": 2')


def tables() -> Iterator[str]:
    """Lists of prices, and results of rccl-tests, that are wrong."""
    for first in (PRICES.strip(), "numCycle"):
        yield f"{first}{times(',x', SIZE // 2)}\n{times('x' + chr(10), SIZE // 2)}"
    rows = (
        '"',
        'x"y,1,USD,s,2026-11-28',
        "a,inf,USD,s,2026-11-28",
        "a,nan,USD,s,2026-11-28",
        "a,1e999,USD,s,d",
        ",,,,",
    )
    yield from (PRICES + row for row in (*rows, times(","), times('"'), "x" * SIZE, times("a,1,USD,s,2026-11-28\n")))
    yield from (
        "",
        '"',
        times(","),
        times("a,"),
        '"' + times("\n"),
        "\x00",
        PRICES.replace(",", "\r"),
        PRICES + "\r\r",
    )
    yield (
        PRICES + "".join(f"a{number},1,USD,s,2026-11-28\n" for number in range(SIZE // 25)) + "a0,1,USD,s,2026-11-28"
    )


def corpus() -> Iterator[tuple[str, bytes]]:
    """Names with the ending of each kind, and contents."""
    kinds: dict[str, Callable[[], Iterator[str]]] = {
        "json": documents, "nccl.json": records, "log": lines, "yaml": mappings, "csv": tables,
    }  # fmt: skip
    for ending, texts in kinds.items():
        for number, text in enumerate(texts()):
            yield f"{number}.{ending}", text.encode()
    noise = base64.b64encode(random.Random(0).randbytes(SIZE)).decode()  # so that it is packed no better than allowed
    starts = "[", '{"traceEvents":[', '{"schema_version":1,"ranks":[', '{"schema_version":1,"layouts":[[['
    for number, unit in enumerate(("{},", "[],", "0,", '{"x":0},', "\n", "1 ", "a: 1\n", '{"ph":"X"},', "0.1,")):
        for start, ending in ((starts[number % 4], "json"), ("", ("log", "yaml", "csv")[number % 3])):
            text = f'{start}{times(unit, 45 * SIZE)}"{noise}"'
            yield f"packed{number}-{len(start)}.{ending}", gzip.compress(text.encode(), 1)
    yield "bomb.json", gzip.compress(b"[" + b"{}," * 2**25, 1)


def read_all(folder: Path) -> None:
    """Read each file with all that reads files of its ending; print what is not an error in one line, in time."""
    from .test_readers import READERS

    def too_long(*_: object) -> None:
        raise TimeoutError(f"{MOST_S} s")

    signal.signal(signal.SIGPROF, too_long)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES,) * 2)
    for path in sorted(folder.iterdir()):
        for ending, read in {(ending, read) for ending, read, _ in READERS.values()}:
            if path.name.endswith(ending):
                signal.setitimer(signal.ITIMER_PROF, MOST_S)
                try:
                    read(path)
                except ValueError as error:
                    if "\n" in str(error) or str(path) not in str(error):
                        print(f"{path.name}, {read.__qualname__}: {error}")
                except Exception as error:  # noqa: BLE001 - which the command would show as a traceback
                    print(f"{path.name}, {read.__qualname__}: {type(error).__name__}: {error}")
                signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    read_all(Path(sys.argv[1]))
