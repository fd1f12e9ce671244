#!/bin/sh
# Check and measure the CUDA side on this machine's first NVIDIA GPU, in one go:  bench/gpu_check.sh [FOLDER]
#
# Builds kernels and C library, runs the kernels' and the engine's tests with the golden cases, all four tools of
# compute-sanitizer side by side, thousands of requests over HTTP, and the benches. A step that fails does not stop the
# others. The last thing printed is one table; everything is in bench/results/gpu-<date>-<device>.json. FOLDER (default
# build/gpu_check) gets the logs. Some six minutes on an H200; no step may take longer than its limit below.
#
# Needs: nvcc 13, a C and C++ compiler, Python 3.11+ ($PYTHON) with colibrid's own requirements, cuda-bindings 13 and
# pytest; meson and ninja, or the C library in colibrid/engine/lib (`make lib`). No network, no git.
# Exits 0 iff every step passed; 3 if there is no GPU that can serve.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-build/gpu_check}
lib=colibrid/engine/lib
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/cuda:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}"
export XDG_CACHE_HOME="$PWD/$out/cache"
rm -rf "$out"
mkdir -p "$out" "$lib"
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

"$python" bench/gpu_report.py device >"$out/device.json" || exit 3

build_library() {
  meson setup "$out/c" -Dcubins=disabled && meson compile -C "$out/c" || return 1
  cp "$out"/c/engine_c/libcolibri.so "$out"/c/engine_c/clb_cpu_*.so "$out"/c/engine_c/modules.json "$lib/"
}
if command -v meson >/dev/null && command -v ninja >/dev/null; then
  build_library >"$out/library.txt" 2>&1
  echo "library $? 0" >>"$out/steps.txt"
fi
arch=$("$python" bench/gpu_report.py arch)
step kernels 180 "$python" kernels_cu/build.py --arch "$arch" --out "$lib/cubins" kernels_cu/*.cu tests/cuda/*.cu
if [ -e "$(dirname "$(command -v nvcc)")/../include/cuda.h" ]; then
  step types 20 "${CC:-cc}" -std=c11 -fsyntax-only -Iengine_c/include -I"$(dirname "$(command -v nvcc)")/../include" \
    tests/cuda/check_types.c
fi

step tests 150 $pytest tests/cuda tests/test_golden_c.py tests/test_engine_requests.py tests/test_engine_experts.py \
  tests/test_engine_pooling.py tests/test_engine_capacity.py \
  -k 'cuda and not emulated and not fake' --junitxml="$out/tests.xml"

if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck synccheck; do
    step "$tool" 75 compute-sanitizer --tool "$tool" --error-exitcode 9 $pytest tests/cuda/test_attention.py \
      tests/cuda/test_router.py tests/cuda/test_capacity.py tests/cuda/test_pool.py tests/test_engine_requests.py \
      -k 'cuda and not emulated and not fake and not company' &
  done
  wait
fi

step soak 100 "$python" bench/soak.py --device cuda --requests 20000 --connections 48 --json "$out/soak.json"
step serve 75 "$python" bench/serve_bench.py --seconds 4 --json "$out/serve.json"
for shape in qwen1.5-moe-a2.7b qwen3-30b-a3b olmoe-1b-7b mixtral-8x7b; do
  step "engine-$shape" 45 "$python" -m colibrid.cli bench engine --device cuda --shape "$shape" --slots 1,8,32 \
    --prompt-tokens 480 --repeat 2 --steps 32 --json
done
step seams 40 "$python" bench/gpu_bench.py --cubins "$lib/cubins" --out "$out/gpu_bench.json"

exec "$python" bench/gpu_report.py report "$out"
