#!/bin/sh
# Check and measure the CUDA side on this machine's first NVIDIA GPU, in one go:
#
#     bench/gpu_check.sh [--built] [FOLDER]
#
# Builds kernels and C library (--built: takes those in colibrid/engine/lib as they are), then side by side the kernels'
# and the engine's tests with the golden cases and all four tools of compute-sanitizer, then one after the other decode
# and prompts of published shapes, the serving path and 20,000 requests over HTTP. A step that fails does not stop the
# others; none may take longer than its limit below. The last thing printed is one table; everything is in
# bench/results/gpu-<date>-<device>.json, which is written anew as steps end. FOLDER (default build/gpu_check) gets the
# logs. Some five minutes on an H200, without the build.
#
# Needs: nvcc 13, a C and C++ compiler, Python 3.11+ ($PYTHON) with colibrid's own requirements, cuda-bindings 13 and
# pytest; meson and ninja, or the C library in colibrid/engine/lib (`make lib`). No network, no git.
# Exits 0 iff every step passed; 3 if there is no GPU that can serve.
set -u
cd "$(dirname "$0")/.."
built=no
if [ "${1:-}" = --built ]; then
  built=yes
  shift
fi
python=${PYTHON:-python3}
out=${1:-build/gpu_check}
lib=colibrid/engine/lib
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/cuda:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}"
rm -rf "$out"
mkdir -p "$out" "$lib"
out=$(cd "$out" && pwd)
export XDG_CACHE_HOME="$out/cache"
: >"$out/steps.txt"
# The project's own pytest settings need its development packages; this check needs only pytest.
pytest="$python -m pytest -q -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider -o junit_family=xunit1"

# step NAME LIMIT COMMAND...: its output is FOLDER/NAME.txt; a line says how it went.
step() {
  name=$1 limit=$2
  shift 2
  begin=$(date +%s)
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  code=$?
  took=$(($(date +%s) - begin))
  echo "$name $code $took" >>"$out/steps.txt"
  case $code in
  0) echo "$name: passed in $took s" ;;
  124) echo "$name: stopped after its limit of $limit s" ;;
  *) echo "$name: FAILED with $code after $took s"; tail -15 "$out/$name.txt" | sed 's/^/    /' ;;
  esac
}

tests() {
  name=$1 limit=$2
  shift 2
  step "tests-$name" "$limit" $pytest "$@" -k 'cuda and not emulated and not fake' --junitxml="$out/tests-$name.xml"
}

sanitize() {
  step "$1" 150 compute-sanitizer --tool "$1" --error-exitcode 9 $pytest tests/cuda/test_attention.py \
    tests/cuda/test_router.py tests/cuda/test_capacity.py tests/cuda/test_pool.py tests/test_engine_requests.py \
    -k 'cuda and not emulated and not fake and not company'
}

engine() {
  name=$1 shape=$2
  shift 2
  step "engine-$name" 45 "$python" -m colibrid.cli bench engine --device cuda --shape "$shape" --json "$@"
}

"$python" bench/gpu_report.py device >"$out/device.json" || exit 3
if [ $built = yes ]; then
  touch "$lib/cubins/manifest.json" # newer than the sources: tests take it
else
  arch=$("$python" bench/gpu_report.py arch)
  if command -v meson >/dev/null && command -v ninja >/dev/null; then
    step library-setup 60 meson setup "$out/c" -Dcubins=disabled
    step library 120 meson compile -C "$out/c"
    cp "$out"/c/engine_c/libcolibri.so "$out"/c/engine_c/clb_cpu_*.so "$out"/c/engine_c/modules.json "$lib/"
  fi
  step kernels 180 "$python" kernels_cu/build.py --arch "$arch" --out "$lib/cubins" kernels_cu/*.cu tests/cuda/*.cu
fi
if [ -e "$(dirname "$(command -v nvcc)")/../include/cuda.h" ]; then
  step types 20 "${CC:-cc}" -std=c11 -fsyntax-only -Iengine_c/include -I"$(dirname "$(command -v nvcc)")/../include" \
    tests/cuda/check_types.c
fi

# Nothing is timed here, so everything runs at once.
tests matrices 90 tests/cuda/test_linear.py tests/cuda/test_step_kernels.py &
tests experts 150 tests/cuda/test_experts.py tests/cuda/test_sample.py tests/cuda/test_read.py &
tests attention 150 tests/cuda/test_attention.py tests/cuda/test_router.py tests/cuda/test_capacity.py \
  tests/cuda/test_pool.py tests/cuda/test_seam_trial.py &
tests quantised 180 tests/cuda/test_quant.py tests/cuda/test_engine_quant.py tests/test_engine_swap.py &
tests engine 150 tests/test_golden_c.py tests/test_engine_*.py tests/cuda/test_engine_cuda.py &
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck synccheck; do
    sanitize "$tool" &
  done
fi
wait
"$python" bench/gpu_report.py report "$out" >/dev/null

for shape in qwen3-30b-a3b qwen1.5-moe-a2.7b olmoe-1b-7b; do
  engine "$shape" "$shape" --slots 1,8,32 --prompt-tokens 480 --repeat 2 --steps 32
done
engine prompts qwen3-30b-a3b --slots 1 --prompt-tokens 128,512,2048,16384 --repeat 2 --steps 32
"$python" bench/gpu_report.py report "$out" >/dev/null
step serve 60 "$python" bench/serve_bench.py --seconds 3 --json "$out/serve.json"
"$python" bench/gpu_report.py report "$out" >/dev/null
step soak 75 "$python" bench/soak.py --device cuda --requests 20000 --connections 48 --seconds 60 --memory-slack 0 --json "$out/soak.json"
"$python" bench/gpu_report.py report "$out" >/dev/null
step second-turn 30 "$python" bench/second_turn.py --device cuda --shape qwen3-30b-a3b --repeat 5
engine mixtral-8x7b mixtral-8x7b --slots 1,8,32 --prompt-tokens 480 --repeat 1 --steps 16
step seams 40 "$python" bench/gpu_bench.py --cubins "$lib/cubins" --out "$out/gpu_bench.json"
exec "$python" bench/gpu_report.py report "$out"
