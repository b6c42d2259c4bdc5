# One task file for developers and for CI. Environments are built in a cache outside the checkout
# (see tools/envs.py); every target works from scratch as well as with a warm cache.

# A distribution's Python is built with profile-guided optimization, and runs the tests a tenth faster than
# pyenv's. It is used if it can make environments and compile extensions.
SERVES := import ensurepip, os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")
PYTHON ?= $(shell /usr/bin/python3.11 -c '$(SERVES)' 2>/dev/null && echo /usr/bin/python3.11 || \
	command -v python3.11 || command -v python3)
ENVS   := $(PYTHON) $(CURDIR)/tools/envs.py
TEST   := $(ENVS) exec test --
WHEEL  := $(ENVS) exec test --wheel --
MPICH  := $(ENVS) exec mpich --wheel --
OMPI   := $(ENVS) exec openmpi --wheel --
HVD    := $(ENVS) exec horovod --wheel --
XLA    := $(ENVS) exec xla --wheel --
RANKS  ?= 2
BENCH  ?=
ARGS   ?=

# Tests of processes have deadlines, which a crowded machine can miss. `make test` therefore waits four times
# as long as `make quick`, and reruns failed tests once, by themselves, with both results printed; only a second
# failure counts. With ASYNCCOLL_TEST_ONCE=1, as in CI, a first failure counts: a rerun would hide leaks and
# races.
export ASYNCCOLL_TEST_PATIENCE ?= 4
TWICE = $(if $(ASYNCCOLL_TEST_ONCE),$(1),$(call AGAIN,$(1)))
AGAIN = $(1) || { test $$? -eq 1 && echo "=== once more, by itself, what failed ===" && $(1) -n 0 --lf --lfnf=none; }
PYTEST := python -m pytest -q -c $(CURDIR)/pyproject.toml
# Two files at a time, each with its own worlds, since one often waits for processes to start. They run in the
# order of their names: with the largest files first, one process would run those with the longest tests at the end.
# A process that dies ends the run: with another in its place, the others would wait forever for what it had begun.
JOBS    ?= 2
AT_ONCE := -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.DEFAULT_GOAL := help
.PHONY: help demo gpt test tests memory system mpi horovod xla inside gpu soak compositions explore determined planted training faults kills nightly quick lint types docs coverage bench \
	overlap drawings pictures fix lock clean clean-envs

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## train a model on real data with its communication hidden (RANKS=2, ARGS=...)
	@$(ENVS) exec demo -- python -m asynccoll run -n $(RANKS) examples/train_digits.py $(ARGS)
	@$(ENVS) exec demo -- python examples/slow_link.py

gpt: ## train a small GPT on real text, stopped and resumed, compare it with DDP, and draw both (ARGS=--draw: only draw)
	@$(ENVS) exec demo -- python examples/compare_gpt.py $(ARGS)

# While the other environments are downloaded and compiled, run the targets that need only the first of them.
test: export ASYNCCOLL_TEST_RECORDS := $(CURDIR)/build/records
test: ## everything: lint, types, docs, then all tests on a built wheel, and a table of what ran
	@rm -rf $$ASYNCCOLL_TEST_RECORDS
	@nice $(ENVS) build test impi horovod xla mpich openmpi & built=$$!; \
		$(MAKE) --no-print-directory system && $(MAKE) --no-print-directory -j2 -O lint types docs && \
		$(MAKE) --no-print-directory memory tests && wait $$built && \
		$(MAKE) --no-print-directory mpi horovod xla; status=$$?; kill $$built 2>/dev/null; \
		if test -d $$ASYNCCOLL_TEST_RECORDS; then $(PYTHON) $(CURDIR)/tools/ran.py $$ASYNCCOLL_TEST_RECORDS; fi; \
		exit $$status

# By default, tests/by_day.py selects among cases that differ little; `make nightly` runs all.
tests memory mpi horovod xla: export ASYNCCOLL_TEST_CASES ?= day
BY_DAY = $(filter day,$(ASYNCCOLL_TEST_CASES))

