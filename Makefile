# SPDX-License-Identifier: MIT
# Thin: every target sets up what it needs on Debian 12 and calls CMake, CTest or a script.
.PHONY: all demo test bench lint docs install setup setup-test clean

JOBS := $(shell nproc)
PREFIX ?= /usr/local

all: setup
	cmake --preset release
	cmake --build --preset release -j $(JOBS)

demo: all
	build/release/tools/flashmla/flashmla demo

test: setup-test
	scripts/test.sh

bench: all
	build/release/tools/flashmla/flashmla bench --json build/bench.json

lint: setup-test
	scripts/lint.sh

docs: setup-test
	scripts/docs.sh

install: all
	cmake --install build/release --prefix $(PREFIX)

setup:
	@scripts/setup.sh build

setup-test:
	@scripts/setup.sh build test

clean:
	rm -rf build
