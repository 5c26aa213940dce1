# TorchSpan's commands. Each one installs missing packages, builds only what it needs, and may be repeated: nothing is
# installed or built twice.
#   make demo [ARGS="--data DIR"]   train a model over three processes on Fashion-MNIST; 'make test' uses what this built
#   make test [ARGS="-R rpc"]       build everything and run every test; ARGS go to ctest; then tools/slow-tests lists the
#                                   slowest cases
#   make check                      arrows, project rules, classes, format, spelling, headers, code and commands in documents,
#                                   clang-tidy; CHECK_SECONDS=600 limits those that compile
#   make bench [SECTION=rpc]        run all benchmarks or one, write build/bench/*.json and report.html; LIBTORCH=torch2
#                                   uses pip's torch, ARGS=--quick measures one round
#   make python                     build the Python package as a wheel and install it in build/python/venv, beside pip's torch
#   make test-python                PyTorch's own suites from its wheel over TorchSpan, and ours; ARGS name tests
#   make fuzz [FUZZ_SECONDS=60]     feed malformed bytes to the decoders
#   make soak [SOAK_SECONDS=600]    make random calls while workers are killed and restarted
#   make survive [KILLS=50]         kill training jobs at random moments; their results must be those without kills
#   make scale [SIZES="64 256"]     measure worlds of thousands of simulated workers, write plots to build/scale
#   make long [CASES=5000]          run the randomized tests with many more cases (programs: four times CASES)
#   make package [LAYOUT=shared]    build Debian packages of the command, the libraries (static ones, or the shared one) and
#                                   the documents
#   make tarball                    pack the committed sources in build/torchspan-VERSION.tar.gz, always the same bytes
#   make docs                       build the documents and the API reference as a site in build/docs/site
#   make check-docs                 compile the code of the documents, run their commands, and build the site
#   make format | clean
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:  # two targets may build in one folder
.PHONY: demo test check bench python test-python fuzz soak survive scale long package tarball docs check-docs format clean help
MAKEFLAGS += --no-print-directory

JOBS ?= 2
# Many tests wait for other processes most of the time.
TEST_JOBS ?= $(shell expr $(JOBS) \* 2)
WORKERS ?= 3
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 600
KILLS ?= 50
CASES ?= 5000
SIZES ?= 64 256 1024 4096
ARGS ?=
# More options for CMake, at the first configuration of a build folder.
CONFIGURE ?=
# Empty: Debian's LibTorch; torch2: pip's.
LIBTORCH ?=
# Of the demo's build: release measures what users install.
PRESET ?= dev
# Of the Debian packages: static or shared.
LAYOUT ?= static
# Worker processes share the cores, so a thread pool in each would oversubscribe them.
export OMP_NUM_THREADS ?= 1
export NINJA_STATUS ?= [%f/%t] 

# Configures a preset once; afterwards ninja reruns CMake when a CMake file changes.
define configure
if [ ! -f build/$(1)/build.ninja ]; then \
  mkdir -p build; \
  echo "configuring build/$(1)"; \
  cmake --preset $(1) $(CONFIGURE) >build/configure-$(1).log 2>&1 || { cat build/configure-$(1).log; exit 1; }; \
fi
endef

demo:
	@tools/install-deps build
	@$(call configure,$(PRESET))
	@ninja -C build/$(PRESET) -j $(JOBS) torchspan_cli fashion_mnist_model_parallel
	@build/$(PRESET)/bin/torchspan run -n $(WORKERS) build/$(PRESET)/bin/fashion_mnist_model_parallel $(ARGS)

test:
	@tools/install-deps build
	@$(call configure,dev)
	@ninja -C build/dev -j $(JOBS)
	@ctest --test-dir build/dev -j $(TEST_JOBS) --test-output-size-passed 10000000 --test-output-size-failed 100000000 --no-tests=error $(ARGS) \
	  || { tools/show-failures build/dev; false; }

check:
	@tools/install-deps build check
	@$(call configure,dev)
	@tools/check $(ARGS)

bench:
	@tools/install-deps build $(if $(LIBTORCH),$(LIBTORCH)-bench)
	@$(call configure,release$(if $(LIBTORCH),-$(LIBTORCH)))
	@LIBTORCH=$(LIBTORCH) tools/run-bench "$(SECTION)" $(ARGS)