tests:
	@$(ENVS) build impi
	@$(call TWICE,$(WHEEL) $(PYTEST) $(AT_ONCE) $(CURDIR)/tests $(ARGS))

# The files whose cases run on any backend, at every world size.
EVERY_BACKEND := all_gather all_reduce all_to_all autograd barrier broadcast checks children clocks coalescing \
	composed compositions empties faults finish_interrupts forks fusion gather groups lanes modes objects p2p prepare reduce \
	reduce_scatter refusals scaling scatter sync_parity training work

memory: ## the tests that run on any backend, between ranks with shared memory
	@$(call TWICE,$(WHEEL) env ASYNCCOLL_TEST_BACKENDS=memory $(PYTEST) $(AT_ONCE) \
		-k memory $(patsubst %,$(CURDIR)/tests/test_%.py,$(EVERY_BACKEND) five_ranks) $(ARGS))

# The file that starts whole jobs takes longest, so it goes first: at the end, it would leave one core idle.
MPI_TESTS := $(patsubst %,$(CURDIR)/tests/test_%.py,mpi_launch $(EVERY_BACKEND) five_ranks mismatch mpi mpi_levels \
	spawn parallel ranks_fixture slurm_mpi pages blocks)
ON_MPI    := env ASYNCCOLL_TEST_BACKENDS=mpi
MPI_CASES := $(PYTEST) $(AT_ONCE) -k
# The ten training loops run on two ranks, and on three, as a world size that is not a power of two.
MPI_WAYS  := "mpi and not (mpi-4 and comes_to_what_one_process_does)"
OMPI_WAYS := ASYNCCOLL_TEST_RUNNERS=asyncio ASYNCCOLL_TEST_WORLD_SIZES=3
# Tests of our own code that do not depend on the MPI library run only on MPICH.
OMPI_TESTS := $(filter-out $(patsubst %,$(CURDIR)/tests/test_%.py,clocks coalescing composed compositions empties five_ranks \
	forks fusion mismatch parallel prepare refusals spawn training), \
	$(MPI_TESTS))

TWO_RANKS := ASYNCCOLL_TEST_WORLD_SIZES=2 ASYNCCOLL_TEST_RUNNERS=asyncio

mpi: ## the tests that run on any backend, on MPI: with MPICH, then with Open MPI
	@$(call TWICE,$(MPICH) $(ON_MPI) $(MPI_CASES) $(MPI_WAYS) $(MPI_TESTS) $(ARGS))
	@$(call TWICE,$(OMPI) $(ON_MPI) $(OMPI_WAYS) $(MPI_CASES) mpi $(OMPI_TESTS) $(ARGS))

system: ## install the Debian packages that some tests need (e.g. SLURM), if run as root
	@$(PYTHON) $(CURDIR)/tools/system.py

# The same on Horovod, which has no point-to-point messages: under horovodrun, and objects again with
# horovod.run, which differs only in how ranks are started; nightly all collectives, on more ranks.
HVD_TESTS := $(patsubst %,$(CURDIR)/tests/test_%.py,$(filter-out p2p sync_parity,$(EVERY_BACKEND)) horovod pages)
# Nightly with four and five ranks, each of which wakes up a thousand times a second: a call of other ranks then
# takes most of a second, so these run one at a time.
HVD_JOBS  := $(patsubst %,$(CURDIR)/tests/test_%.py,horovod_launch sync_horovod five_ranks horovod_wheel blocks)
HVD_RUN_FEW := $(CURDIR)/tests/test_objects.py
HVD_RUN_ALL := $(HVD_RUN_FEW) $(patsubst %,$(CURDIR)/tests/test_%.py,all_gather all_reduce all_to_all barrier \
	broadcast gather groups reduce reduce_scatter scaling scatter)
HVD_RUN   := ASYNCCOLL_TEST_HOROVOD_START=horovod.run
# The ten training loops take 18 seconds on two ranks, and 100 on three.
HVD_WAYS := -k "horovod and not (horovod-3 and comes_to_what_one_process_does)"

