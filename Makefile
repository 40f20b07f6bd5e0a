# The commands of this repository; `make help` lists them. They need root and Rust; what else is missing is installed from Debian.
SHELL := /bin/bash
NODE := integration/node/node.sh
# Cargo runs the end-to-end tests through this, so that they run in the test node.
RUNNER := CARGO_TARGET_$(shell rustc -vV | sed -n 's/^host: //p' | tr a-z- A-Z_)_RUNNER="$(CURDIR)/$(NODE) run"

.PHONY: help demo test unit e2e fuzz stress lint build dist node clean-node tools

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: build node ## tell the story with a real LLM server, print a table, write target/demo/report.json (DEMO="--repetitions 9")
	$(NODE) run target/release/demo $(DEMO)

test: unit e2e ## unit tests, then the end-to-end tests in the test node

unit: tools ## unit tests only; the end-to-end tests show as ignored
	cargo test --workspace

e2e: build node ## end-to-end tests only (STORY=name runs the stories whose name contains it)
	$(RUNNER) cargo test -p coldsnap-integration --test e2e -- --ignored --test-threads=1 $(STORY)

stress: tools ## 16 processes on one node store, killed at random, for SECONDS (60); then its check
	COLDSNAP_STRESS_SECONDS=$(or $(SECONDS),60) cargo test -p coldsnap-cli --test store_stress -- --nocapture

fuzz: ## run every fuzz target for a minute (SECONDS=600; TARGETS="gguf overlay"); needs a nightly toolchain
	fuzz/run.sh $(or $(SECONDS),60) $(TARGETS)

lint: tools ## formatting, clippy and shellcheck
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	@if command -v shellcheck >/dev/null; then shellcheck integration/node/*.sh fuzz/run.sh .ci/run; else echo "shellcheck is not installed: shell scripts not checked"; fi

build: tools ## release binaries in target/release
	cargo build --release --workspace

dist: tools ## the binaries to install on a node, in target/dist (slower to build, smaller in memory)
	cargo build --profile dist -p coldsnap-cli -p coldsnap-shim -p coldsnap-snapshotter

node: ## download and build the test node's root and model (target/node, about 1 GB, once)
	$(NODE) prepare

clean-node: ## remove the test node, its caches and logs
	rm -rf target/node

tools:
	@$(NODE) tools
