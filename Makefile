# make setup     a virtual environment in .venv with the `imdm` command
# make run       the paper's synthetic experiment, end to end, and a story by the models that ship: a report in runs/synthetic
# make test      tests, linter, formatter, types: about six minutes
# make test-all  the same, and the tests that take longer
# make docs      the documentation site: docs/_build/html/index.html
# make dist      the wheel and the source archive, in dist/
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run test test-all docs dist clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "imdm needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,text,judge,mauve,tensorboard,lora,serve,lm-eval,docs]'
	@touch $@

run: setup
	$(BIN)/imdm reproduce synthetic
	$(BIN)/imdm show --into runs/synthetic
	$(BIN)/imdm generate --film --prompt "Once upon a time, there was a small robot"
	@echo 'to see it write, and for programs: $(BIN)/imdm serve'

test: setup
	$(BIN)/pytest -n auto --dist loadfile -m "not slow"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-all: test
	$(BIN)/pytest -n auto --dist loadfile -m slow -rs

docs: setup
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build/html
	@echo 'open docs/_build/html/index.html'

dist: setup
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf .venv runs build dist docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis
