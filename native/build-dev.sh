#!/bin/sh
# Build octavo._native and put it beside the Python package, for work in the source tree.
# usage: native/build-dev.sh [CMake option …]      PYTHON names the interpreter, BUILD the folder
set -eu
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
build=${BUILD:-$root/build/dev}
PATH=$(dirname -- "$python"):$PATH
cmake -S "$root" -B "$build" -G Ninja --log-level=WARNING \
  -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" \
  -DOCTAVO_EMULATE=ON -DOCTAVO_WERROR=ON "$@"
cmake --build "$build"
# Renamed into place: a process that runs the old library keeps it.
for library in "$build"/_native*.so; do
  target=$root/src/octavo/$(basename -- "$library")
  cp -- "$library" "$target.new"
  mv -f -- "$target.new" "$target"
done
