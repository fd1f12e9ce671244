#!/bin/sh
# Check and measure the CUDA side on this machine's first NVIDIA GPU:  bench/gpu_check.sh [FOLDER FOR RESULTS]
#
# Builds the kernels, runs every kernel test against its reference and the seam trial, repeats the kernel tests under
# compute-sanitizer where it is installed, measures, and prints one table last.
# Needs: nvcc 13, a C compiler, Python 3.11+ ($PYTHON) with cuda-bindings 13, numpy and pytest.
# Exits non-zero iff a step fails or there is no usable GPU (with the reason).
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-build/gpu_check}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out/cubins"

echo "== device"
"$python" -c 'import sys
from colibrid.engine import device_cuda as d
try:
    print(d.probe(0))
except d.DeviceError as error:
    sys.exit(str(error))'
git rev-parse --verify --quiet HEAD || echo "not a git checkout"

echo "== build"
"$python" kernels_cu/build.py --all --out "$out/cubins" kernels_cu/*.cu tests/cuda/*.cu | tee "$out/build.txt"
if [ -e "$(dirname "$(command -v nvcc)")/../include/cuda.h" ]; then
  ${CC:-cc} -std=c11 -fsyntax-only -Iengine_c/include -I"$(dirname "$(command -v nvcc)")/../include" \
    tests/cuda/check_types.c && echo "driver types equal cuda.h"
fi

echo "== tests"
# The project's own pytest settings need its development packages; this check needs only pytest.
"$python" -m pytest -q -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider --confcutdir tests/cuda \
  tests/cuda -k 'cuda or fake or failing' 2>&1 | tee "$out/tests.txt" | tail -15
grep -q ' passed' "$out/tests.txt" && ! grep -qE '[0-9]+ (failed|error)' "$out/tests.txt"

echo "== sanitizer"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -c /dev/null --rootdir . \
      --import-mode=importlib -p no:cacheprovider --confcutdir tests/cuda tests/cuda/test_router.py -k 'cuda' \
      >"$out/$tool.txt" 2>&1 || { tail -30 "$out/$tool.txt"; exit 1; }
    echo "$tool: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/$tool.txt" | tail -1)"
  done
else
  echo "compute-sanitizer is not installed: skipped"
fi

echo "== measurements"
"$python" bench/gpu_bench.py --cubins "$out/cubins" --out "$out/gpu_bench.json"
