#!/usr/bin/env bash
# Installs the system packages that the build, the tests and lint need, where any is missing. Looks for what they bring
# rather than for package names, so a machine that has the tools from elsewhere is left alone.
# Usage: install_system_packages.sh PYTHON [bench|fuzz|aarch64]
set -eu

python=$1
extra=${2:-}
missing=()
need() { # need PACKAGE CHECK...: notes PACKAGE as missing where CHECK fails
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
has_liburing() { echo '#include <liburing.h>' | cc -E - && test -f "$(cc -print-file-name=liburing.a)"; }
has_doctest() { echo '#include <doctest/doctest.h>' | c++ -E -x c++ -; }
has_cpp20() { echo 'int main() { return 0; }' | c++ -std=c++20 -fsyntax-only -x c++ -; }
has_python_headers() { "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; }

has_libfuzzer() { test -f "$(clang++-14 -print-file-name=libclang_rt.fuzzer-x86_64.a)" || compgen -G \
  "$(clang++-14 -print-resource-dir)/lib/linux/libclang_rt.fuzzer-*.a"; }

need g++ has_cpp20
need cmake cmake --version
need ninja-build ninja --version
need liburing-dev has_liburing
need doctest-dev has_doctest
need clang-format-14 clang-format-14 --version
need python3-dev has_python_headers
need python3-venv "$python" -c 'import ensurepip, venv'
need util-linux setarch --version
need systemd systemd-analyze --version
need libseccomp2 "$python" -c 'import ctypes; ctypes.CDLL("libseccomp.so.2")'
need pkg-config pkg-config --version
if [ "$extra" = bench ]; then need fio fio --version; fi
if [ "$extra" = aarch64 ]; then
  need g++-aarch64-linux-gnu aarch64-linux-gnu-g++ --version
  need qemu-user qemu-aarch64 --version
fi
if [ "$extra" = fuzz ]; then
  need clang-14 clang++-14 --version
  need libclang-rt-14-dev has_libfuzzer
fi

if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
command="apt-get install --yes --no-install-recommends ${missing[*]}"
if ! command -v apt-get >/dev/null; then
  echo "error: this machine lacks what Debian calls: ${missing[*]}; it has no apt-get, so install them its own way." >&2
  exit 1
fi
if [ "$(id -u)" != 0 ]; then
  echo "error: missing system packages: ${missing[*]}. As root, run: apt-get update && $command" >&2
  exit 1
fi
echo "Installing system packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update && $command; } >"$log" 2>&1; then
  cat "$log" >&2
  echo "error: apt-get could not install: ${missing[*]} (its own words are above)." >&2
  exit 1
fi
