"""What deploy/ holds: checked by the tools that will read it, and the real daemon under the unit's own confinement.

No service manager runs in a test, so tools/unit_sandbox.py puts the unit's system call filter, address families, memory
protection and capabilities in place through libseccomp, as systemd would. Mount namespaces are not part of it.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engramd.metrics.exposition import METRICS

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "engramd.service"
SOCKET_UNIT = DEPLOY / "engramd.socket"
PROFILE = DEPLOY / "seccomp-engramd.json"
SANDBOX = [sys.executable, str(ROOT / "tools" / "unit_sandbox.py"), str(UNIT)]
MOST_EXPOSED = 15  # tenths: `systemd-analyze security` gives 1.5 or better

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
@pytest.mark.parametrize("unit", [UNIT, SOCKET_UNIT])
def test_the_unit_verifies_without_a_word(unit: Path) -> None:
    done = run("systemd-analyze", "verify", str(unit))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_socket_unit_makes_the_daemons_own_sockets() -> None:
    """At the paths that the service names, for the same users."""
    lines = SOCKET_UNIT.read_text().splitlines()
    (path,) = re.findall(r"--socket (\S+)", UNIT.read_text())
    assert f"ListenStream={path}" in lines
    assert f"ListenSequentialPacket={path}.ring" in lines
    assert {"SocketUser=engramd", "SocketGroup=engramd", "SocketMode=0660"} <= set(lines)
    assert "RuntimeDirectoryPreserve=yes" in UNIT.read_text().splitlines(), "else a restart would remove them"


@needs_systemd
def test_verify_would_say_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "engramd.service"
    wrong.write_text(UNIT.read_text().replace("PrivateTmp=", "PrivateTemp="))
    done = run("systemd-analyze", "verify", str(wrong))
    assert "PrivateTemp" in done.stdout + done.stderr


@needs_systemd
def test_exposure() -> None:
    done = run("systemd-analyze", "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", str(UNIT))
    assert done.returncode == 0, done.stdout[-2000:]
    assert re.search(r"Overall exposure level for engramd.service: [01]\.\d OK", done.stdout)


@needs_systemd
def test_user_and_folders() -> None:
    done = run("systemd-sysusers", "--dry-run", str(DEPLOY / "engramd.sysusers.conf"))
    assert done.returncode == 0, done.stderr
    if "engramd:" not in Path("/etc/passwd").read_text():
        assert "Creating user 'engramd'" in done.stdout + done.stderr
    for line in (DEPLOY / "engramd.tmpfiles.conf").read_text().splitlines():
        assert re.fullmatch(r"#.*|d /(srv|var/lib)/engramd 0[0-7]{3} [a-z]+ [a-z]+ -", line)


@pytest.fixture(params=["unit", "container"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The command in front of the daemon: under the unit, or under the container's profile."""
    if request.param == "unit":
        if shutil.which("systemd-analyze") is None:
            pytest.skip("systemd-analyze is not installed: the unit's sets of calls cannot be expanded")
        yield SANDBOX
    else:
        yield [*SANDBOX, "--profile", str(PROFILE)]


def test_the_daemon_under_the_units_confinement(
    sandbox: list[str],
    start_daemon: Any,
    load: Any,
    engramd: Callable[..., Any],
    tmp_path: Path,
    table: Path,
    tcp: Any,
    reserve_port: Any,
) -> None:
    """Everything it does: sessions, reads past the cache, a TCP endpoint, metrics, a new budget, heat, the end."""
    metrics = reserve_port()
    state = tmp_path / "state"
    config = tmp_path / "engramd.toml"
    config.write_text(f'dram = "1MiB"\n[[table]]\nname = "demo"\npath = "{table}"\n')
    daemon = start_daemon(
        config=config,
        dram=None,
        state=state,
        **tcp.flags,
        metrics=f"127.0.0.1:{metrics}",
        wrapper=sandbox,
    )
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    assert re.search(r"NoNewPrivs:\s1\n", status)
    assert re.search(r"Seccomp:\s2\n", status)
    assert re.search(r"CapEff:\s0+\n", status)
    work = load(daemon)
    work.run(20)
    stats = json.loads(engramd("stats", "--socket", daemon.socket, "--json").stdout)
    assert stats["reader"]["kind"] == expected_reader(start_daemon, engramd)
    assert sum(layer["nvme_reads"] for layer in stats["tables"][0]["layers"]) > 0
    import engram_client

    with engram_client.connect(f"tcp://{tcp.address}", curve=tcp.curve) as client:
        assert client.table(layer=1).fetch([1, 2]).shape == (2, 264)
    config.write_text(f'dram = "64MiB"\n[[table]]\nname = "demo"\npath = "{table}"\n')
    assert engramd("reload", "--config", "--socket", daemon.socket).returncode == 0
    daemon.wait_for_log("layer 14 is resident")
    work.run(5)
    assert daemon.stop() == 0
    assert "drained" in daemon.log
    assert "ot permitted" not in daemon.log
    assert oct(state.stat().st_mode & 0o777) == "0o700"


def expected_reader(start_daemon: Any, engramd: Callable[..., Any]) -> str:
    """The reader of a daemon that nothing confines: io_uring must survive the filter where the machine has it."""
    free = start_daemon()
    return str(json.loads(engramd("stats", "--socket", free.socket, "--json").stdout)["reader"]["kind"])


