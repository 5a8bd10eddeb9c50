# One environment in .venv; each target installs what it needs and then runs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint clean

demo: $(VENV)/.base
	$(RUN) -m mlx_transmuter generate

test: $(VENV)/.test
	$(RUN) -m pytest --numprocesses auto

lint: $(VENV)/.dev
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(VENV)/bin/basedpyright --pythonpath $(RUN) --level error

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[dev]'
	touch $@
