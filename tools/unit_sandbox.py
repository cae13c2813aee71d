"""Runs a command under the confinement that a systemd unit describes, where no systemd runs: for tests.

    unit_sandbox.py UNIT [--profile FILE] COMMAND ...
    unit_sandbox.py UNIT --print-profile >deploy/seccomp-engramd.json     the same calls as a container's profile

From the unit: SystemCallFilter (sets expanded by `systemd-analyze`), SystemCallErrorNumber, RestrictAddressFamilies,
MemoryDenyWriteExecute, RestrictNamespaces, RestrictRealtime, NoNewPrivileges, an empty CapabilityBoundingSet,
LimitCORE, LimitNOFILE, UMask: as systemd does it, by libseccomp and prctl. With --profile the calls allowed come from a
container's seccomp profile instead. Mount namespaces (ProtectSystem and its like) are not made.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import subprocess
import sys

SCMP_ACT_ALLOW = 0x7FFF0000
SCMP_ACT_ERRNO = 0x00050000
SCMP_CMP_NE, SCMP_CMP_MASKED_EQ = 1, 7
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
# What a container's runtime itself calls between loading the profile and starting the program.
RUNTIME_CALLS = {
    "capset", "chdir", "fchown", "setfsgid", "setfsuid", "setgid", "setgroups", "setregid", "setresgid", "setresuid",
    "setreuid", "setuid",
}  # fmt: skip
NAMESPACE_FLAGS = 0x7E020000 | 0x00000080  # CLONE_NEW*, CLONE_NEWTIME
PROT_EXEC, PROT_WRITE, SHM_EXEC = 4, 2, 0o100000


class Comparison(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def settings_of(unit: str) -> dict[str, list[str]]:
    """Values of the unit's [Service] section, in order; an empty one clears those before it."""
    settings: dict[str, list[str]] = {}
    section = ""
    with open(unit, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if line.startswith("["):
                section = line
            elif section == "[Service]" and "=" in line and line[0] not in "#;":
                key, _, value = line.partition("=")
                settings.setdefault(key, []).append(value)
    return settings


def syscall_sets() -> dict[str, list[str]]:
    """systemd's sets: the names and further sets in each."""
    text = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True).stdout
    sets: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith("@"):
            current = sets.setdefault(line.strip(), [])
        elif line.startswith("    ") and not line.strip().startswith("#"):
            current.append(line.strip())
    return sets


def allowed_calls(filters: list[str]) -> set[str]:
    """The calls that a list of SystemCallFilter= values lets pass; @default always does, as the first value allows."""
    sets = syscall_sets()

    def expand(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        return set().union(*(expand(member) for member in sets[name]))

    allowed = expand("@default")
    for value in filters:
        removes = value.startswith("~")
        for name in value.lstrip("~").split():
            allowed = allowed - expand(name) if removes else allowed | expand(name)
    return allowed


def calls_of_profile(path: str) -> set[str]:
    """The calls that a container's seccomp profile allows without conditions."""
    with open(path, encoding="utf-8") as file:
        profile = json.load(file)
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    rules = [rule for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"]
    return {name for rule in rules for name in rule["names"]}


def install_filter(settings: dict[str, list[str]], calls: set[str]) -> None:
    """Loads the filters into this thread. Two of them, as systemd has it: every one of them must let a call pass."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(Comparison),
    ]  # fmt: skip
    name_of_error = settings.get("SystemCallErrorNumber", ["EPERM"])[-1]
    refuse = SCMP_ACT_ERRNO | getattr(errno, name_of_error)

    def add(context: int, action: int, call: str, *comparisons: Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            return  # not on this architecture
        array = (Comparison * len(comparisons))(*comparisons)
        result = library.seccomp_rule_add_array(context, action, number, len(comparisons), array)
        if result != 0:
            raise OSError(-result, f"seccomp rule for {call}: {os.strerror(-result)}")

    def load(context: int) -> None:
        if library.seccomp_load(context) != 0:
            raise OSError("seccomp_load fails")

    def masked(argument: int, mask: int, value: int) -> Comparison:
        return Comparison(argument, SCMP_CMP_MASKED_EQ, mask, value)

    conditions = library.seccomp_init(SCMP_ACT_ALLOW)
    if "RestrictAddressFamilies" in settings:
        allowed = {FAMILIES[name] for name in settings["RestrictAddressFamilies"][-1].split()}
        for family in set(range(64)) - allowed:
            add(conditions, SCMP_ACT_ERRNO | errno.EAFNOSUPPORT, "socket", Comparison(0, 4, family, 0))
    if settings.get("MemoryDenyWriteExecute") == ["yes"]:
        both = PROT_EXEC | PROT_WRITE
        add(conditions, SCMP_ACT_ERRNO | errno.EPERM, "mmap", masked(2, both, both))
        add(conditions, SCMP_ACT_ERRNO | errno.EPERM, "mprotect", masked(2, PROT_EXEC, PROT_EXEC))
        add(conditions, SCMP_ACT_ERRNO | errno.EPERM, "pkey_mprotect", masked(2, PROT_EXEC, PROT_EXEC))
        add(conditions, SCMP_ACT_ERRNO | errno.EPERM, "shmat", masked(2, SHM_EXEC, SHM_EXEC))
    if settings.get("RestrictNamespaces") == ["yes"]:
        for bit in range(32):
            if NAMESPACE_FLAGS >> bit & 1:
                add(conditions, SCMP_ACT_ERRNO | errno.EPERM, "clone", masked(0, 1 << bit, 1 << bit))
        add(conditions, SCMP_ACT_ERRNO | errno.ENOSYS, "clone3")
        add(conditions, SCMP_ACT_ERRNO | errno.EPERM, "unshare")
        add(conditions, SCMP_ACT_ERRNO | errno.EPERM, "setns")
    if settings.get("RestrictRealtime") == ["yes"]:
        for policy in (1, 2, 6):  # SCHED_FIFO, SCHED_RR, SCHED_DEADLINE
            add(conditions, SCMP_ACT_ERRNO | errno.EPERM, "sched_setscheduler", Comparison(1, 4, policy, 0))
    filters = library.seccomp_init(refuse)
    for call in sorted(calls):
        add(filters, SCMP_ACT_ALLOW, call)
    # Loaded last; loading needs prctl or seccomp, which the second filter may refuse.
    load(conditions)
    load(filters)


def confine(unit: str, profile: str | None) -> None:
    """Confines this process. Needs root for the capabilities; NoNewPrivileges comes first, as seccomp asks for it."""
    settings = settings_of(unit)
    calls = calls_of_profile(profile) if profile else allowed_calls(settings["SystemCallFilter"])
    os.umask(int(settings.get("UMask", ["0022"])[-1], 8))
    if settings.get("LimitCORE") == ["0"]:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files = int(settings.get("LimitNOFILE", ["1024"])[-1])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), min(files, hard)))
    libc = ctypes.CDLL(None, use_errno=True)
    if settings.get("CapabilityBoundingSet") == [""]:
        for capability in range(64):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    install_filter(settings, calls)


def profile_of(unit: str) -> str:
    """The unit's calls as a container's seccomp profile."""
    calls = allowed_calls(settings_of(unit)["SystemCallFilter"]) | RUNTIME_CALLS
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": [{"names": sorted(calls), "action": "SCMP_ACT_ALLOW"}],
    }
    return json.dumps(profile, indent=2) + "\n"


def main() -> None:
    unit, *rest = sys.argv[1:]
    profile = None
    if rest == ["--print-profile"]:
        print(profile_of(unit), end="")
        return
    if rest[0] == "--profile":
        profile, rest = rest[1], rest[2:]
    confine(unit, profile)
    os.execvp(rest[0], rest)


if __name__ == "__main__":
    main()
