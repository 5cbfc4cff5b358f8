# Everything a contributor runs. `make` alone lists it.

# The interpreter that .venv is made with: python3.11, on which the versions in constraints.txt were resolved, if it runs.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)

PIP_VERSION := 26.3
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# mkdocs-material's notice about its own future: not about these pages.
export NO_MKDOCS_2_WARNING := 1

SMOKE := import pathlib, torch_dataloader_utils as package; \
	home = pathlib.Path(package.__file__).parent; \
	assert home.parent == pathlib.Path.cwd(), f"imported from {home}, not from the wheel"; \
	assert (home / "py.typed").is_file(), "the wheel has no py.typed"; \
	package.StructuredDataset.create_dataloader; \
	print("the wheel imports, types included")

# Of the tests: one more than there are CPUs, at most five. A third of their time they wait for processes and deadlines.
PROCESSES := $(shell echo $$(( $$(nproc) < 4 ? $$(nproc) + 1 : 5 )))

# The files with tests that run when nothing else does: to collect all others takes seconds.
ALONE = $(shell grep -rlw "mark.alone" tests --include "test_*.py")

# The time that each long test may take, if it can choose.
MINUTES ?= 5

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test quick check format soak reliability floors bench bench-peers bench-check bench-compare bench-frameworks bench-mixtures bench-packing bench-resume bench-scale bench-gpu bench-report docs wheel clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP)  ## run the flights example
	$(BIN)/python examples/flights/demo.py

test: $(STAMP)  ## everything: check, docs, the built wheel, the tests
	$(MAKE) --no-print-directory --jobs=2 check docs wheel
	$(BIN)/python -m pytest -m "not soak and not alone" -n $(PROCESSES)
	$(BIN)/python -m pytest -m "alone and not soak" $(ALONE)

quick: $(STAMP)  ## the unit tests alone, for who edits
	$(BIN)/python -m pytest -m "not soak and not alone" -n $(PROCESSES) tests/unit

check: $(STAMP)  ## format, lint, types, layers; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(STAMP)  ## the long tests, up to MINUTES=5 each, and random examples for Hypothesis
	$(BIN)/python -m pytest -m "soak or hypothesis" --hypothesis-profile=random --minutes $(MINUTES)

reliability: $(STAMP)  ## every fault, up to MINUTES=5 each, here and with other loaders; writes docs/reliability.md
	$(BIN)/python -m benchmarks reliability --minutes $(MINUTES)

floors:  ## the tests with the oldest dependencies allowed (downloads gigabytes)
	$(PYTHON) -m venv .venv-floors
	.venv-floors/bin/python -m pip install -qq pip==$(PIP_VERSION)
	.venv-floors/bin/python -m pip install -qq --constraint floors.txt --editable . --group test
	.venv-floors/bin/python -m pytest -m "not soak and not alone" -n $(PROCESSES)
	.venv-floors/bin/python -m pytest -m "alone and not soak" $(ALONE)

bench: $(STAMP)  ## measure this library beside raw Arrow
	$(BIN)/python -m benchmarks run

bench-peers: $(STAMP)  ## measure other loaders too, each in an environment of its own (downloads gigabytes)
	$(BIN)/python -m benchmarks peers

bench-check: $(STAMP)  ## measure, and judge the ratios that are promised
	$(BIN)/python -m benchmarks check

bench-compare: $(STAMP)  ## measure those ratios in turns with another checkout: AGAINST=../old
	$(BIN)/python -m benchmarks compare --against "$(AGAINST)"

bench-frameworks: $(STAMP)  ## kill and resume trainings under each framework; writes docs/frameworks.md
	$(BIN)/python -m benchmarks frameworks

bench-mixtures: $(STAMP)  ## kill and resume mixtures with this library and with others; writes docs/mixtures.md
	$(BIN)/python -m benchmarks mixtures

bench-packing: $(STAMP)  ## pack documents with this library and with others, killed and resumed; writes docs/packing.md
	$(BIN)/python -m benchmarks packing

bench-resume: $(STAMP)  ## come back within an epoch, with this library and with others: seconds, bytes, lost rows
	$(BIN)/python -m benchmarks resume

bench-scale: $(STAMP)  ## plan and save a job of 1,000,000 files, 10,000,000 row groups and 4,096 ranks, as one rank does
	$(BIN)/python -m benchmarks scale

bench-gpu: $(STAMP)  ## train on a GPU fed from local files and from S3, with the loader and without (needs a GPU)
	$(BIN)/python -m benchmarks gpu

bench-report: $(STAMP)  ## write docs/benchmarks.md and its plots from the results
	$(BIN)/python -m benchmarks report

docs: $(STAMP)  ## build the documentation into site/
	$(BIN)/mkdocs build --quiet --strict

wheel: $(STAMP)  ## build the wheel and import it from a folder of its own
	rm -rf build/wheel build/installed
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel >/dev/null
	$(PIP) install -qq --no-deps --target build/installed build/wheel/*.whl
	@cd build/installed && PYTHONPATH="$$PWD" ../../$(BIN)/python -c '$(SMOKE)'
	@cd build/installed && PYTHONPATH="$$PWD" ../../$(BIN)/python -m torch_dataloader_utils completion --help >/dev/null

clean:  ## remove all that was made here, .venv included
	rm -rf .venv .venv-floors .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "The development tools pinned in constraints.txt need Python 3.11 or newer (the library itself: 3.10);" >&2; \
		echo "'$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1). Name another one: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install -qq pip==$(PIP_VERSION)
	$(PIP) install -qq --constraint constraints.txt --build-constraint constraints.txt --editable . --group dev
	@touch $@
