# Every target makes its own .venv from a bare python3 and does all the set-up.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
# pytest processes. Each holds JAX and compiles; two suit a 2-core machine.
WORKERS ?= 2
# Another Python, 3.12 or newer, for `make kernels`.
NEWER ?= python3

VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module when it is first imported. pip would compile all of
# them, half of its time, and most are never imported.
INSTALL := pip install -qq --disable-pip-version-check --no-compile

.PHONY: quickstart test slow kernels kernels-env jetstream wheel soak lint types buildifier check format docs clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m jetrl_jax.main --config=configs/quickstart.py \
	  --workdir=runs/quickstart

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What a change must pass as well, left out of `test` to keep that short.
slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --run-slow -m slow

# The tests of kernels, which are interpreted on a CPU: that needs jax 0.11, and
# so Python 3.12. In an environment of its own if .venv has an older one.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 12))'
# kernels-env makes that environment alone.
kernels kernels-env: $(VENV)/.created
	@if $(BIN)/python $(NEW_ENOUGH); then \
	  test $@ = kernels-env || exec $(MAKE) --no-print-directory kernel-tests; \
	  exit; \
	fi; \
	python=$$(for p in $(NEWER) python3.14 python3.13 python3.12; do \
	  $$p $(NEW_ENOUGH) 2>/dev/null && echo $$p && break; done); \
	test -n "$$python" || { echo 'skipped: no Python 3.12 or newer here, which' \
	  'jax 0.11 needs, and the kernels with it'; exit 0; }; \
	$(MAKE) --no-print-directory VENV=$(VENV)/kernels PYTHON=$$python \
	  $(if $(filter kernels,$@),kernel-tests,installed-dev)

installed-dev: $(VENV)/.installed-dev

kernel-tests: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --run-slow \
	  -m mosaic $(shell grep -rl --include='test_*.py' 'needs_mosaic' tests)

# JetStream's real orchestrator and server over the engine. google-jetstream is
# added to what .venv has, without the TensorFlow that it does not need here. A
# thread of JetStream's that fails kills the process: what it says is shown.
jetstream: $(VENV)/.jetstream/.installed
	PYTHONPATH=$(abspath $(VENV)/.jetstream) $(BIN)/python -m pytest -m jetstream --capture=no tests/serve

# sdist and wheel, tried in an empty environment outside the clone: minutes.
wheel: $(VENV)/.created
	$(BIN)/python -m tools.try_wheel

# The long tests in full, with a record of them: half an hour and more.
soak: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.soak --workers=$(WORKERS) --output=runs/soak

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/pyink --check --quiet .

types: $(VENV)/.installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# BUILD as buildifier writes it; says so where it cannot be had.
buildifier: | $(VENV)/.created
	@command -v npm >/dev/null || { echo 'skipped: no npm here'; exit 0; }; \
	npm install --silent --no-audit --no-fund --prefix $(VENV)/buildifier \
	  @bazel/buildifier@8.2.1 || \
	  { echo 'skipped: npm cannot install @bazel/buildifier'; exit 0; }; \
	$(VENV)/buildifier/node_modules/.bin/buildifier -mode=check -lint=warn \
	  BUILD MODULE.bazel

# The tests last, so that pytest's summary is the last line.
check: lint types buildifier kernels slow test

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/pyink .

# The documentation site in site/; a link that leads nowhere fails it.
docs: $(VENV)/.docs/.installed
	PYTHONPATH=$(abspath $(VENV)/.docs):. $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) *.egg-info site

# Stamp files: the set-up runs again only when pyproject.toml changed.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jetrl_jax needs Python 3.11 or newer, and" \
	  "'$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	  "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu the module is" \
	  "in a package of its own: apt install python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "Installing jetrl_jax into $(VENV) (about a minute)"
	@$(BIN)/python -m $(INSTALL) -e .
	@touch $@

$(VENV)/.jetstream/.installed: pyproject.toml | $(VENV)/.installed-dev
	@echo "Installing google-jetstream into $(VENV)/.jetstream"
	@$(BIN)/python -m $(INSTALL) --no-deps \
	  --upgrade --target $(VENV)/.jetstream \
	  google-jetstream==0.2.2 grpcio prometheus-client shortuuid
	@touch $@

$(VENV)/.docs/.installed: pyproject.toml | $(VENV)/.created
	@echo "Installing mkdocs-material and mkdocstrings into $(VENV)/.docs"
	@$(BIN)/python -m $(INSTALL) --upgrade \
	  --target $(VENV)/.docs 'mkdocs-material>=9.6,<10' 'mkdocstrings[python]>=0.29'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	@echo "Installing jetrl_jax[dev] into $(VENV) (about a minute)"
	@$(BIN)/python -m $(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed
