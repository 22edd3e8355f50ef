# Every target sets up .venv first where it needs it; nothing else has to be installed by hand.

PYTHON ?= python3
N      ?= 50000
SPELLINGS ?= 12800
FILES  ?= 20000
JOBS   ?= $(shell nproc 2>/dev/null || echo 1)

BIN    := .venv/bin
READY  := .venv/.ready
# Two -q: pip's warnings are about pip itself; errors are still shown.
PIP    := $(BIN)/pip install -qq --disable-pip-version-check --no-input -c constraints.txt
# One worker per core, eight at most: each imports torch and builds its own models.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint docs dist fuzz census baseline call-paths report-assets bench-capture bench-outline bench-fuse bench-compile bench-int8 bench-backends bench-tune clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## fuse a small Llama, show that nothing changed, measure it, write build/report.html: the command `dovetail demo`
	@$(BIN)/dovetail demo --output build/report.html

test: $(READY)  ## every test but the long ones
	$(PYTEST) -m "not long"

test-all: $(READY)  ## every test
	@$(PIP) -e '.[release]'
	$(PYTEST)

lint: $(READY)  ## format, rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

docs: $(READY)  ## write the generated pages again and build the site into build/docs; a warning is an error
	$(BIN)/python docs/generate_kinds.py
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "build/docs/index.html"

dist: $(READY)  ## build wheel and source distribution into dist and check them
	@$(PIP) -e '.[release]'
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

fuzz: $(READY)  ## outline and inline N=50000 random programs, match SPELLINGS=12800 of library rules, load FILES=20000 damaged files, in JOBS= processes
	$(BIN)/python -m tests.fuzz --n $(N) --spellings $(SPELLINGS) --files $(FILES) --jobs $(JOBS)

census: $(READY)  ## every model type of transformers, built small: exported, captured, fused, differentiated; writes benchmarks/RESULTS.md
	$(BIN)/python -m tests.census --out build/census --jobs $(JOBS) --write benchmarks/RESULTS.md

baseline: $(READY)  ## dump graphs, regions and ledgers of many models and compare with the frozen dump
	$(BIN)/python -m tests.baseline --jobs $(JOBS)

call-paths: $(READY)  ## count the files of src that capture, outline, fuse, compile and a call go through
	$(BIN)/python -m benchmarks.call_paths

report-assets:  ## bundle the page of dovetail.report from report-ui; needs node and npm
	cd report-ui && npm ci --silent --no-audit --no-fund && npm run --silent check && npm run --silent build

bench-capture: $(READY)  ## capture against torch.export of the same models; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.capture --write benchmarks/RESULTS.md

bench-outline: $(READY)  ## outlining and inlining against copying the same graph; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.outline --write benchmarks/RESULTS.md

bench-fuse: $(READY)  ## planning and fusing against copying the same graph, torch's partitioner and TVM; writes benchmarks/RESULTS.md
	@$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks.fuse --write benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.fuse_llama --write benchmarks/RESULTS.md

bench-compile: $(READY)  ## compiled models against torch.compile: cold start, steady state, starting again, cost of a call; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.compile --write benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.warm_start --write benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.call_cost --write benchmarks/RESULTS.md

bench-int8: $(READY)  ## int8 against float32 on ResNet and BERT, error and speed; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.int8 --write benchmarks/RESULTS.md

bench-backends: $(READY)  ## other compilers through dovetail and alone, steady state and first result; writes benchmarks/RESULTS.md
	@$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks.backends --write benchmarks/RESULTS.md

bench-tune: $(READY)  ## tuned programs against eager, torch.compile, ONNX Runtime and OpenVINO, and how well the search searches; writes benchmarks/RESULTS.md
	@$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks.tune --write benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.tune_search --write benchmarks/RESULTS.md

clean:  ## remove .venv and everything generated
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis fuzz-failures report-ui/node_modules src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: once the pinned build is there, nothing later can pull in another one.
# The build of the package itself uses the pinned setuptools rather than the newest one.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv with pinned versions; this takes a few minutes the first time."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dovetail needs Python 3.11 or newer; set PYTHON=...")'
	@$(PYTHON) -m venv .venv
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[test,lint,docs]'
	@touch $@
