# setup: the virtual environment · demo, demo-map: the whole way in minutes · test, check, bench: see README
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done

# Two test processes with one torch thread each: the suite is built for two cores.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo demo-map test test-fast check bench clean

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

# MaP-WAM on press_button, 50 demonstrations: language planner, world model and executor, each trained on its
# own, then the closed loop with and without progress calibration, and with the oracle's plans.
MAP := runs/demo_map
MAP_BUILD := source=tabletop source.task=press_button source.frame_size=32 \
	cameras.camera_keys=[base] cameras.view_width=32 cameras.view_height=32
MAP_DATA := data.train.demos.root=$(MAP)/shards/train data.val.demos.root=$(MAP)/shards/val
MAP_EVAL := eval=map_wam name=demo_map env.task=press_button env.num_episodes=100 executor=$(MAP)/executor/export
MAP_PLANS := language=$(MAP)/language/export visual=$(MAP)/world_model/export

demo-map: export OMP_NUM_THREADS = 2
demo-map: setup
	$(BIN)/python -m data.build $(MAP_BUILD) source.split=train source.num_episodes=50 out=$(MAP)/shards/train
	$(BIN)/python -m data.build $(MAP_BUILD) source.split=val source.num_episodes=10 out=$(MAP)/shards/val
	$(BIN)/python train.py experiment=map_language_planner_tabletop name=demo_map run_id=language $(MAP_DATA)
	$(BIN)/python train.py experiment=map_cwm_tabletop name=demo_map run_id=world_model $(MAP_DATA) max_steps=700
	$(BIN)/python train.py experiment=map_wap_tabletop name=demo_map run_id=executor $(MAP_DATA) max_steps=2500
	$(BIN)/python eval.py $(MAP_EVAL) run_id=full $(MAP_PLANS)
	$(BIN)/python eval.py $(MAP_EVAL) run_id=no_calibration $(MAP_PLANS) calibration=none
	$(BIN)/python eval.py $(MAP_EVAL) run_id=oracle_plans language=oracle visual=oracle
	$(BIN)/python eval.py eval=compare name=demo_map run_id=table \
		runs=[$(MAP)/full,$(MAP)/no_calibration,$(MAP)/oracle_plans]
	@echo "Reports: $(MAP)/table/report.html $(MAP)/full/report.html"

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