# For the torch of the environment, so pip must not build it in an environment of its own.
python:
	@tools/install-deps build python
	@rm -rf build/python/wheel
	@CXX=clang++-19 CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) build/python/venv/bin/pip wheel --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation --config-settings=build-dir=build/python/module --wheel-dir build/python/wheel .
	@build/python/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/python/wheel/*.whl
	@echo "build/python/venv/bin/python has torchspan, and build/python/wheel its wheel: see docs/python.md"

test-python: python
	@build/python/venv/bin/python tests/python/run.py $(ARGS)

fuzz:
	@tools/install-deps build fuzz
	@$(call configure,fuzz)
	@ninja -C build/fuzz -j $(JOBS) fuzzers
	@FUZZ_SECONDS=$(FUZZ_SECONDS) tools/run-fuzz $(ARGS)

scale:
	@tools/install-deps build
	@$(call configure,dev)
	@ninja -C build/dev -j $(JOBS) scale_rendezvous_test scale_rpc_test
	@mkdir -p build/scale && rm -f build/scale/measurements.jsonl
	@for program in scale_rendezvous_test scale_rpc_test; do \
	  TORCHSPAN_SCALE_WORKERS="$(SIZES)" TORCHSPAN_SCALE_OUT=build/scale/measurements.jsonl build/dev/bin/$$program; \
	done
	@tools/scale-report build/scale/measurements.jsonl build/scale | tee build/scale/table.md

soak:
	@tools/install-deps build
	@$(call configure,dev)
	@ninja -C build/dev -j $(JOBS) torchspan_soak
	@SOAK_SECONDS=$(SOAK_SECONDS) build/dev/bin/torchspan_soak

survive:
	@tools/install-deps build
	@$(call configure,dev)
	@ninja -C build/dev -j $(JOBS) torchspan_cli fashion_mnist_model_parallel fashion_mnist_ddp char_transformer_pipeline
	@tests/soak/survive.py --bin build/dev/bin --kills $(KILLS) $(ARGS)

long:
	@tools/install-deps build
	@$(call configure,dev)
	@ninja -C build/dev -j $(JOBS) pipeline_test autograd_test rpc_test sharded_test quorum_test data_parallel_test \
	  engine_test cluster_test collective_conformance_test core_test schedule_test unauthenticated_peers combinations_test
	@TORCHSPAN_CASES=$(CASES) build/dev/bin/combinations_test --gtest_filter=-*Processes.*
	@TORCHSPAN_CASES=$$(( $(CASES) / 10 )) OMP_NUM_THREADS=1 build/dev/bin/combinations_test --gtest_filter='*Processes.*'
	@TORCHSPAN_CASES=$(CASES) build/dev/bin/pipeline_test --gtest_filter='Oracle.*'
	@TORCHSPAN_CASES=$$(( $(CASES) * 4 )) build/dev/bin/autograd_test --gtest_filter='RandomPrograms.*'
	@TORCHSPAN_CASES=$(CASES) build/dev/bin/sharded_test --gtest_filter='RandomModels.*'
	@TORCHSPAN_CASES=$(CASES) build/dev/bin/data_parallel_test --gtest_filter='RandomSteps.*'
	@TORCHSPAN_CASES=$(CASES) build/dev/bin/engine_test --gtest_filter='EngineStreams.*RandomGraphs'
	@TORCHSPAN_PASSES=$$(( $(CASES) * 20 )) build/dev/bin/cluster_test --gtest_filter='*ManyPasses'
	@TORCHSPAN_CASES=$$(( $(CASES) * 200 )) build/dev/bin/rpc_test --gtest_filter='RRefProtocol.*'
	@TORCHSPAN_CASES=$$(( $(CASES) / 10 )) build/dev/bin/collective_conformance_test --gtest_filter='Simulated*'
	@TORCHSPAN_CASES=$$(( $(CASES) * 200 )) build/dev/bin/quorum_test --gtest_filter='CommitRule.*'
	@TORCHSPAN_CASES=$$(( $(CASES) / 10 )) build/dev/bin/core_test --gtest_filter='Pool*:Future.*:Task*:SimExecutor.*'
	@TORCHSPAN_CASES=$$(( $(CASES) / 5 )) build/dev/bin/schedule_test --gtest_filter='*Seed*:*Formula*'
	@TORCHSPAN_CASES=$$(( $(CASES) * 2 )) build/dev/bin/unauthenticated_peers --gtest_filter='*Flood*:*Garbage*:*Leave*'

PACKAGE := package$(if $(filter-out static,$(LAYOUT)),-$(LAYOUT))
package:
	@tools/install-deps build package
	@$(call configure,$(PACKAGE))
	@ninja -C build/$(PACKAGE) -j $(JOBS)
	@cd build/$(PACKAGE) && cpack
	@echo "build/$(PACKAGE)/packages"

# Times and owners come from the commit, so two tarballs of one commit are equal.
tarball:
	@mkdir -p build
	@version=$$(sed -n 's/^project(torchspan VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt); \
	  git -c tar.umask=0022 archive --format=tar --prefix=torchspan-$$version/ HEAD | gzip -9n >build/torchspan-$$version.tar.gz; \
	  echo "build/torchspan-$$version.tar.gz"

docs:
	@tools/install-deps docs
	@mkdir -p build/docs
	@tools/build-docs

# 'make check' compiles the code and checks the commands without running them.
check-docs:
	@tools/install-deps build docs
	@$(call configure,dev)
	@programs=$$(tools/check-commands --programs) && ninja -C build/dev -j $(JOBS) $$programs
	@tools/check-docs
	@tools/check-commands --run
	@mkdir -p build/docs
	@tools/build-docs

format:
	@tools/install-deps check
	@git ls-files -co --exclude-standard -- '*.h' '*.cpp' | while read -r file; do [ ! -f "$$file" ] || echo "$$file"; done \
	  | xargs clang-format -i

clean:
	@rm -rf build

help:
	@sed -n '1,/^SHELL/{/^#/s/^# \{0,1\}//p}' Makefile