PROBE = """
import ctypes, errno, json, mmap, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number):
    return errno.errorcode.get(ctypes.get_errno()) if libc.syscall(number, 0, 0, 0, 0, 0, 0) < 0 else "ok"
def attempt(function):
    try:
        function()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
print(json.dumps({
    "packet": attempt(lambda: socket.socket(17, socket.SOCK_RAW)),
    "unix": attempt(lambda: socket.socket(1, socket.SOCK_DGRAM)),
    "writable code": attempt(lambda: mmap.mmap(-1, 4096, prot=7)),
    "ptrace": call(101), "mount": call(165), "bpf": call(321), "keyctl": call(250), "unshare": call(272),
    "init_module": call(175), "perf_event_open": call(298), "io_uring_setup": call(425),
}))
"""


@pytest.mark.skipif("__import__('platform').machine() != 'x86_64'", reason="the probe has x86-64's call numbers")
def test_the_confinement_confines(sandbox: list[str]) -> None:
    """The same sandbox refuses what it should, so that the test above means something."""
    done = run(*sandbox, sys.executable, "-c", PROBE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("unix") == "ok"
    assert found.pop("io_uring_setup") == "EFAULT"  # it came through and met a null pointer
    assert found.pop("packet") == "EAFNOSUPPORT"
    assert set(found.values()) == {"EPERM"}, found


@needs_systemd
def test_the_container_profile_is_the_units() -> None:
    """Made by `tools/unit_sandbox.py deploy/engramd.service --print-profile`; systemd's sets grow with its versions."""
    stored = set(json.loads(PROFILE.read_text())["syscalls"][0]["names"])
    made = set(json.loads(run(*SANDBOX, "--print-profile").stdout)["syscalls"][0]["names"])
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_create", "futex", "preadv2"} <= stored
    assert not stored & {"mount", "ptrace", "bpf", "keyctl", "init_module", "kexec_load", "open_by_handle_at", "reboot"}
    assert len(stored ^ made) <= 20


def test_compose_file() -> None:
    file = str(DEPLOY / "compose.yaml")
    done = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file)
    assert done.returncode == 0, done.stdout
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    daemon = services["engramd"]
    assert daemon["security_opt"] == ["seccomp=./seccomp-engramd.json", "no-new-privileges:true"]
    assert daemon["ulimits"]["memlock"] == -1
    assert daemon["cap_drop"] == ["ALL"]
    assert daemon["userns_mode"] == services["client"]["userns_mode"] == "host"
    assert "socket:/run/engramd" in set(daemon["volumes"][:2]) & set(services["client"]["volumes"])


def typed(document: dict[str, Any]) -> Any:
    """The document as the API's own model of its kind gives it back: unknown fields are lost, missing ones refused."""
    import kubernetes.client

    api: Any = kubernetes.client.ApiClient()
    kind = {"ConfigMap": "V1ConfigMap", "DaemonSet": "V1DaemonSet"}[document["kind"]]
    return api.sanitize_for_serialization(api.deserialize(json.dumps(document), kind, "application/json"))


def test_kubernetes_manifest(tmp_path: Path) -> None:
    configuration, daemon_set = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    for document in (configuration, daemon_set):
        assert typed(document) == document
    misspelt = copy.deepcopy(daemon_set)
    misspelt["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    assert typed(misspelt) != misspelt
    del misspelt["spec"]["selector"]
    with pytest.raises(ValueError, match="selector"):
        typed(misspelt)
    from engramd.config import Flags, settings_from

    path = tmp_path / "engramd.toml"
    path.write_text(configuration["data"]["engramd.toml"])
    settings = settings_from(Flags(config=str(path)))
    pod = daemon_set["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["seccompProfile"] == {"type": "Localhost", "localhostProfile": "engramd.json"}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        where = container[probe]["httpGet"]
        assert f"{where['host']}:{where['port']}" == settings.metrics
        assert where["path"] in ("/livez", "/readyz")
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert limit >= settings.dram_bytes + settings.arena_limit_bytes + (1 << 30)
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_dockerfile() -> None:
    from dockerfile_parse import DockerfileParser

    parser = DockerfileParser(path=str(DEPLOY / "Dockerfile"))
    instructions = [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]
    known = {
        "FROM", "RUN", "COPY", "ENV", "USER", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    assert {name for name, _ in instructions} <= known
    assert parser.is_multistage
    assert ("USER", "engramd") in instructions
    assert parser.cmd == '["serve", "--config", "/etc/engramd/engramd.toml"]'
    for name, value in instructions:
        if name in ("ENTRYPOINT", "CMD", "VOLUME"):
            json.loads(value)
        if name == "COPY" and not value.startswith("--from"):
            assert (ROOT / value.split()[0]).exists()


def test_an_image_is_built_from_sources_alone() -> None:
    """What git leaves out (builds for this checkout's paths, environments of gigabytes) does not go to Docker."""
    left_out = {line.strip("/").removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()} | {".git"} <= left_out


def test_every_query_of_dashboard_and_alerts_names_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    alerts = re.findall(r"^\|.*\| `(.*engramd_.*)` \|$", (ROOT / "docs" / "operating.md").read_text(), re.MULTILINE)
    assert len(alerts) >= 5
    queries += [alert.replace("\\|", "|") for alert in alerts]
    series = {
        f"{name}{suffix}"
        for name, (kind, _) in METRICS.items()
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    named = [set(re.findall(r"\bengramd_\w+", query)) for query in queries]
    assert all(named)
    assert set().union(*named) <= series
    labels = {"source", "layer", "table", "error", "rows", "cause", "le", "instance"}
    for query in queries:
        assert set(re.findall(r"(\w+)=~?\"", query)) <= labels
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(group.split(", ")) <= labels
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
