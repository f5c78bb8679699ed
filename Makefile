# All targets make .venv first where it is missing or out of date (seconds when it is not).
.PHONY: setup test test-cluster test-gpu test-all check format clean

PYTHON := .venv/bin/python

setup:
	@launch/setup --dev

# One torch thread a process: tests start several ranks on few cores. Isolated: on a machine without ssh Open MPI 4
# would refuse to start even local ranks.
# Without GPUs: ranks of a test, often more than those there are, compute on the CPU; test-gpu has the tests of GPUs.
# Files side by side, two more than there are cores, since tests that start jobs wait for much; the longest first.
# Where bytecode is not kept (PYTHONDONTWRITEBYTECODE), every process compiles all of speechdp anew: a second of a core.
PYTEST := PYTHONDONTWRITEBYTECODE= CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 OMPI_MCA_plm=isolated $(PYTHON) -m pytest
WORKERS ?= $(shell expr $$(nproc) + 2)
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ON_THIS_MACHINE := tests/faults tests/e2e tests/parallel tests/contract tests/unit

# Every test but those of several nodes.
test: setup
	@$(PYTEST) $(or $(PYTEST_ARGS),$(SIDE_BY_SIDE) $(ON_THIS_MACHINE))

# Several nodes, Slurm and Grid Engine on this machine: namespaces, which need root, and Debian's packages; what is
# missing is said, and its tests are skipped.
test-cluster: setup
	@$(PYTEST) -rs $(or $(PYTEST_ARGS),$(SIDE_BY_SIDE) tests/cluster)

# All that needs GPUs, with the NCCL build of Horovod and benchmarks; what came of it is in gpu-report.json.
test-gpu: setup
	@$(PYTHON) launch/gpu_report.py $(GPU_ARGS)

# Both at once: what waits for a batch system leaves the cores to the others.
test-all: setup
	@$(PYTEST) -rs --durations=20 $(SIDE_BY_SIDE) tests/cluster $(ON_THIS_MACHINE)

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
