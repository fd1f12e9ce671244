# Front door of the repository: `make help`. Each target is a line or two that calls a tool.
PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 8080
CUBINS ?= auto
BIN := $(VENV)/bin
MESON = PATH="$(CURDIR)/$(BIN):$(BIN):$$PATH" meson
SOURCES := pyproject.toml meson.build meson.options $(shell find colibrid engine_c conf systemd -type f \
	-not -path '*/__pycache__/*' -not -path 'colibrid/engine/lib/*' -not -path '*.colibri/*')
C_FILES := $(shell find engine_c kernels_cu tests/cuda -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
PY_DIRS := colibrid tests engine_c/tools $(wildcard .ci/*.py bench/*.py)
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -Csetup-args=-Dcubins=$(CUBINS)
# Tests import the installed package, never the folder that make was called in.
PYTEST := PYTHONSAFEPATH=1 $(BIN)/pytest

.DEFAULT_GOAL := help
# Where venv comes without pip (Debian's python3-venv is missing), a python is left behind that the next call would use.
.DELETE_ON_ERROR:
.PHONY: help venv serve lib test test-py test-c test-asan test-valgrind test-tsan fuzz fuzz-http cross lint misra analyze format cubins bench clients config clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

venv: $(VENV)/.dev  ## .venv with the package and the development tools
serve: $(VENV)/.installed  ## install into .venv and serve the bundled model: make serve PORT=8080 HOST=127.0.0.1 CUBINS=auto
	exec $(BIN)/colibrid serve --host $(HOST) --port $(PORT)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	@test $(CUBINS) = disabled || ! command -v nvcc >/dev/null || \
		echo 'nvcc is installed: the CUDA kernels are compiled, too, for some minutes; CUBINS=disabled leaves them out'
	$(INSTALL) .
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(INSTALL) '.[dev]'
	@touch $@ $(VENV)/.installed

lib: $(VENV)/.dev  ## build the C library and copy it into the source tree, for work without installing
	test -f build/build.ninja || $(MESON) setup build -Dunit_tests=true
	$(MESON) compile -C build
	mkdir -p colibrid/engine/lib
	cp build/engine_c/libcolibri.so build/engine_c/clb_cpu_*.so build/engine_c/modules.json colibrid/engine/lib/
	test ! -d build/engine_c/cubins || cp -r build/engine_c/cubins colibrid/engine/lib/

test: lint misra analyze test-c test-asan test-valgrind test-tsan cross test-py  ## everything

test-py: $(VENV)/.dev $(VENV)/.installed  ## Python tests against the installed package: make test-py ARGS='tests/http -k chat'
	$(PYTEST) $(ARGS)

test-c: lib  ## C unit tests
	$(MESON) test -C build --print-errorlogs

test-asan: $(VENV)/.dev  ## C unit tests under the address and undefined-behaviour sanitizers
	test -f build-asan/build.ninja || $(MESON) setup build-asan -Dunit_tests=true -Dcubins=disabled -Dbuildtype=debugoptimized \
		-Db_sanitize=address,undefined
	CLB_TEST_SHORT=1 $(MESON) test -C build-asan --print-errorlogs

test-valgrind: lib  ## C unit tests under valgrind memcheck, where it is installed
	@command -v valgrind >/dev/null || { echo 'valgrind is not installed: skipped'; exit 0; } && \
		CLB_TEST_SHORT=1 $(MESON) test -C build --print-errorlogs --timeout-multiplier 10 \
		--wrapper 'valgrind --quiet --leak-check=full --show-leak-kinds=all --error-exitcode=9'

test-tsan: $(VENV)/.dev  ## rings, thread pool and steps under the thread sanitizer
	test -f build-tsan/build.ninja || $(MESON) setup build-tsan -Dunit_tests=true -Dcubins=disabled -Dbuildtype=debugoptimized \
		-Db_sanitize=thread
	CLB_TEST_SHORT=1 $(MESON) test -C build-tsan --print-errorlogs channel engine stage step_threads swap threads

config: $(VENV)/.dev  ## print conf/colibrid.yaml, its schema and its reference anew, after a change of config/settings.py
	$(BIN)/python -m colibrid.config.documents .

.PHONY: docs
docs: config  ## print every page of docs/reference that is made from the source anew
	$(BIN)/python -m colibrid.cli.reference docs/reference
	page=$$($(BIN)/python -m colibrid.http.metrics_reference) && printf '%s\n' "$$page" >docs/reference/metrics.md
	page=$$($(BIN)/python -m colibrid.http.reference tests) && printf '%s\n' "$$page" >docs/reference/api.md

clients: $(VENV)/.dev $(VENV)/.installed  ## the openai SDKs, langchain, litellm and lm-eval against a daemon: make clients ARGS=openai-3
	PYTHONSAFEPATH=1 $(BIN)/python tests/clients/run.py $(ARGS)

SECONDS ?= 60
fuzz: $(VENV)/.dev  ## loader and request block against hostile input: make fuzz SECONDS=60
	PATH="$(CURDIR)/$(BIN):$(BIN):$$PATH" engine_c/tools/fuzz.sh $(SECONDS)

CASES ?= 20000
fuzz-http: $(VENV)/.dev $(VENV)/.installed  ## a daemon against requests made from its own description: make fuzz-http CASES=20000
	$(BIN)/python tests/schema_trial.py --cases $(CASES)

MUTATIONS ?= 1000000
fuzz-mutate: $(VENV)/.dev $(VENV)/.installed  ## a daemon against mutated requests: make fuzz-mutate MUTATIONS=1000000 SEED=1
	$(BIN)/python tests/mutation_trial.py --cases $(MUTATIONS) --seed $(or $(SEED),1)

HISTORIES ?= 20000
fuzz-histories: $(VENV)/.dev $(VENV)/.installed  ## state machines of slots, scheduler, engines, detokenizers: make fuzz-histories HISTORIES=20000
	$(PYTEST) tests/batch tests/text --histories $(HISTORIES)

.PHONY: fuzz-mutate fuzz-histories lock audit sbom
SUPPLY := build-supply/bin
$(SUPPLY)/.made: pyproject.toml
	$(PYTHON) -m venv build-supply
	$(SUPPLY)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['supply'])" \
		| xargs $(SUPPLY)/pip install --quiet --disable-pip-version-check
	@touch $@

COMPILE = $(SUPPLY)/uv pip compile --quiet --universal --upgrade --generate-hashes --no-header --no-emit-index-url \
	--no-annotate --python-version 3.11
lock: $(SUPPLY)/.made  ## pin what an installation gets, with hashes, for CPU and GPU hosts
	$(COMPILE) -o requirements.lock pyproject.toml
	$(COMPILE) --extra cuda -o requirements-cuda.lock pyproject.toml

audit: $(SUPPLY)/.made  ## known weaknesses of what is locked; needs a service of advisories
	$(SUPPLY)/pip-audit --requirement requirements-cuda.lock --disable-pip --no-deps --progress-spinner off

sbom: $(SUPPLY)/.made  ## a bill of materials (CycloneDX) of an installation from requirements.lock: build/sbom.json
	mkdir -p build && rm -rf build/locked && $(PYTHON) -m venv build/locked
	build/locked/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(SUPPLY)/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --of JSON \
		-o build/sbom.json build/locked/bin/python

.PHONY: faults soak
REQUESTS ?= 100000
soak: $(VENV)/.dev $(VENV)/.installed  ## mixed requests, and nothing may grow or change: make soak REQUESTS=100000 ARGS='--plot docs/soak.png'
	$(BIN)/python bench/soak.py --device cpu --requests $(REQUESTS) $(ARGS)

faults: $(VENV)/.dev $(VENV)/.installed  ## every row of the faults table, with exact figures (idle machine, under 8 minutes): make faults ARGS=--quick
	PYTHONPATH=tests $(BIN)/python bench/faults.py $(ARGS)

AARCH64 := aarch64-linux-gnu-gcc -std=c11 -Wall -Wextra -Wconversion -Wcast-qual -Werror -O2 -fPIC -D_GNU_SOURCE \
	-D_FILE_OFFSET_BITS=64 -Iengine_c/include -Iengine_c/src -Iengine_c/cpu -Ibuild/engine_c -c -o /dev/null
cross: lib  ## compile the engine for aarch64, where a cross compiler is installed
	@command -v aarch64-linux-gnu-gcc >/dev/null || { echo 'no aarch64-linux-gnu-gcc: skipped'; exit 0; } && \
		for source in engine_c/src/*.c engine_c/cpu/*.c; do for precision in 0 1 2 3 4 5; do \
		$(AARCH64) -DCLB_MODULE_PRECISION=$$precision -DCLB_OPS_TABLE=clb_ops_generic $$source || exit 1; done; done

lint: $(VENV)/.dev  ## ruff, mypy --strict, C format, size of functions and files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/python tests/check_style.py

misra: $(VENV)/.dev  ## MISRA C:2012 but for the table of docs/MISRA.md, where cppcheck is installed
	$(BIN)/python tests/check_misra.py

analyze: lib  ## gcc -fanalyzer over the engine
	$(BIN)/python tests/check_analyzer.py build/engine_c

format: $(VENV)/.dev  ## rewrite Python and C sources in the one format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

cubins:  ## compile the CUDA kernels into build/cubins (needs nvcc): make cubins ARGS=--all
	$(PYTHON) kernels_cu/build.py --out build/cubins $(ARGS)

bench: $(VENV)/.installed  ## speed of the engine on this machine
	$(BIN)/colibrid bench engine

.PHONY: install uninstall
install:  ## environment, units and /etc/colibrid: make install PREFIX=/usr/local DESTDIR= GPU=no PYTHON=/usr/bin/python3
	systemd/install.sh install

uninstall:  ## remove them; configuration, keys, models and packs stay
	systemd/install.sh uninstall

clean:  ## remove what was built
	rm -rf build build-asan build-clients build-tsan build-fuzz build-supply dist $(VENV) colibrid/engine/lib .mypy_cache .ruff_cache .pytest_cache