horovod: export ASYNCCOLL_TEST_BACKENDS := horovod
horovod: export ASYNCCOLL_TEST_WORLD_SIZES := 1,2,3
horovod: ## the tests that run on any backend, on Horovod (compiled on the first run)
	@$(call TWICE,$(HVD) $(PYTEST) $(AT_ONCE) $(HVD_WAYS) $(if $(BY_DAY),$(HVD_JOBS)) $(HVD_TESTS) $(ARGS))
	@$(if $(BY_DAY),true,$(call TWICE,$(HVD) $(PYTEST) $(HVD_JOBS) $(ARGS)))
	@$(call TWICE,$(HVD) env $(HVD_RUN) $(TWO_RANKS) $(PYTEST) $(AT_ONCE) $(HVD_RUN_FEW) $(ARGS))

# Replicas are threads. Each file about torch_xla itself runs in a separate process, which may abort or hang; the
# other files share their worlds, as on any backend.
APART      := python $(CURDIR)/tools/apart.py --limit 900 --jobs 2 -q -c $(CURDIR)/pyproject.toml
TESTS_OF    = $(patsubst %,$(CURDIR)/tests/test_%.py,$(1))
ON_XLA     := env ASYNCCOLL_TEST_BACKENDS=xla-tpu
XLA_ITSELF := xla xla_soak xla_training xla_launch xla_replicas sync_xla
XLA_TESTS  := $(filter-out faults sync_parity,$(EVERY_BACKEND)) blocks
XLA_TWO    := ASYNCCOLL_TEST_WORLD_SIZES=2
XLA_OTHERS := ASYNCCOLL_TEST_WORLD_SIZES=1,4 ASYNCCOLL_TEST_RUNNERS=asyncio
XLA_SIZES  := all_gather all_reduce autograd broadcast groups objects reduce_scatter scatter
OLD_TORCH  := all_gather all_reduce autograd checks compiled fusion lanes objects overlap runtime work

xla: ## on torch_xla's CPU client: its own tests, and those that run on any backend; gloo with its older torch
	@$(XLA) $(ON_XLA) $(XLA_TWO) $(APART) $(ARGS) $(call TESTS_OF,$(XLA_ITSELF))
	@$(call TWICE,$(XLA) $(ON_XLA) $(XLA_TWO) $(PYTEST) $(AT_ONCE) -k xla $(call TESTS_OF,$(XLA_TESTS)) $(ARGS))
	@$(call TWICE,$(XLA) $(ON_XLA) $(XLA_OTHERS) $(PYTEST) $(AT_ONCE) -k "xla-tpu-1 or xla-tpu-4" \
		$(call TESTS_OF,$(XLA_SIZES)) $(ARGS))
	@$(call TWICE,$(XLA) env $(TWO_RANKS) $(PYTEST) $(AT_ONCE) -m "not slow" $(call TESTS_OF,$(OLD_TORCH)) $(ARGS))

inside: ## the programs of docs/inside.md: inside accelerate, Fabric, Lightning and Ray
	@$(ENVS) exec inside -- $(PYTEST) $(call TESTS_OF,inside) $(ARGS)

gpu: ## on a machine with a GPU: nccl in a world of one, gloo on CUDA tensors, stream order, measurements
	@$(PYTHON) $(CURDIR)/tools/gpu.py look
	@$(ENVS) exec gpu --wheel -- python $(CURDIR)/tools/gpu.py run $(ARGS)

soak: ## CALLS=1000000 mixed calls with waits cut short, on 2 and 4 ranks: wrong results, leaks; 10,000 on torch_xla
	@$(TEST) env PYTHONPATH=$(CURDIR) python $(CURDIR)/tests/soaks.py $(or $(CALLS),1000000) $(ARGS)
	@for run in 1 2 3 4 5; do \
		$(XLA) env ASYNCCOLL_TEST_SOAK=2000 ASYNCCOLL_TEST_SEED=$$run \
			$(APART) -k 4 $(call TESTS_OF,xla_soak) || exit 1; done

