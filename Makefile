# One environment in .venv; each target installs what it needs and then runs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-quick test-gpu metal-check test-transformers fuzz lint clean

demo: $(VENV)/.base
	$(RUN) -m mlx_transmuter generate

# All tests, on the CPU backend.
test: $(VENV)/.test
	$(RUN) -m pytest --numprocesses auto

# The tests that take under two minutes together, for the time between two edits.
test-quick: $(VENV)/.test
	HYPOTHESIS_PROFILE=quick $(RUN) -m pytest --numprocesses auto -m "not slow"

# The reference tokens and logits on the GPU of a Mac, with compiled steps.
test-gpu: $(VENV)/.test
	MLX_TRANSMUTER_TEST_DEVICE=gpu $(RUN) -m pytest tests/test_goldens.py tests/test_old_folders.py

# The same, the tests of copies and a benchmark on that GPU: prints one page to paste into a report.
metal-check: $(VENV)/.test
	$(RUN) scripts/metal_check.py

# The tests that compare with transformers itself; they are skipped where it is not installed.
test-transformers: $(VENV)/.fixtures
	$(RUN) -m pytest --numprocesses auto tests/generation tests/tasks tests/test_tokenizer.py

# Broken and hostile files by the thousand, for MINUTES; what ended wrong is in fuzz-report/.
MINUTES ?= 60
fuzz: $(VENV)/.test
	$(RUN) tests/attacks/fuzz.py --minutes $(MINUTES)

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

$(VENV)/.fixtures: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[test,fixtures]'
	touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[dev]'
	touch $@
