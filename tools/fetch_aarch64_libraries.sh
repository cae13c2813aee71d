#!/usr/bin/env bash
# Fetches Debian's arm64 build of liburing-dev and unpacks it into a folder, with package lists of its own: the machine
# keeps its architectures and its packages. Usage: fetch_aarch64_libraries.sh FOLDER
set -eu -o pipefail

folder=$1
if [ -f "$folder/usr/lib/aarch64-linux-gnu/liburing.a" ]; then exit 0; fi
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial"
folder=$(cd "$folder" && pwd)
touch "$folder/apt/status"
options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$folder/apt"
  -o "Dir::State::status=$folder/apt/status" -o "Dir::Cache=$folder/apt" -o APT::Sandbox::User=root -q)
{
  apt-get "${options[@]}" update
  cd "$folder/apt"
  apt-get "${options[@]}" download liburing-dev
} >"$folder/apt/log" 2>&1 || {
  cat "$folder/apt/log" >&2
  echo "error: cannot fetch liburing-dev for arm64 (apt-get's own words are above)" >&2
  exit 1
}
dpkg-deb -x "$folder"/apt/liburing-dev_*_arm64.deb "$folder"
