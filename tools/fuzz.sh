#!/usr/bin/env bash
# Runs each fuzz target for a time, or for a number of inputs: fuzz.sh PYTHON BUILD SEED SECONDS [INPUTS].
# Corpora stay in BUILD/corpus, so that the next run goes on from them; an input that broke something is left in BUILD.
set -eu

python=$1 build=$2 seed=$3 seconds=$4 inputs=${5:-}
checkout=$(cd "$(dirname "$0")/.." && pwd)
bound=("-max_total_time=$seconds")
if [ -n "$inputs" ]; then bound=("-runs=$inputs"); fi
cd "$build"
export TMPDIR="$PWD/tmp"
mkdir -p "$TMPDIR" corpus
trap 'rm -rf "$TMPDIR"' EXIT

run() { # run NAME COMMAND...
  local name=$1
  shift
  mkdir -p "corpus/$name"
  if ! "$@" -seed="$seed" "${bound[@]}" -max_len=600 -timeout=60 -artifact_prefix="$name-" \
    "corpus/$name" >"$name.log" 2>&1; then
    tail -n 60 "$name.log"
    echo "error: fuzzing $name failed with SEED=$seed; the input is in $build/$name-*" >&2
    exit 1
  fi
  echo "fuzz $name: $(grep -E '^Done [0-9]+ runs' "$name.log"), seed $seed"
}

run ring ./native/fuzz/fuzz_ring
for target in control handshake manifest safetensors; do
  run "$target" "$python" "$checkout/tests/fuzz/fuzz_python.py" "$target"
done
