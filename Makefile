# Everything here needs only make and Python 3.10 or later; what else it takes goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
NEEDS := pyproject.toml constraints.txt $(wildcard setup.py analysis/*/*.c)
STAMP := $(shell cat $(NEEDS) | cksum | cut -d' ' -f1)
INSTALLED := .venv/installed-$(STAMP)
FRAMEWORKS := .venv/frameworks-$(STAMP)
SITE := .venv/site-$(STAMP)

.PHONY: demo test test-all check lint docs texts bench-faults bench-captures clean

demo: $(INSTALLED)  ## record a small job with one slow rank, and say which
	$(BIN)/rankscope run --standalone --nproc-per-node 4 examples/train_transformer.py --fault slow-rank

test: $(INSTALLED)  ## all but the long ones and those that record jobs of their own
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not real_job and not long"

test-all: $(INSTALLED) $(FRAMEWORKS)  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -m alone

check: lint test-all  ## what .ci/run runs

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench-faults: $(INSTALLED)  ## the fault matrix: how often the verdict is right (an hour; SIZE=--quick for minutes)
	$(BIN)/python benchmarks/faults/score.py $(SIZE)

bench-captures: $(INSTALLED)  ## the same on captures of torch.profiler (half an hour; SIZE=--quick for two minutes)
	$(BIN)/python benchmarks/captures/score.py --half report $(SIZE)

docs: $(INSTALLED) $(SITE)  ## the references, generated from the code, then the site in build/site
	$(BIN)/python docs/write_tables.py
	$(BIN)/python docs/write_detectors.py
	$(BIN)/python docs/write_commands.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

texts: $(INSTALLED)  ## the catalogs of translations, from the texts in the code; says what is left to translate
	$(BIN)/python tools/texts.py

clean:
	rm -rf .venv runs

$(INSTALLED): $(NEEDS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,ui]'
	touch $@

$(FRAMEWORKS): $(INSTALLED)  # for tests/jobs/test_frameworks.py
	$(BIN)/pip install -q -c constraints.txt -e '.[frameworks]'
	touch $@

$(SITE): $(INSTALLED)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@
