#!/bin/sh
# Check and measure the CUDA side on this machine's first NVIDIA GPU:  bench/gpu_check.sh [FOLDER FOR RESULTS]
#
# Builds the kernels, runs every kernel test against its reference, the seam trial and the whole engine against
# transformers' answers, repeats the router's and the engine's tests under compute-sanitizer where it is installed,
# measures kernels and decode steps, and prints one table last.
# Needs: nvcc 13, a C compiler, the C library in colibrid/engine/lib (`make lib`), Python 3.11+ ($PYTHON) with colibrid's
# own requirements, cuda-bindings 13 and pytest.
# Exits non-zero iff a step fails or there is no usable GPU (with the reason).
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-build/gpu_check}
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/cuda${PYTHONPATH:+:$PYTHONPATH}"
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

cp -r "$out/cubins" colibrid/engine/lib/

echo "== tests"
# The project's own pytest settings need its development packages; this check needs only pytest.
"$python" -m pytest -q -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider --confcutdir tests/cuda \
  tests/cuda -k 'cuda or fake or failing or golden' --junitxml="$out/tests.xml" -o junit_family=xunit1 2>&1 | tee "$out/tests.txt" | tail -15
grep -q ' passed' "$out/tests.txt" && ! grep -qE '[0-9]+ (failed|error)' "$out/tests.txt"
grep -oE 'property name="golden[^/]*' "$out/tests.xml"

echo "== sanitizer"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -c /dev/null --rootdir . \
      --import-mode=importlib -p no:cacheprovider --confcutdir tests/cuda tests/cuda/test_router.py \
      tests/cuda/test_engine_cuda.py -k 'cuda and not emulated and not reference' \
      >"$out/$tool.txt" 2>&1 || { tail -30 "$out/$tool.txt"; exit 1; }
    echo "$tool: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/$tool.txt" | tail -1)"
  done
else
  echo "compute-sanitizer is not installed: skipped"
fi

echo "== measurements"
"$python" bench/gpu_bench.py --cubins "$out/cubins" --out "$out/gpu_bench.json"
for shape in qwen1.5-moe-a2.7b qwen3-30b-a3b; do
  for form in "" --json; do
    "$python" -m colibrid.cli bench engine --device cuda --shape "$shape" --slots 1,8,32 --prompt-tokens 480 $form \
      >"$out/engine-$shape${form:+.json}"
  done
  cat "$out/engine-$shape"
done