# BACKEND is a backend of the tests, ON an environment of tools/envs.py: make compositions BACKEND=mpi ON=mpich
BACKEND ?= gloo
ON      ?= test
SECONDS ?= 600
compositions: ## draw programs that combine all features, and check their results (SECONDS=3600, SIZES=2,3)
	@$(ENVS) exec $(ON) -- env ASYNCCOLL_TEST_BACKENDS=$(BACKEND) \
		python $(CURDIR)/tests/explore_compositions.py $(SECONDS) $(SIZES)

explore: ## the same in simulated worlds, in many orders each (SECONDS=3600, SIZES=2,3, STATE=FILE: resume from there)
	@$(TEST) env STATE=$(STATE) STATEMENTS=$(or $(STATEMENTS),each) python $(CURDIR)/tests/explore_simulated.py $(SECONDS) $(SIZES)

determined: ## check that a seed determines the digest: PROGRAMS=10000 drawn ones, with faults, in two processes
	@$(TEST) env PYTHONPATH=$(CURDIR) python $(CURDIR)/tests/determined.py $(or $(PROGRAMS),10000)

planted: ## plant mistakes into the library, one at a time: how soon are they found? (SECONDS each; ARGS=training: by drawn trainings)
	@$(TEST) env PYTHONPATH=$(CURDIR) python $(CURDIR)/tests/planted.py $(SECONDS) $(ARGS)

training: ## draw trainings, and check that they end like in one process (SECONDS=3600, SIZES=2,3)
	@$(ENVS) exec $(ON) -- env ASYNCCOLL_TEST_BACKENDS=$(BACKEND) \
		python $(CURDIR)/tests/explore_training.py $(SECONDS) $(SIZES)

faults: ## every fault on BACKEND (docs/faults.md), with operations and ways of waiting in pairs, in fresh processes (FAULTS=some: one of each)
	@$(ENVS) exec $(ON) -- env ASYNCCOLL_TEST_FAULTS=$(or $(FAULTS),all) ASYNCCOLL_TEST_BACKENDS=$(BACKEND) \
		$(PYTEST) $(AT_ONCE:loadfile=load) $(call TESTS_OF,faults_matrix) $(ARGS)

kills: ## kill a rank at a random moment, KILLS=1000 times: which rank is named, how soon, what is leaked
	@$(TEST) env PYTHONPATH=$(CURDIR) python $(CURDIR)/tests/kills.py $(or $(KILLS),1000) $(ARGS)

