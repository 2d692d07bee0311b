# Each target does all the set-up that a fresh machine needs, once; a second run installs nothing.
VENV   := .venv
PYTHON := $(VENV)/bin/python
READY  := $(VENV)/.ready

.PHONY: demo test soak lint clean

demo: $(READY)
	$(PYTHON) examples/pause_and_resume.py

test: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PYTHON) -m pytest -m "not soak"

soak: $(READY)
	$(PYTHON) -m pytest -m soak --timeout 7200 -s

lint: $(READY)
	$(VENV)/bin/pre-commit run --all-files

# torch is pinned and comes first, by pip: a range would let another package draw in a CUDA build of gigabytes.
$(READY): pyproject.toml Makefile
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install --quiet torch==2.13.0
	$(PYTHON) -m pip install --quiet -e '.[dev]'
	$(VENV)/bin/dlite-agent model pull
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y --no-install-recommends chromium) \
		|| { echo "run as root: apt-get install -y --no-install-recommends chromium"; exit 1; }
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
