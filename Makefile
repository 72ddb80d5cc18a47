# `make test` and `make train` install what is missing, build, and run. `make help` lists the rest.
#
# Layout of build/: release/ (library, command line, tests, benchmarks), asan/ and tsan/ (the tests under sanitizers),
# logs/. The Python package is imported from build/release/python, which cmake/python.cmake makes out of links to
# python/moelith with the extension module among them: nothing is installed into the Python environment, which other
# clones may share. A real `pip install .` into an empty folder is one of the tests.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

BUILD ?= build
JOBS ?= $(shell nproc)
export BUILD JOBS

.PHONY: help test train test-cpp test-python test-asan test-tsan test-fuzz test-package test-cuda test-gpu bench build \
        bootstrap format tidy clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p; s/^# \(test-PART\): /\1\t/p' Makefile | expand -t 16

test: bootstrap ## every test that this machine can run
	@scripts/run-tests

train: bootstrap ## train the language model; DATA STEPS RESUME PRESET NAME DEVICE RANKS EP ... by make variable or environment
	@scripts/build release moelith_python
	PYTHONPATH=$(BUILD)/release/python exec "$$(scripts/bootstrap print-venv)/bin/python" $(if $(RANKS),-m torch.distributed.run --standalone --nproc-per-node=$(RANKS)) -m moelith.train

# test-PART: one part of the tests: cpp, python, package, asan, fuzz, tsan, cuda
test-cpp test-python test-asan test-tsan test-fuzz test-package test-cuda: test-%: bootstrap
	@scripts/run-tests $*

test-gpu: ## the GPU tests, on a machine with an NVIDIA GPU and nvcc; fetches nothing
	@scripts/test-gpu

bench: bootstrap ## the comparisons of bench/, results under bench/results/
	@scripts/build release
	@scripts/run-benchmarks

build: bootstrap ## build everything, run nothing
	@scripts/build release

bootstrap: ## install missing packages and the Python environment
	@scripts/bootstrap

format: ## clang-format over the C++ sources
	@command -v clang-format >/dev/null || MOELITH_EXTRA_PACKAGES=clang-format scripts/bootstrap system
	@find include src reference tools tests bench examples python/moelith/_binding \
	  -name '*.hpp' -o -name '*.h' -o -name '*.cpp' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' | xargs clang-format -i

tidy: bootstrap ## clang-tidy over the library
	@command -v clang-tidy >/dev/null || MOELITH_EXTRA_PACKAGES=clang-tidy scripts/bootstrap system
	@scripts/build release
	@find src tools -name '*.cpp' ! -name '*_test.cpp' | xargs -P $(JOBS) -n 1 clang-tidy --quiet -p $(BUILD)/release

clean: ## remove what was built
	rm -rf $(BUILD) dist
