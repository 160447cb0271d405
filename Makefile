# The commands of a source tree. Everything they install goes into $(VENV); a stamp file there says
# what is already done, so that a second run starts at once.

PYTHON ?= python3
VENV   ?= .venv
BENCH  ?=
PEERS  ?=
PASSED ?=
TURNS  ?= commit
PYTHONS ?=

# Processes that share the tests, a file of them at a time.
SHARES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
# One more where there are few: the tests of `make test` wait for programs that they start, and need little memory.
test: SHARES := $(shell n=$(SHARES); echo $$((n < 4 ? n + 1 : n)))
SHARED  = -n $(SHARES) --dist loadfile --no-loadscope-reorder

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
# Where the environment says that nothing is to be kept, each process would compile torch again, 4 s each time.
export PYTHONDONTWRITEBYTECODE :=
# What kt imports is compiled with its installation, so that its first command starts as fast as the next; all else, and
# what tests import, when it is first imported: few modules of torch, transformers or openai ever are.
LARGE  := torch|torchgen|functorch|transformers|sympy|networkx|mpmath|triton|mypy|mypyc|hypothesis|setuptools|pip
COMPILE = $(BIN)/python -m compileall -q -j 0 -x '/($(LARGE)|tests)/' kt ktcli $(VENV)/lib/python3*/site-packages >/dev/null 2>&1 || true
CMAKE   = $(firstword $(wildcard $(BIN)/cmake) cmake)
NATIVE := $(shell find native/CMakeLists.txt native/cdef.py native/include native/src -type f)
# With one of these no environment in this tree is needed (install.sh).
INSTALLER = $(shell command -v pipx || command -v uv)
# `make check` needs no torch; where it is installed, one environment does for all.
CHECKED := $(VENV)/$(if $(wildcard $(VENV)/.kt-test),.kt-test,.kt-check)
# An editable install keeps the library beside the sources: where it is gone, the stamp lies.
LOST   := $(if $(wildcard ktcli/libkt.so),,lost)

.PHONY: help chat install uninstall check test test-all published fakecuda bench bench-peers lint native page wheel pythons clean lost
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

chat: $(VENV)/.kt-chat ## install kt into .venv and talk to the built-in model
	@$(BIN)/kt chat

install: $(if $(INSTALLER),,$(VENV)/.kt-chat) ## put kt on your PATH: with pipx or uv where one is there, else a link to .venv
	@sh install.sh install "$(abspath $(VENV))"

uninstall: ## take it off again; models, chats and settings stay
	@sh install.sh uninstall "$(abspath $(VENV))"

check: $(CHECKED) ## under a minute, after each edit: the rules of the tree, the pure parts, one model; no torch
	@$(BIN)/python -m pytest --tier=check $(SHARED)

test: $(VENV)/.kt-test ## about 8 minutes on two cores, from a fresh clone: every part once, parity and laws in turns
	@$(BIN)/python -m pytest --tier=test $(SHARED)

test-all: $(VENV)/.kt-test-all build/fakecuda/.installed ## about 36 minutes on two cores: the rest in turns, C tests under sanitizers, Triton's kernels; PASSED=test leaves out what `make test` ran, TURNS=all nothing
	@$(BIN)/python -m pytest --tier=$(if $(PASSED),rest,all) --turns=$(TURNS) $(SHARED)

published: $(VENV)/.kt-test ## what published models answer: pip fetches two (350 MB) into the user's cache, once
	@$(BIN)/python -m pytest --tier=published tests/published

fakecuda: $(VENV)/.kt-test build/fakecuda/.installed ## get the torch for CUDA (720 MB) of the tests that need no GPU for it

bench: $(VENV)/.kt-chat ## measure this machine on random weights; one model: make bench BENCH="NAME --layers N"
	@$(BIN)/python benchmarks/run.py $(BENCH)

bench-peers: $(VENV)/.kt-chat ## compare with other engines, which it builds in build/peers; fewer: make bench-peers PEERS="--quick"
	@$(BIN)/python -m benchmarks.peers $(PEERS)

lint: $(VENV)/.kt-test ## ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/mypy $(filter-out benchmarks/loading.py,$(wildcard benchmarks/*.py))
	@$(BIN)/mypy -m benchmarks.loading -p benchmarks.peers

# MAKEFLAGS: cmake starts a make of its own, which must not inherit this one. The lock
# is for two builds at once; where flock is missing there is nothing to lose but that.
native: $(if $(wildcard $(BIN)/python),,$(VENV)/.kt-test) ## rebuild the library after editing C
	@mkdir -p build
	@MAKEFLAGS=--no-print-directory $(if $(shell command -v flock),flock build/.lock) sh -ec '\
	    $(CMAKE) -S native -B build/native -D KT_INPLACE=ON \
	        -D Python_EXECUTABLE="$(abspath $(BIN)/python)" >build/native.log || { cat build/native.log; exit 1; }; \
	    $(CMAKE) --build build/native --parallel'

