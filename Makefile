# `make help` lists the targets. Everything that is built lies in build/, .venv/ and the two packages' *.so files.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# The first that runs and is new enough; override with make PYTHON=/path/to/python.
PYTHON ?= $(shell for candidate in python3 python3.11 python3.12 python3.13 python3.14; do \
  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$candidate; break; fi; done)
VENV := .venv
VENV_PYTHON := $(CURDIR)/$(VENV)/bin/python
JOBS ?= $(shell nproc)
SETUP_DONE := $(VENV)/.setup-done
CMAKE_BUILD := cmake --build
CMAKE_CONFIGURE := cmake -G Ninja -S . --no-warn-unused-cli -DPython_EXECUTABLE=$(VENV_PYTHON)
CTEST := ctest --output-on-failure --no-tests=error --parallel $(JOBS) --test-dir
# Two makes in one checkout take turns: ninja itself does not lock its folder.
LOCKED := mkdir -p build && flock build/.lock

# Longest time of the sanitizer run of the Python suite.
SANITIZED_PYTEST_TIMEOUT_S ?= 900
PYTHON_FOLDERS := engramd client/engram_client client/engram_engines tools bench tests
CPP_FILES = $(shell find native client -name "*.h" -o -name "*.c" -o -name "*.cpp") $(wildcard tests/*/*.h tests/*/*.c tests/*/*.cpp)

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

.PHONY: setup
setup: $(SETUP_DONE) ## install system packages (as root) and the Python environment in .venv/

$(SETUP_DONE): pyproject.toml tools/install_system_packages.sh
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later on PATH; run make PYTHON=/path/to/python" >&2; exit 1; }
	@tools/install_system_packages.sh "$(PYTHON)"
	@test -x $(VENV_PYTHON) || { echo "Creating $(VENV)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "Installing Python packages into $(VENV)"
	@$(VENV_PYTHON) -m pip install --disable-pip-version-check --editable '.[test,lint]' >$(VENV)/pip.log 2>&1 || \
	  { cat $(VENV)/pip.log >&2; exit 1; }
	@touch $@

.PHONY: build
build: $(SETUP_DONE) ## build the native library, its tests, the Python modules; leaves .venv/bin/engramd
	@$(LOCKED) $(MAKE) build-unlocked

.PHONY: build-unlocked
build-unlocked: # progress is for terminals; elsewhere only what goes wrong is said
	@test -f build/release/build.ninja || $(CMAKE_CONFIGURE) -B build/release -DENGRAM_INPLACE=ON >build/configure.log || \
	  { cat build/configure.log >&2; exit 1; }
	@test -f build/release/.ninja_log || echo "Building (about a minute)"
	@if test -t 1; then $(CMAKE_BUILD) build/release --parallel $(JOBS); \
	  else $(CMAKE_BUILD) build/release --parallel $(JOBS) -- --quiet | sed '/^ninja: no work to do/d'; fi

.PHONY: demo
demo: build ## the whole way of a row: synthesise, pack, serve, hash real text, fetch, compare
	@$(VENV_PYTHON) tools/demo.py

.PHONY: test
test: build ## native tests, then the Python suite against a real daemon
	$(CTEST) build/release
	$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

# An engine's real modules need an environment of their own, which is made once.
VLLM_VERSION := 0.33.0
.PHONY: test-vllm
test-vllm: build ## the plug-in for vLLM against vLLM's real modules, in .venv-vllm/ (10 GB, some minutes at first)
	@test -f .venv-vllm/.done-$(VLLM_VERSION) || { echo "Installing vLLM $(VLLM_VERSION) into .venv-vllm"; \
	  "$(PYTHON)" -m venv .venv-vllm; .venv-vllm/bin/python -m pip install --disable-pip-version-check \
	  vllm==$(VLLM_VERSION) --editable '.[demo]' hypothesis pytest pytest-timeout >.venv-vllm/pip.log 2>&1 || \
	  { tail -n 30 .venv-vllm/pip.log >&2; exit 1; }; touch .venv-vllm/.done-$(VLLM_VERSION); }
	.venv-vllm/bin/python -m pytest tests/engines/vllm $(PYTEST_ARGS)

# What the modules that the plug-in stands on import, and no more: all of SGLang's requirements are over 15 GB of kernels.
SGLANG_VERSION := 0.5.23
SGLANG_NEEDS := torch==2.14.1 torchvision==0.29.1 transformers==5.19.0 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 \
  openai==2.8.0 sentencepiece==0.2.1 aiohttp dill einops fastapi gguf ipython msgspec orjson partial_json_parser pillow \
  psutil pybase64 requests setproctitle uvicorn
.PHONY: test-sglang
test-sglang: build ## the plug-in for SGLang against SGLang's real modules, in .venv-sglang/ (6 GB, some minutes at first)
	@test -f .venv-sglang/.done-$(SGLANG_VERSION) || { echo "Installing SGLang $(SGLANG_VERSION) into .venv-sglang"; \
	  "$(PYTHON)" -m venv .venv-sglang; { .venv-sglang/bin/python -m pip install --disable-pip-version-check \
	  $(SGLANG_NEEDS) --editable '.[demo]' hypothesis pytest pytest-timeout && \
	  .venv-sglang/bin/python -m pip install --disable-pip-version-check --no-deps sglang==$(SGLANG_VERSION); } \
	  >.venv-sglang/pip.log 2>&1 || { tail -n 30 .venv-sglang/pip.log >&2; exit 1; }; \
	  touch .venv-sglang/.done-$(SGLANG_VERSION); }
	.venv-sglang/bin/python -m pytest tests/engines/sglang $(PYTEST_ARGS)

.PHONY: lint
lint: $(SETUP_DONE) ## style, types, and the directions in which the parts may know each other
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy $(wildcard $(PYTHON_FOLDERS))
	clang-format-14 --dry-run --Werror $(CPP_FILES)
	$(VENV_PYTHON) tools/check_layers.py

.PHONY: format
format: $(SETUP_DONE) ## bring all sources into the house style
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	clang-format-14 -i $(CPP_FILES)

.PHONY: bench
bench: build ## measure; each figure is a ratio to a limit measured in the same run
	@tools/install_system_packages.sh "$(PYTHON)" bench
	$(VENV_PYTHON) bench/run.py

.PHONY: sanitize
sanitize: sanitize-native sanitize-thread sanitize-python ## native and Python tests under ASAN, UBSAN, LSAN and TSAN

# Suites that are tried with other seeds and sizes: make crash SEED=7 N=200. They print the seed with a failure.
SEED ?= $(shell echo $$((RANDOM + 1)))
N ?=
SEEDED = ENGRAM_SEED=$(SEED) $(if $(N),ENGRAM_N=$(N)) $(VENV_PYTHON) -m pytest -q -s --timeout=0 $(PYTEST_ARGS)
SEEDED_END = || { echo "failed with SEED=$(SEED) N=$(N)" >&2; exit 1; }

.PHONY: stress
stress: build ## rows fetched while 1 read in 1,000 is faulted, and the native stress tests; N rows
	ENGRAM_SEED=$(SEED) $(CTEST) build/release --label-regex stress $(SEEDED_END)
	$(SEEDED) tests/faults $(SEEDED_END)

.PHONY: scribble
scribble: build ## hostile clients that scribble over their rings; N states
	$(SEEDED) tests/hostile $(SEEDED_END)

.PHONY: crash
crash: build ## SIGKILL of packer, daemon and clients at random moments; N kills
	$(SEEDED) tests/crash tests/table/test_resume.py $(SEEDED_END)

.PHONY: gpu-soak
gpu-soak: N = 10000
gpu-soak: build ## random batches of each GPU mode against the doubles, with injected errors; N batches a mode
	$(SEEDED) tests/gpu -k random_batches $(SEEDED_END)

# Seconds for each of the fuzz targets where N, a number of inputs, is not given.
FUZZ_S ?= 30
.PHONY: fuzz
fuzz: build ## coverage-guided fuzzing of ring, control messages, handshake, manifest and safetensors; N inputs
	@tools/install_system_packages.sh "$(PYTHON)" fuzz
	@$(VENV_PYTHON) -c 'import atheris' 2>/dev/null || \
	  $(VENV_PYTHON) -m pip install --disable-pip-version-check --quiet 'atheris>=3,<4'
	@$(LOCKED) bash -eu -c '$(CMAKE_CONFIGURE) -B build/fuzz -DCMAKE_C_COMPILER=clang-14 -DCMAKE_CXX_COMPILER=clang++-14 \
	  -DENGRAM_SANITIZE=fuzz -DENGRAM_BUILD_MODULES=OFF -DENGRAM_BUILD_TESTS=OFF >build/configure.log; \
	  $(CMAKE_BUILD) build/fuzz --target fuzz_ring'
	@tools/fuzz.sh "$(VENV_PYTHON)" build/fuzz "$(SEED)" "$(FUZZ_S)" "$(N)"

# The libraries of the other architecture are unpacked beside the build; the machine's own packages stay as they are.
.PHONY: aarch64
aarch64: $(SETUP_DONE) ## cross-compile everything native for aarch64; native tests with pages of 64 KiB, under qemu-user
	@tools/install_system_packages.sh "$(PYTHON)" aarch64
	@mkdir -p build && tools/fetch_aarch64_libraries.sh build/aarch64-libraries
	@$(LOCKED) bash -eu -c '$(CMAKE_CONFIGURE) -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake \
	  -DLIBURING_FOLDER=$(CURDIR)/build/aarch64-libraries -DENGRAM_BUILD_MODULES=OFF >build/configure.log; \
	  $(CMAKE_BUILD) build/aarch64 --parallel $(JOBS) --target engram_tests engram_client engram_faults -- --quiet'
	$(CTEST) build/aarch64 --label-exclude stress

ASAN_CONFIGURE = $(CMAKE_CONFIGURE) -B build/asan -DENGRAM_SANITIZE=address
UBSAN_ENVIRONMENT = UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

.PHONY: sanitize-native
sanitize-native: $(SETUP_DONE) ## native tests under ASAN, UBSAN and LSAN
	@$(LOCKED) bash -eu -c '$(ASAN_CONFIGURE) >build/configure.log; $(CMAKE_BUILD) build/asan --target engram_tests'
	ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1 $(UBSAN_ENVIRONMENT) $(CTEST) build/asan

# Without address space randomisation, since GCC 12's thread sanitizer fails to start on kernels that randomise widely.
.PHONY: sanitize-thread
sanitize-thread: $(SETUP_DONE) ## native stress tests under TSAN
	@$(LOCKED) bash -eu -c '$(CMAKE_CONFIGURE) -B build/tsan -DENGRAM_SANITIZE=thread -DENGRAM_BUILD_MODULES=OFF \
	  >build/configure.log; $(CMAKE_BUILD) build/tsan --target engram_tests'
	TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 setarch -R $(CTEST) build/tsan --label-regex stress

# The packages are copied beside the instrumented modules and come first on the path; safe-path mode and the
# sitecustomize.py keep the checkout's own modules out, in child processes too. Python itself leaks at exit, so LSAN is
# left to the native tests. libstdc++ is loaded early because ASAN looks for its exception functions at start. Tests see
# ENGRAM_SANITIZE and may leave out bounds on memory, which shadow memory breaks.
SANITIZED_PYTHON = env PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/asan/python PYTHONMALLOC=malloc \
	ENGRAM_SANITIZE=address ASAN_OPTIONS=detect_leaks=0 $(UBSAN_ENVIRONMENT) \
	LD_PRELOAD="$(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so)" $(VENV_PYTHON)

.PHONY: sanitize-python
sanitize-python: $(SETUP_DONE) ## the Python suite's main paths over ASAN and UBSAN builds of the modules
	@$(LOCKED) bash -eu -c '$(ASAN_CONFIGURE) >build/configure.log; $(CMAKE_BUILD) build/asan --target engram_modules'
	@find build/asan/python -name '*.py' -delete
	@tar -c --exclude='*.so' --exclude=__pycache__ engramd -C client engram_client engram_engines | tar -x -C build/asan/python
	@echo 'import sys; sys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]' \
	  >build/asan/python/sitecustomize.py
	@$(SANITIZED_PYTHON) -c 'import engramd._engine as engine, engram_client._native as native, sys; \
	  sys.exit("".join(f"error: {m.__file__} is not the instrumented module\n" for m in (engine, native) \
	  if "/build/asan/" not in m.__file__) or 0)'
	timeout $(SANITIZED_PYTEST_TIMEOUT_S) $(SANITIZED_PYTHON) -m pytest -m "not slow" -q $(PYTEST_ARGS)

.PHONY: sanitize-gpu
sanitize-gpu: N = 10000
sanitize-gpu: ## gpu-soak over ASAN and UBSAN builds of modules and doubles; N batches a mode
	ENGRAM_SEED=$(SEED) ENGRAM_N=$(N) $(MAKE) sanitize-python SANITIZED_PYTEST_TIMEOUT_S=7200 \
	  PYTEST_ARGS="tests/gpu -k random_batches --timeout=0" $(SEEDED_END)

# The wheel's tools are installed when they are first needed: a C++ compiler for an old glibc is 80 MB.
WHEEL_TOOLS := $(VENV)/.wheel-tools-done
$(WHEEL_TOOLS): $(SETUP_DONE)
	@$(VENV_PYTHON) -m pip install --disable-pip-version-check --quiet --editable '.[wheel]'
	@touch $@

.PHONY: wheel
wheel: $(WHEEL_TOOLS) ## wheels for any glibc from 2.28 on, of the whole and of the client alone, into dist/
	@rm -f dist/*.whl
	@$(VENV_PYTHON) tools/build_wheel.py
	@$(VENV_PYTHON) tools/build_wheel.py --client-only

.PHONY: wheel-test
wheel-test: wheel ## install the wheels into clean environments and use them
	@$(VENV_PYTHON) tools/smoke_wheel.py

# The program and what it depends on go into an environment of their own, as Debian's Python wants it.
PREFIX ?= /usr/local
DESTDIR ?=
PROGRAM_FOLDER = $(DESTDIR)$(PREFIX)/lib/engramd
.PHONY: install
install: $(SETUP_DONE) ## program, service, user and folders, under DESTDIR and PREFIX (/usr/local)
	@rm -f dist/engramd_server-*-linux_*.whl
	@$(VENV_PYTHON) tools/build_wheel.py --plain
	@"$(PYTHON)" -m venv --clear --without-pip $(PROGRAM_FOLDER)
	@$(VENV_PYTHON) -m pip --disable-pip-version-check --python $(PROGRAM_FOLDER)/bin/python install --quiet \
	  dist/engramd_server-*-linux_*.whl
	@test -z "$(DESTDIR)" || sed -i '1s|^#!$(DESTDIR)|#!|' $(PROGRAM_FOLDER)/bin/engramd
	@install -d $(DESTDIR)$(PREFIX)/bin && ln -sfn ../lib/engramd/bin/engramd $(DESTDIR)$(PREFIX)/bin/engramd
	@install -D -m 644 -t $(DESTDIR)$(PREFIX)/lib/systemd/system deploy/engramd.service deploy/engramd.socket
	@install -D -m 644 deploy/engramd.sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/engramd.conf
	@install -D -m 644 deploy/engramd.tmpfiles.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/engramd.conf
	@test -e $(DESTDIR)/etc/engramd/engramd.toml || \
	  install -D -m 644 deploy/engramd.toml $(DESTDIR)/etc/engramd/engramd.toml
	@install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/engramd README.md CHANGELOG.md LICENSE docs/*.md
	@install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/engramd/images docs/images/*
	@install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/engramd deploy/grafana-dashboard.json deploy/seccomp-engramd.json
	@echo "Installed. Next: systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload;"
	@echo "name a table in /etc/engramd/engramd.toml; systemctl enable --now engramd"

.PHONY: clean
clean: ## remove what was built; .venv/ stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	rm -f engramd/*.so client/engram_client/*.so
	find $(wildcard $(PYTHON_FOLDERS)) -name __pycache__ -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## remove .venv/ too, and those of the engines
	rm -rf $(VENV) .venv-vllm .venv-sglang
