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

# The same commands as for a real data set; a demo that was stopped goes on where it was.
DEMO := runs/demo
DEMO_BUILD := source=tabletop source.task=object_search cameras.camera_keys=[base,wrist] \
	cameras.view_width=64 cameras.view_height=32 source.frame_size=64
DEMO_EVAL := eval=closed_loop name=demo env.task=object_search env.num_episodes=100 env.frame_size=64

demo: export OMP_NUM_THREADS = 2
demo: setup
	$(BIN)/python -m data.build $(DEMO_BUILD) source.split=train source.num_episodes=800 out=$(DEMO)/shards/train
	$(BIN)/python -m data.build $(DEMO_BUILD) source.split=val source.num_episodes=20 out=$(DEMO)/shards/val
	$(BIN)/python train.py experiment=memer_tabletop name=demo run_id=planner \
		data.train.demos.root=$(DEMO)/shards/train data.val.demos.root=$(DEMO)/shards/val
	$(BIN)/python eval.py $(DEMO_EVAL) run_id=with_memory policy=$(DEMO)/planner/export
	$(BIN)/python eval.py $(DEMO_EVAL) run_id=without_memory policy=$(DEMO)/planner/export planner=no_memory
	$(BIN)/python eval.py $(DEMO_EVAL) run_id=oracle planner=oracle
	$(BIN)/python eval.py eval=compare name=demo run_id=table \
		runs=[$(DEMO)/with_memory,$(DEMO)/without_memory,$(DEMO)/oracle]
	@echo "Reports: $(DEMO)/table/report.html $(DEMO)/with_memory/report.html $(DEMO)/planner/report.html"

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
	rm -rf $(VENV) runs