page: ## fetch the pinned libraries of the chat page again, with npm
	@$(PYTHON) tests/server/fetch_libraries.py

wheel: $(VENV)/.kt-test ## dist/: the sdist and the wheel for PyPI, whose name says which glibc it needs
	@rm -rf build/dist dist && mkdir -p build/dist dist
	@$(BIN)/python -m build --no-isolation --outdir build/dist . >build/dist.log || { cat build/dist.log; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/dist/*.whl 2>build/audit.log || \
	    { cat build/audit.log; exit 1; }
	@cp build/dist/*.tar.gz dist && ls dist/*

pythons: wheel ## try that wheel on each Python from 3.11 that is here: install, convert, chat, make check
	@$(BIN)/python tests/pythons.py dist/*.whl $(PYTHONS)

clean: ## remove what was built, and .venv
	rm -rf .venv build dist ktcli/libkt.so ktcli/_native.py .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the private environment --------------------------------------------------------------------

$(VENV)/.kt-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "kt needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@command -v $${CC:-cc} >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || \
	    { echo "kt needs a C compiler; on Debian and Ubuntu: apt install gcc libc6-dev"; exit 1; }
	@$(PYTHON) -m venv $(VENV) </dev/null
	@touch $@

# What an installation does, from its log: the package that is fetched, the file that is compiled; on a
# terminal in one line that changes, else a line for each of the two.
define SHOW
function say(what, detail) { \
    if (tty) printf "\r\033[K  %s%s", what, detail; else if (what != last) print "  " what; \
    last = what; fflush() } \
/^ *Collecting / { say("getting packages", " (" $$2 ")") } \
/^ *\[[0-9]+\/[0-9]+\] Building / { step = $$1; gsub(/[][]/, "", step); split(step, of, "/"); \
    say("compiling " of[2] " files", ", " of[1] " begun") } \
END { if (tty) printf "\r\033[K" }
endef

# Without it the tests that need it are skipped, and say so.
build/fakecuda/.installed: tests/fakecuda/requirements.txt | $(VENV)/.kt-test
	@echo "Getting torch for CUDA into build/fakecuda (720 MB) ..."
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(filter-out -c constraints.txt,$(PIP)) --no-deps --target $(@D) -r $< </dev/null && touch $@ || echo "it could not be had; its tests are skipped"

# Python files are read from the source tree, so only these are reasons to install again.
$(VENV)/.kt-chat: $(VENV)/.kt-venv pyproject.toml constraints.txt $(NATIVE) $(LOST)
	@echo "Installing kt into $(VENV) (only when something changed) ..."
	@rm -f $@.failed; if [ -t 1 ]; then tty=1; fi; \
	    if nvidia-smi -L >/dev/null 2>&1; then extra='[gpu]'; fi; \
	    { $(filter-out --quiet,$(PIP)) --verbose -e ".$$extra" </dev/null 2>&1 || touch $@.failed; } | tee $@.log | awk -v tty=$$tty '$(SHOW)'; \
	    if [ -e $@.failed ]; then tail -n 50 $@.log; echo "kt could not be installed; all of it: $@.log"; exit 1; fi
	@$(COMPILE)
	@echo "kt is $(BIN)/kt; make install puts it on your PATH"
	@touch $@

$(VENV)/.kt-check: $(VENV)/.kt-venv pyproject.toml constraints.txt $(NATIVE) $(LOST)
	@echo "Installing kt and the tools of its quick tests into $(VENV) (only when something changed) ..."
	@$(PIP) -e '.[check]' </dev/null
	@touch $@

# The library is compiled while pip unpacks the others' packages.
$(VENV)/.kt-test: $(VENV)/.kt-venv pyproject.toml constraints.txt $(NATIVE) $(LOST)
	@echo "Installing kt and its test tools into $(VENV) (only when something changed) ..."
	@$(BIN)/python tests/requirements.py test >$@.txt
	@$(PIP) --no-deps -e . </dev/null & built=$$!; \
	    $(PIP) -r $@.txt </dev/null; had=$$?; wait $$built && exit $$had
	@touch $@

$(VENV)/.kt-test-all: $(VENV)/.kt-test
	@$(BIN)/python tests/requirements.py test-all >$@.txt && $(PIP) -r $@.txt </dev/null
	@touch $@
