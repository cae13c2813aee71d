"""Sizes and durations as people write and read them, and progress on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from engramd.errors import EngramdError, one_line
from engramd.progress import Progress, format_duration
from engramd.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("32GiB", 32 << 30),
        ("1.5 GiB", 3 << 29),
        ("1kib", 1024),
        ("2TB", 2 * 10**12),
        ("7B", 7),
        (" 3M ", 3 << 20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "12parsecs", "-1", "+5", "1e9", "GiB", "1.5", "0.3KiB", "１２", "1 0", "9" * 21, "9000000000TiB", "nan"],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(EngramdError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_sizes_for_people() -> None:
    assert format_size(0) == "0 B"
    assert format_size(1023) == "1023 B"
    assert format_size(195 << 30) == "195.0 GiB"
    assert format_size(5 << 50) == "5120.0 TiB"
    assert (format_duration(59.6), format_duration(3725), format_duration(-1)) == ("1:00", "1:02:05", "0:00")


def test_errors_are_one_line() -> None:
    assert one_line(EngramdError("a\nb\x1b[31mc\td é")) == "a\\nb\\x1b[31mc\\td é"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = Terminal()
    with Progress("packing", 1000 * 10**6, 500 * 10**6, stream=stream) as progress:
        clock[0] += 2
        progress.advance(100 * 10**6)
        assert stream.getvalue() == "\r\x1b[Kpacking: 60.0 % of 953.7 MiB, 50 MB/s, 0:08 left"
        clock[0] += 0.01
        progress.advance(10**6)  # too soon for another look
        assert stream.getvalue().count("packing") == 1
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_of_other_things_than_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = Terminal()
    with Progress("warming", 4_000_000, unit="rows", stream=stream) as progress:
        clock[0] += 2
        progress.advance(1_000_000)
        assert stream.getvalue() == "\r\x1b[Kwarming: 25.0 % of 4,000,000 rows, 500,000 a second, 0:06 left"


def test_progress_elsewhere_is_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    with Progress("packing", 1000, stream=stream) as progress:
        for _ in range(100):
            clock[0] += 0.25
            progress.advance(10)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("packing: 40.0 % of 1000 B, ")
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
