"""The configuration: documented option by option, explained when wrong, read again while the daemon serves."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engramd.config import Flags, Settings, default_of, settings_from
from engramd.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "configuration.md"


def test_the_document_has_every_option_as_the_code_has_it() -> None:
    rows = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `") and line.count("|") > 3:
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            rows[cells[0].strip("`")] = cells[1:]
    for option in OPTIONS:
        change = "yes" if option.at_run_time else "restart"
        expected = [default_of(option.key), option.check.allowed, change, option.meaning]
        assert rows.get(option.key) == expected, f"write this line: | `{option.key}` | {' | '.join(expected)} |"
    assert set(rows) - {option.key for option in OPTIONS} == set()


def test_help_names_every_option(engramd: Callable[..., Any]) -> None:
    text = " ".join(engramd("serve", "--help").stdout.split())
    for option in OPTIONS:
        assert f"{option.flag} {option.metavar}" in text
        assert option.meaning.split(";")[0].split(",")[0] in text


def test_the_file_that_is_installed_is_right_and_says_the_defaults(tmp_path: Path) -> None:
    """Every option stands there commented out with its default; taking the comment away changes nothing."""
    text = (ROOT / "deploy" / "engramd.toml").read_text(encoding="utf-8")
    for option in OPTIONS:
        assert re.search(rf"^#? ?{option.key} = ", text, re.MULTILINE), option.key
    path = tmp_path / "engramd.toml"
    keys = "|".join(option.key for option in OPTIONS)
    path.write_text(re.sub(rf"^# ((?:{keys}) = )", r"\1", text, flags=re.MULTILINE))
    settings = settings_from(Flags(config=str(path), tables=["/data/x"]))
    unset = {"socket", "admin_group", "tcp", "tcp_key", "tcp_clients", "metrics", "state"}
    for option in OPTIONS:
        if option.key not in unset:
            assert getattr(settings, option.attribute) == getattr(Settings, option.attribute), option.key


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('dram = "1GiB"\nlog-levle = "info"\n', ":2: log-levle: unknown key; did you mean log_level?"),
        ('Workers = 1\n[[table]]\npath="/a"\n', ":1: Workers: unknown key; did you mean workers?"),
        ('[[table]]\npath="/a"\n[[table]]\nname="x"\npaht="/b"\n', ":5: paht of table 2: unknown key; did you mean"),
        ('[[table]]\npath = "/a"\n[[table]]\npath = 3\n', ":4: path of table 2: 3 is not a text"),
        ('metrics = "0.0.0.0:9100"\n', ":1: metrics: '0.0.0.0' is not a loopback address"),
        ("uid_share = 0\n", ":1: uid_share: 0 is not an integer from 1 to 100"),
        ('log_format = "xml"\n', "none of text, json"),
    ],
)  # fmt: skip
def test_a_mistake_gets_its_line_and_a_suggestion(mistake_of: Callable[[str], str], text: str, words: str) -> None:
    assert words in mistake_of(text)


@pytest.fixture
def configured(tmp_path: Path, table: Path) -> Callable[..., Path]:
    """`configured(**values)` writes the configuration file and returns its path."""

    def write(**values: str | int) -> Path:
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        path = tmp_path / "engramd.toml"
        path.write_text("\n".join([*lines, f'[[table]]\nname = "demo"\npath = "{table}"\n']))
        return path

    return write


def serve(start_daemon: Any, path: Path, **options: Any) -> Any:
    """A daemon whose budget the file sets: the fixture's own flag would beat it."""
    return start_daemon(config=str(path), **options)


def stats(engramd: Callable[..., Any], daemon: Any) -> dict[str, Any]:
    return dict(json.loads(engramd("stats", "--socket", daemon.socket, "--json").stdout))


def test_what_can_change_does_and_the_rest_is_named(
    start_daemon: Any, engramd: Callable[..., Any], configured: Any, load: Any
) -> None:
    daemon = serve(start_daemon, configured(sessions=9, log_level="warning"), dram=None)
    before = stats(engramd, daemon)["config"]
    assert (before["sessions"], before["dram"], before["log_level"]) == (9, 1 << 30, "warning")
    work = load(daemon)
    work.run(5)
    configured(sessions=10, dram="3MiB", log_level="info", log_format="json", uid_share=50)
    done = engramd("reload", "--config", "--socket", daemon.socket)
    assert done.returncode == 1
    assert set(done.stdout.splitlines()) == {
        "dram = 3MiB", "uid_share = 50", "log_level = info", "log_format = json",
    }  # fmt: skip
    assert done.stderr == "engramd: sessions stays 9: 10 takes a restart\n"
    after = stats(engramd, daemon)
    assert after["config"] == {**before, "dram": 3 << 20, "log_level": "info", "log_format": "json", "uid_share": 50}
    assert after["dram"]["budget_bytes"] == 3 << 20
    work.run(5)
    again = engramd("reload", "--config", "--socket", daemon.socket)
    assert (again.returncode, again.stdout) == (1, "nothing has changed that can change while the daemon runs\n")


def test_a_wrong_file_changes_nothing(start_daemon: Any, engramd: Callable[..., Any], configured: Any) -> None:
    path = configured(log_level="info")
    daemon = serve(start_daemon, path)
    before = stats(engramd, daemon)["config"]
    path.write_text('dram = "9MiB"\nworkers = "many"\n')
    done = engramd("reload", "--config", "--socket", daemon.socket)
    assert done.returncode == 1
    assert "workers: 'many' is not an integer" in done.stderr
    daemon.signal(signal.SIGHUP)
    daemon.wait_for_log("the configuration stays as it is")
    assert stats(engramd, daemon)["config"] == before


def test_flags_keep_their_place_over_the_file(start_daemon: Any, engramd: Callable[..., Any], configured: Any) -> None:
    daemon = serve(start_daemon, configured(dram="5MiB"), dram="4MiB")
    configured(dram="6MiB", uid_share=10)
    daemon.signal(signal.SIGHUP)
    daemon.wait_for_log("read again: applied: uid_share = 10")
    assert stats(engramd, daemon)["config"]["dram"] == 4 << 20


def test_a_daemon_without_a_file(start_daemon: Any, engramd: Callable[..., Any]) -> None:
    daemon = start_daemon()
    done = engramd("reload", "--config", "--socket", daemon.socket)
    assert done.returncode == 1
    assert "started without --config" in done.stderr
    assert daemon.stop() == 0


def test_a_users_share(start_daemon: Any, configured: Any, engramd: Callable[..., Any]) -> None:
    """Half of four sessions for one user; more once the file says so."""
    import engram_client

    daemon = serve(start_daemon, configured(sessions=4, uid_share=50, arena="1MiB"))
    clients = [engram_client.connect(daemon.socket) for _ in range(2)]
    with pytest.raises(engram_client.Busy, match="50 % of --sessions"):
        engram_client.connect(daemon.socket)
    configured(sessions=4, uid_share=100, arena="1MiB")
    assert engramd("reload", "--config", "--socket", daemon.socket).returncode == 0
    clients.append(engram_client.connect(daemon.socket))
    for client in clients:
        client.close()
