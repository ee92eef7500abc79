# make setup       a virtual environment in .venv with the `imdm` command, without extras
# make run         the paper's synthetic experiment, end to end, and a story by the models that ship: a report in runs/synthetic
# make setup-test  every extra, and the tools of tests, docs and types
# make test        tests, linter, formatter, types: about four minutes
# make test-all    the same, and the tests that take longer
# make docs        the documentation site: docs/_build/html/index.html
# make dist        the wheel and the source archive, in dist/
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: setup setup-test run test test-all docs dist clean

setup: .venv/ready
setup-test: .venv/ready-test

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "imdm needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e .
	@touch $@

.venv/ready-test: .venv/ready
	$(INSTALL) -e '.[all,dev,docs]'
	@touch $@

.venv/ready-docs: .venv/ready
	$(INSTALL) -e '.[docs]'
	@touch $@

.venv/ready-dist: .venv/ready
	$(INSTALL) build
	@touch $@

run: setup
	$(BIN)/imdm reproduce synthetic
	$(BIN)/imdm show --into runs/synthetic
	$(BIN)/imdm generate --film --prompt "Once upon a time, there was a small robot"
	@echo "to see it write, and for programs: $(BIN)/pip install -e '.[serve]' && $(BIN)/imdm serve"

test: setup-test
	$(BIN)/pytest -n auto --dist loadfile -m "not slow"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-all: test
	$(BIN)/pytest -n auto --dist loadfile -m slow -rs

docs: .venv/ready-docs
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build/html
	@echo 'open docs/_build/html/index.html'

dist: .venv/ready-dist
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf .venv runs build dist docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis
