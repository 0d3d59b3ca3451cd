# ddplab: one verb a task. Everything runs in .venv, which is made once and again when the pins change.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready

.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of interpreters, which would each compile the same files
.PHONY: help setup demo tutorials slides figures site test coverage test-reducer explore test-lab test-tutorials test-readme test-torch test-clients test-foreign test-torchrun test-install test-wheel versions mutants test-gpu gpu check format bench bench-simulator bench-timeline score house wheel clean

help:  ## list the verbs
	@echo "make VERB, where VERB is one of:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv/bin/pip: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ddplab needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 VERB")'
	$(PYTHON) -m venv .venv
	@touch $@

$(READY):          EXTRAS := dev
.venv/.tutorials:  EXTRAS := dev,tutorials
.venv/.site:       EXTRAS := dev,tutorials,site
$(READY) .venv/.tutorials .venv/.site: .venv/bin/pip
	@echo "installing ddplab[$(EXTRAS)] into .venv; with torch this takes minutes"
	@(while sleep 3 && kill -0 $$$$ 2>/dev/null; do printf '  %s in .venv, %s s\r' "$$(du -sh .venv | cut -f1)" "$$((n += 3))"; done) & \
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $(READY) $@
	@printf '\nready: `. .venv/bin/activate` gives you the command ddplab\n'

.venv/.chromium: $(READY)  # a browser for tests of pages; where it cannot be had, its tests say so and are skipped
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium) || true
	@touch $@

setup: $(READY)  ## make .venv; then `. .venv/bin/activate` gives you the command ddplab

tutorials: .venv/.tutorials  ## open the tutorials in JupyterLab
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --notebook-dir=. tutorials/00_all_reduce_opened.ipynb

slides: .venv/.tutorials  ## make slides of the tutorials with their outputs, in out/slides
	$(BIN)/python -m docs.slides

figures: $(READY)  ## draw all figures again from committed data, and their captions
	$(BIN)/python -m figures

site: .venv/.site  ## run the tutorials and make a site of them, the pages and the docstrings, in out/site
	$(BIN)/python -m docs

test-tutorials: .venv/.tutorials  ## run every tutorial from its first cell to its last, verify its exercises, look for answers in its outputs: 5 minutes
	$(BIN)/pytest -m slow --durations=10 tests/test_tutorials.py

test-readme: $(READY)  ## run the README's commands and programs as they are written: about 9 minutes
	$(BIN)/pytest -m slow tests/test_readme.py

demo: $(READY)  ## the real reducer in virtual time beside its predictions, exact to the nanosecond: seconds
	$(BIN)/ddplab demo --out out/demo

test: $(READY) .venv/.chromium  ## run the tests, in three processes, which often wait: 4 to 11 minutes on two cores
	$(BIN)/pytest -n 3 --dist worksteal

coverage: $(READY) .venv/.chromium  ## the same, and which lines of the packages ran in the processes of the tests; fails below the floor in pyproject.toml
	@mkdir -p out
	$(BIN)/pytest -n 3 --dist worksteal --cov

test-lab: $(READY)  ## test the laboratory, validation/: the score, published tables, committed runs; 3 minutes
	$(BIN)/pytest -n 2 --dist loadfile validation/tests

explore: $(READY) .venv/.chromium  ## the property tests with fresh seeds and 25 times the examples, for an hour: MINUTES=60
	$(BIN)/python -m tests.explore --minutes $(or $(MINUTES),60)

test-reducer: $(READY)  ## conformance of our DDP, for the edit-and-test loop of the reducer: under a minute
	$(BIN)/ddplab conform ddplab --against torch --exitfirst

test-torch: $(READY)  ## torch's own DDP tests with our class in torch's place, all of them: about 2 minutes
	$(BIN)/python -m tests.reference.torch_suite.run

test-clients:  ## real clients (Lightning, accelerate, transformers, peft, timm, torchft, mmengine, ignite) on our class, against torch's to the bit, in an environment of their own: 5 minutes
	test -d .venv-clients || ($(PYTHON) -m venv .venv-clients && .venv-clients/bin/pip install --quiet -r tests/clients/requirements.txt -e .)
	.venv-clients/bin/python -m tests.clients.run $(SCENARIOS)

test-foreign:  ## what other libraries train with (FSDP2, ZeRO, DeepSpeed, Megatron-core, torchft, ...), judged by `ddplab conform`, in an environment of their own: 8 minutes
	test -d .venv-foreign || ($(PYTHON) -m venv .venv-foreign && .venv-foreign/bin/pip install --quiet -r tests/foreign/requirements.txt -e '.[conform]')
	.venv-foreign/bin/python -m tests.foreign.run $(ADAPTERS)

test-torchrun: $(READY)  ## every command that trains, under torchrun: about 2 minutes
	$(BIN)/pytest -m 'slow or not slow' tests/ddplab/test_under_torchrun.py

test-install: $(READY)  ## install a wheel, a clone and each extra into empty environments, and use them: about 10 minutes
	$(BIN)/pytest -m 'slow or not slow' tests/test_getting_it.py

test-wheel: $(READY)  ## build the wheel, install it beside a user's own modules, and run tests against it: 2 minutes
	$(BIN)/pytest -m slow tests/test_wheel.py

versions: $(READY)  ## the tests that depend on torch, with the oldest torch that is promised, the pinned one and the newest: an hour
	$(BIN)/python -m tests.versions

mutants: $(READY)  ## faults planted into the reducer, docs/bugs.md, and which check of `ddplab conform` catches each: 15 minutes, JOBS=2
	$(BIN)/python -m tests.mutants.run --jobs $(or $(JOBS),2)

test-gpu: $(READY)  ## the tests that need a CUDA device; elsewhere they say that they are skipped
	$(BIN)/pytest -m gpu -rs

gpu:  ## measure all that needs a GPU, in under 9 minutes, results in validation/gpu; runs in .venv or, if there is none, in PYTHON with packages of the folder WHEELS; DRY=1 tries it on the CPU
	$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(if $(DRY),--dry) $(GPU)

check: $(READY)  ## lint, formatting and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## rewrite the code as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-simulator: $(READY)  ## how fast the simulator is, against what it must reach; figure in out/: 1 minute
	$(BIN)/python -m benchmarks.simulator

bench-timeline: $(READY) .venv/.chromium  ## redraws of the Annotated DDP, and its import of a large profile, in a headless browser: 1 minute
	$(BIN)/python -m benchmarks.annotated_ddp

score: $(READY)  ## predictions beside published figures, offline: under a minute, tables in validation/score.md
	$(BIN)/python -m validation.score

bench: $(READY)  ## our DDP and our PowerSGD beside torch's, the recorder's overhead
	$(BIN)/python -m benchmarks.ddp
	$(BIN)/python -m benchmarks.powersgd
	$(BIN)/python -m benchmarks.recorder

house: $(READY)  ## what a reader must hold in his head: measured sizes of the code base; fails if one is worse than its target
	$(BIN)/python -m docs.house

wheel: $(READY)  ## build a source distribution in dist/, and from that a wheel, to install with pip
	rm -rf dist
	$(BIN)/python -m hatchling build --target sdist --directory dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist dist/*.tar.gz

clean:  ## remove .venv and everything that was made
	rm -rf .venv out dist $$(find . -name __pycache__ -not -path './.venv/*') .pytest_cache .ruff_cache .mypy_cache .hypothesis
