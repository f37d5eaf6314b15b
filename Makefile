# One target for each task of a developer. `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build install deb tarball tour demo test proof lint bench sim fuzz

PREFIX ?= /usr/local
TARGET := $(or $(CARGO_TARGET_DIR),target)
SEEDS ?= 1..20000
PARTS ?= engine nbd-ram nbd-ssd rd dirty-limit restart fuse

help: ## print this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | expand -t 10

setup: ## install everything that building and testing need
	@tools/setup

build: ## build the release binaries in target/release: forebay and forebay-bench
	cargo build --locked --release --package forebay --package forebay-bench

install: ## install the built programs, units, manual pages and completions: make install PREFIX=/usr/local
	tools/package/tree $(TARGET)/release "$(DESTDIR)" $(PREFIX)

deb: build ## make the Debian package in target/package
	tools/package/deb $(TARGET)/release $(TARGET)/package

tarball: ## make a tarball with static programs in target/package
	tools/package/tarball $(TARGET)/package

tour: deb ## run every command of docs/user/tour.md in a Debian of its own: root, loop devices
	tools/tour $(TARGET)/package/forebay_*.deb

demo: setup build ## five minutes: the gains, a kill that loses nothing, TPC-C on a mounted disk
	$(TARGET)/release/forebay demo --out $(TARGET)/bench

test: ## run every check; the last line counts them
	@tools/test

proof: ## search for mistakes for hours: models, Miri, crashes, planted bugs, an operator
	@tools/proof

lint: ## run the checks that need no test run: format, clippy, layers, style
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked --manifest-path fuzz/Cargo.toml --all-targets -- -D warnings
	cargo xtask layers
	cargo xtask style

bench: build ## measure figures of docs/results.md, about 35 minutes: make bench PARTS=engine
	for part in $(PARTS); do $(TARGET)/release/forebay-bench $$part; done

sim: ## simulate crashes: make sim SEEDS=1..100000
	cargo run --locked --release --package forebay-sim -- run --seeds $(SEEDS)
	cargo run --locked --release --package forebay-sim -- links --seeds 0..2000

fuzz: ## run every fuzz target briefly
	fuzz/run-short
