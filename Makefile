# setup: the virtual environment · demo: the whole way in minutes · test, check, bench: see README
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done

# Two test processes with one torch thread each: the suite is built for two cores.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-fast check bench clean

setup: $(SETUP)

$(SETUP): requirements.lock requirements-dev.lock requirements-test-nodeps.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-test-nodeps.lock
	touch $(SETUP)

demo: setup
	OMP_NUM_THREADS=2 $(BIN)/python -m conf.demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope

test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not slow"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py tests/conf/test_configs.py

bench: setup
	for file in tests/bench/bench_*.py; do $(BIN)/python -m tests.bench.$$(basename $$file .py) || exit 1; done

clean:
	rm -rf $(VENV) runs demo outputs