# The environment in which each backend's tests run: BACKEND:ON.
EVERYWHERE := gloo:test memory:test mpi:mpich mpi:openmpi horovod:horovod xla-tpu:xla
DRAWN      := all_gather all_reduce all_to_all broadcast codecs compositions env fusion nodes p2p reduce_scatter scatter
nightly: ## the long tests, with more seeds: drawn data, programs (SECONDS per backend), trainings, soak
	@env HYPOTHESIS_PROFILE=explore ASYNCCOLL_TEST_RUNNERS=asyncio $(WHEEL) $(PYTEST) $(AT_ONCE) $(call TESTS_OF,$(DRAWN))
	@for one in $(EVERYWHERE); do \
		$(MAKE) --no-print-directory compositions BACKEND=$${one%:*} ON=$${one#*:} || exit 1; done
	@$(MAKE) --no-print-directory tests memory mpi horovod xla ASYNCCOLL_TEST_CASES=all
	@env $(HVD_RUN) ASYNCCOLL_TEST_BACKENDS=horovod ASYNCCOLL_TEST_WORLD_SIZES=1,2,3 ASYNCCOLL_TEST_RUNNERS=asyncio \
		$(HVD) $(PYTEST) $(AT_ONCE) $(HVD_RUN_ALL)
	@env ASYNCCOLL_TEST_MEETING_RANKS=40 ASYNCCOLL_TEST_PATIENCE=1 $(WHEEL) $(PYTEST) -k name_server $(call TESTS_OF,meeting)
	@$(MAKE) --no-print-directory explore determined training soak inside
	@for one in gloo:test mpi:mpich horovod:horovod xla-tpu:xla; do \
		$(MAKE) --no-print-directory faults BACKEND=$${one%:*} ON=$${one#*:} || exit 1; done
	@$(TEST) env PYTHONPATH=$(CURDIR) python $(CURDIR)/tests/stalls.py 1000
	@$(TEST) env PYTHONPATH=$(CURDIR) python $(CURDIR)/tests/stalls.py 100000 1 simulated
	@$(MAKE) --no-print-directory kills

# Files that start whole programs, or run many schedules, are left to `make test`.
PROGRAMS  := blocks cli cli_ends cli_hosts compiled endings examples exit faults faults_matrix hosts howtos launchers leaving meeting \
	memory_containers memory_hosts meshes nodes notebook packaging parallel ranks_fixture slurm spawn sync_environment sync_launch \
	settings trace_page where
SCHEDULES := confirming memory_soak shifts simulated_found simulated_memory simulated_messages training_generated \
	training_simulated xla_training
INNER     := -m "not slow" $(patsubst %,--ignore=tests/test_%.py,$(PROGRAMS) $(SCHEDULES))

quick: export ASYNCCOLL_TEST_PATIENCE = 1
quick: export ASYNCCOLL_TEST_CASES ?= $(if $(ARGS),all,day)
quick: ## the inner loop: quick tests, on two ranks and asyncio; four to seven minutes (or all of ARGS=tests/test_x.py)
	@$(TEST) $(if $(ARGS),,env $(TWO_RANKS)) python -m pytest -q $(or $(ARGS),$(AT_ONCE) $(INNER))

lint: ## formatting, lint rules, and import contracts
	@$(TEST) ruff format --check --output-format concise
	@$(TEST) ruff check --output-format concise
	@$(TEST) lint-imports --no-cache --no-logo

fix: ## let the formatter and the linter fix what they can
	@$(TEST) ruff format
	@$(TEST) ruff check --fix

types: ## strict mypy, also on examples of users' code; pyright on these; and that every exported name has a declared type
	@$(TEST) mypy
	@$(TEST) pyright tests/typed
	@$(TEST) python tools/complete.py

docs: ## build the documentation into build/docs, with warnings as errors
	@$(WHEEL) python -m sphinx -q -W --keep-going -b html $(CURDIR)/docs $(CURDIR)/build/docs

# Every backend at two ranks, each way of waiting once: more ranks reach no further lines.
COVERED := $(PYTHON) $(CURDIR)/tools/covered.py
coverage: export ASYNCCOLL_TEST_WORLD_SIZES := 2
coverage: export ASYNCCOLL_TEST_ONCE := 1
coverage: ## lines and branches covered by the tests, over all ranks, threads, backends and simulated worlds
	@$(COVERED) clean
	@$(COVERED) run $(MAKE) --no-print-directory -k tests memory mpi horovod xla || echo "some tests failed: see above"
	@$(COVERED) report

bench: ## collectives compared with other libraries (RANKS=2 ARGS="all_gather -e 1M"), or BENCH=responsiveness, fusion, objects
	@$(TEST) python -m asynccoll $(if $(BENCH),run -n $(RANKS) benchmarks/$(BENCH).py,bench --ranks $(RANKS)) $(ARGS)

overlap: ## measure what overlap hides, compared with DDP and Horovod; as root also over a 1 Gbit/s link (ARGS=...)
	@$(ENVS) exec horovod -- python benchmarks/overlap.py $(ARGS)

drawings: ## draw the pictures of docs/concepts.md into docs/images
	@$(TEST) python $(CURDIR)/tools/drawings.py

pictures: drawings ## the same, and run and draw the benchmarks of latency, fusion, growth and memory (ARGS="--only memory")
	@$(TEST) env ASYNCCOLL_MEMORY=0 python -m asynccoll bench --sizes 4,4K,64K,1M,16M --plot docs/images/latency.svg
	@$(TEST) python benchmarks/pictures.py $(ARGS)

lock: ## resolve the newest versions of all tools into tools/requirements/constraints.txt
	@$(ENVS) lock

clean: ## delete what builds and tools have left in the checkout
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-envs: ## delete the cached environments as well
	@$(ENVS) clean
