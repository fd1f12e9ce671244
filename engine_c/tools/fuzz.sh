#!/bin/sh
# Runs every fuzz target for SECONDS, side by side, under the address and undefined-behaviour sanitizers: with libFuzzer,
# which follows coverage, where clang and its run-time are installed, else with random inputs in the gcc build of
# `make test-asan`. An input that fails stays in the build folder; `fuzz_<target> FILE` runs it again.
# Usage: engine_c/tools/fuzz.sh SECONDS   (from the root of the source tree, with meson and ninja in PATH)
set -eu
seconds="$1"
root="$PWD"

has_libfuzzer() {
  echo 'int LLVMFuzzerTestOneInput(const char* d, unsigned long n) { return d == 0 && n != 0; }' |
    "$1" -x c - -fsanitize=fuzzer,address,undefined -o /dev/null 2>/dev/null
}

clang=""
for name in clang $(seq -f 'clang-%.0f' 30 -1 11); do
  command -v "$name" >/dev/null && has_libfuzzer "$name" && clang="$name" && break
done

if [ -n "$clang" ]; then
  build=build-fuzz
  test -f "$build/build.ninja" || CC="$clang" meson setup "$build" -Dunit_tests=true -Dlibfuzzer=true \
    -Dbuildtype=debugoptimized -Db_sanitize=address,undefined -Db_lundef=false >/dev/null
else
  echo "no clang with libFuzzer here: random inputs"
  build=build-asan
  test -f "$build/build.ninja" || meson setup "$build" -Dunit_tests=true -Dbuildtype=debugoptimized \
    -Db_sanitize=address,undefined >/dev/null
fi
# The targets and the modules that their engine loads (engine_rig.c).
meson compile -C "$build" --ninja-args=--quiet fuzz_loader fuzz_request clb_cpu_generic_fp32 clb_cpu_generic_fp16 \
  clb_cpu_generic_bf16

# A target's own folder holds its corpus, which later runs go on from, and its log.
cd "$build"
export CLB_MODULE_DIR="$root/$build/engine_c" UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
run() { # target
  mkdir -p "fuzz_$1/corpus"
  cd "fuzz_$1"
  set -- "../engine_c/tests/fuzz_$1" -max_total_time="$seconds" -seed="$(date +%s)"
  if [ -n "$clang" ]; then
    # Long random inputs to begin with: from none it would take libFuzzer minutes to grow its own. Its entropic schedule
    # takes more time than an input of ours.
    [ -n "$(ls corpus)" ] || for i in $(seq 64); do head -c 385 /dev/urandom >"corpus/$i"; done
    set -- "$@" -max_len=400 -entropic=0 -timeout=20 corpus
  fi
  exec "$@" >log 2>&1
}
run loader &
loader=$!
run request &
request=$!

status=0
report() { # target, its process
  if wait "$2"; then
    echo "fuzz_$1: $(grep -E 'inputs: 0 crashes|^Done ' "fuzz_$1/log")"
  else
    status=1
    echo "fuzz_$1 FAILED; its folder is $build/fuzz_$1"
    tail -n 60 "fuzz_$1/log"
  fi
}
report loader $loader
report request $request
exit $status
