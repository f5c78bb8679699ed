# All targets make .venv first where it is missing or out of date (seconds when it is not).
.PHONY: setup test test-cluster check format clean

PYTHON := .venv/bin/python

setup:
	@launch/setup --dev

# Every test. One torch thread a process: tests start several ranks on few cores. Isolated: on a machine
# without ssh Open MPI 4 would refuse to start even local ranks.
# The unit tests share the cores file by file; those that start ranks have them to themselves.
PYTEST := OMP_NUM_THREADS=1 OMPI_MCA_plm=isolated $(PYTHON) -m pytest
test: setup
ifdef PYTEST_ARGS
	@$(PYTEST) $(PYTEST_ARGS)
else
	@$(PYTEST) -n auto --dist loadfile tests/unit
	@$(PYTEST) tests/contract tests/parallel tests/e2e
endif

# Several nodes, Slurm and Grid Engine on this machine (10 min on 2 cores): namespaces, which need root, and
# Debian's packages; what is missing is said, and its tests are skipped. Each test has both cores to itself.
test-cluster: setup
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -rs $(or $(PYTEST_ARGS),tests/cluster)

check: setup
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy

format: setup
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

# What was built or computed here; wheels in the cache stay.
clean:
	rm -rf .venv quickstart quickstart-* *.egg-info .pytest_cache .mypy_cache .ruff_cache
