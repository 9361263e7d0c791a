# Set-up is `make demo` or `make test`: both make .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Python keeps bytecode, also where the environment says otherwise: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo check test test-all test-cpu-default test-cpu-avx2 test-cpus test-minima test-newest test-minima-cluster test-newest-cluster test-cluster test-gpu test-device test-tools lint notebooks pictures screenshots bench bench-peers fuzz docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch, Ray and the others into $(VENV): some minutes, about 7 GB"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	rm -rf runs/quickstart
	$(BIN)/raysim run configs/quickstart.yaml

# Several processes, each with a Ray of its own: much of the time they wait for it.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) -m 'not cluster and not long'

# Everything that `make test` leaves out, except the cluster tests.
test-all: setup
	$(PYTEST) -m 'long and not cluster'

# The tests that compare numbers, as other CPUs round them: without vector instructions, with those of AVX2, and with noise
# in every sum. What CPU this is does not matter: each is a limit to what PyTorch and oneDNN may use of it. Of core those that
# compute; left out are messages, own code, and tests that only ask whether two results differ.
CORE := $(patsubst %,tests/core/test_%.py,layout seeding weights)
METHODS := $(filter-out %/test_cases.py %/test_combinations.py,$(wildcard tests/methods/test_*.py)) tests/methods/livar
NUMERIC := $(CORE) $(METHODS) tests/training tests/models/test_lora.py

# For a minute while writing: lint, types, and tests of what a change breaks most often.
QUICK := $(addprefix tests/,base core config training data folders docs cli methods/test_fedvg.py methods/test_flfa.py test_structure.py)

check: lint
	$(BIN)/python -m pytest -n 2 -m 'not ray and not slow and not cluster' $(QUICK)

test-cpu-default: setup
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/python -m pytest -n 2 -m 'not ray and not cluster' $(NUMERIC)

test-cpu-avx2: setup
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest -n 2 -m 'not ray and not cluster' $(NUMERIC)

test-cpus: test-cpu-default test-cpu-avx2
	$(BIN)/python -m pytest -n 2 -p tests.support.rounding -k matches $(NUMERIC)

# The whole suite on the oldest versions that pyproject.toml allows, and on the newest there are: each in its own environment.
test-minima: PINS := -c constraints-min.txt
test-minima test-newest: test-%:
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager $(PINS) -e '.[dev]'
	$(VENV)-$*/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The cluster tests in these environments, once they are there.
test-minima-cluster test-newest-cluster: test-%-cluster:
	$(VENV)-$*/bin/python -m pytest -m cluster

test-cluster: setup
	$(BIN)/python -m pytest -m cluster

# On a machine with a GPU; all skipped elsewhere.
test-gpu: setup
	$(BIN)/python -m pytest -n 2 tests/gpu

# On a device made for the tests, which has the CPU's arithmetic and a card's rules: tests/device/other.py.
test-device: setup
	$(BIN)/python -m pytest -n 2 tests/device

# Tests of the benchmarks, and the short part of the fuzzing.
test-tools: setup
	$(BIN)/python -m pytest -n 2 tests/bench tests/fuzz

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The notebooks of docs, executed and stored with their outputs.
notebooks: setup
	$(BIN)/python -m tests.support.notebooks

# The pictures that are drawn from text; needs Graphviz (Debian: apt-get install graphviz).
pictures:
	dot -Kneato -n2 -Tsvg docs/pictures/round.dot -o docs/pictures/round.svg
	dot -Kneato -n2 -Tpng -Gdpi=144 docs/pictures/round.dot -o docs/pictures/round.png

# A sweep, some minutes long, and pictures of it in TensorBoard; needs Chromium (Debian: apt-get install chromium).
screenshots: setup
	$(BIN)/raysim tune docs/pictures/sweep.yaml
	$(BIN)/python docs/pictures/shots.py runs/pictures

bench: setup
	$(BIN)/python -m tests.bench

# Other simulators, in environments of their own below build/peers.
bench-peers: setup
	$(BIN)/python -m tests.bench.peers

# Thousands of bad configurations, damaged files and kills; a table of what came of them.
fuzz: setup
	$(BIN)/python -m tests.fuzz

# The documentation as a site in build/site. A link or anchor that leads nowhere is an error (--quiet would let it pass).
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .pytest_cache .mypy_cache .ruff_cache
