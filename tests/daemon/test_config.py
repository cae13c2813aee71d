"""Settings from flags and from the config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from engramd.config import Flags, TablePath, parse_table, settings_from
from engramd.errors import EngramdError


def settings_of(tmp_path: Path, text: str, **flags: str) -> object:
    path = tmp_path / "engramd.toml"
    path.write_text(text)
    return settings_from(Flags(config=str(path), **flags))


def test_defaults() -> None:
    settings = settings_from(Flags(tables=["/data/demo"]))
    assert settings.tables == (TablePath("demo", "/data/demo"),)
    assert (settings.dram_bytes, settings.arena_bytes) == (1 << 30, 64 << 20)


@pytest.mark.parametrize(
    ("group_mib", "machine_mib", "flags", "limit_mib"),
    [
        (None, 64 << 10, {}, 4096),
        (None, 4097, {}, 1024),
        (2048, 64 << 10, {}, 512),
        (100, 64 << 10, {}, 128),  # two arenas at least
        (None, None, {}, 4096),
        (2048, 4096, {"arena_limit": "3GiB"}, 3072),  # what is said is taken
    ],
)
def test_arenas_take_a_share_of_a_small_machine(
    monkeypatch: pytest.MonkeyPatch,
    group_mib: int | None,
    machine_mib: int | None,
    flags: dict[str, str],
    limit_mib: int,
) -> None:
    monkeypatch.setattr("engramd.config.memory_limit", lambda: group_mib and (group_mib << 20, "group"))
    monkeypatch.setattr("engramd.config.machine_memory", lambda: machine_mib and (machine_mib << 20, "machine"))
    assert settings_from(Flags(tables=["/data/demo"], **flags)).arena_limit_bytes == limit_mib << 20


def test_flags_beat_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engramd.toml"
    path.write_text('dram = "2GiB"\nworkers = 3\narena = 1048576\n[[table]]\npath = "relative"\n')
    settings = settings_from(Flags(config=str(path), dram="5MiB"))
    assert (settings.dram_bytes, settings.workers, settings.arena_bytes) == (5 << 20, 3, 1 << 20)
    assert settings.tables == (TablePath("relative", str(tmp_path / "relative")),)
    settings = settings_from(Flags(config=str(path), tables=["x=/other"]))
    assert settings.tables == (TablePath("x", "/other"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('dram = "1GiB"\n\ncolour = "red"\n', ":3: colour: unknown key"),
        ('dram = "12parsecs"\n', ":1: dram: not a size: '12parsecs'"),
        ("dram = true\n", "dram: True is not a size"),
        ("dram = [1]\n", "is not a size"),
        ("workers = 65\n", "workers: 65 is not an integer from 0 to 64"),
        ("workers = true\n", "workers"),
        ('reader = "mmap"\n', "none of auto, io_uring, pread"),
        ("sessions = 0\n", "sessions: 0"),
        ('arena = "1KiB"\n', "below the minimum of 1.0 MiB"),
        ('arena = "5GiB"\narena_limit = "6GiB"\n', ":1: arena: 5GiB is above the maximum of 4.0 GiB"),
        ('arena = "2MiB"\narena_limit = "1MiB"\n[[table]]\npath="/x"\n', "arena-limit"),
        ("socket = 5\n", "socket: 5 is not a path"),
        ('tcp = "192.168.1.1:80"\n[[table]]\npath="/x"\n', "tcp 192.168.1.1:80 needs tcp_key"),
        ('tcp = "127.0.0.1"\n', "host:port"),
        ('tcp = "127.0.0.999:99"\n', "'127.0.0.999' is not a numeric address"),
        ("dram = \n", "not a TOML file"),
        ("", "no table"),
        ('table = "x"\n', ":1: table: write each table"),
        ('[[table]]\nname = "x"\n', "table 1 has no path"),
        ('[[table]]\npath = "/x"\nlayers = 1\n', ":3: layers of table 1: unknown key"),
        ('[[table]]\npath = "/a/x"\n[[table]]\npath = "/b/x"\n', "two tables are named 'x'"),
        ("[[table]]\npath = 7\n", "path of table 1: 7 is not a text"),
        ("x = " + "[" * 5000 + "\n", "not a TOML file"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(EngramdError) as caught:
        settings_of(tmp_path, text)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["", "a\nb", "n" * 128, "ü" * 64])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(EngramdError, match="table"):
        parse_table(f"{name}=/data/table")


def test_a_path_with_an_equals_sign() -> None:
    assert parse_table("/data/a=b") == TablePath("a=b", "/data/a=b")
    assert parse_table("x=/data/a=b") == TablePath("x", "/data/a=b")


def test_too_many_tables() -> None:
    with pytest.raises(EngramdError, match="257 tables"):
        settings_from(Flags(tables=[f"t{number}=/data" for number in range(257)]))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(EngramdError, match=r"nothing\.toml"):
        settings_from(Flags(config=str(tmp_path / "nothing.toml")))
