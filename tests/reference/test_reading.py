"""Reading files: unambiguous YAML, and gzipped files that are read whole or refused."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.files import reading
from ddplab.reference.files.reading import parse_yaml, read_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2: a occurs twice"),
        ("a: {4: 1, +4: 2}", "line 1: 4 occurs twice"),
        ("a: &x 1\nb: *x", "line 2: expected no alias, got \\*x"),
        ("!!bool x", "line 1: expected no tag"),
        ("[" * 600 + "]" * 600, "it is nested too deeply"),
        ("a: 1\n" * 300_000, "expected at most 65536 characters of YAML"),
    ],
)
def test_yaml_that_could_mean_two_things_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)


def test_yaml_is_that_of_1_2():
    found = parse_yaml("a: 010\nb: 1:30\nc: yes\nd: 1e9\ne: 2020-01-01\nf: <<\ng: 7\nh: true\ni: ~")
    assert list(found.values()) == ["010", "1:30", "yes", 1e9, "2020-01-01", "<<", 7, True, None]


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=3), st.integers(0, 200))
def test_a_gzipped_file_is_read_whole_or_refused(tmp_path_factory, parts, cut):
    path = tmp_path_factory.getbasetemp() / "file.gz"
    packed = b"".join(map(gzip.compress, parts))
    path.write_bytes(packed)
    assert read_bytes(path) == b"".join(parts).removeprefix(b"\xef\xbb\xbf")
    path.write_bytes(packed[: len(gzip.compress(parts[0])) - 1][: 20 + cut])
    with pytest.raises(ValueError, match=r"file.gz: truncated or corrupt"):
        read_bytes(path)


def test_a_file_that_is_too_large_after_decompression_is_refused(tmp_path, monkeypatch):
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(2**21)))
    with pytest.raises(ValueError, match=r"bomb.gz: expected at most 50 bytes of content for each of gzip, got more"):
        read_bytes(tmp_path / "bomb.gz")
    monkeypatch.setattr(reading, "LARGEST_RATIO", 2000)
    with pytest.raises(ValueError, match=r"bomb.gz: expected at most 1 MiB of content, got more"):
        read_bytes(tmp_path / "bomb.gz", 2**20)
