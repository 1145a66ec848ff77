# Two commands do everything on a fresh machine: `make demo` and `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

DIST    := target/dist
VERSION := v1.37.1
RELEASE := $(DIST)/lib/coracle/kubernetes/$(VERSION)
BUILT   := target/x86_64-unknown-linux-gnu/release/coracle
NODES   ?= 3
# The labs of the tests: the default of `lab/up`, and two more.
LABS := /run/coracle-lab /run/coracle-lab-2 /run/coracle-lab-3

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: demo
demo: dist ## Build, bring up a Slurm cluster on this machine, and run a workload on it as an ordinary user
	lab/up $(NODES)
	@echo
	@echo '$$ srun -N2 coracle run /opt/coracle-src/examples/hello/hello.sh    (as user1, on the host "login")'
	lab/on login user1 srun -N2 coracle run /opt/coracle-src/examples/hello/hello.sh
	@echo
	@echo 'The lab is up: lab/on login user1 starts a shell there, lab/down stops the lab.'

.PHONY: test
test: test-tools dist lint suite ## Everything that CI runs: lints, unit tests, and end-to-end tests on the lab
	@# Three labs, so that three end-to-end tests run at a time.
	down() { for lab in $(LABS); do CORACLE_LAB_DIR=$$lab lab/down; done; }; \
	down; trap down EXIT; \
	for lab in $(LABS); do CORACLE_LAB_DIR=$$lab lab/up 3; done; \
	cargo nextest run --workspace --no-fail-fast

.PHONY: test-all
test-all: test ## `make test`, then 300 faults (FAULTS=n and SEED=n choose others) and all passing conformance tests
	trap lab/down EXIT; lab/up 3; \
	CORACLE_FAULTS=$(or $(FAULTS),300) CORACLE_FAULTS_SEED=$(or $(SEED),$$RANDOM) CORACLE_FAULTS_LONGEST=30 \
		cargo nextest run --profile long --no-capture --package e2e --test faults; \
	tests/conformance/run

.PHONY: lint
lint: test-tools
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- --deny warnings
	cargo deny --log-level error check bans licenses sources
	@# Workspace dependencies that no crate uses. The compiler warns of those that a crate names and does not use.
	! comm -23 <(sed -n '/^\[workspace.dependencies\]/,/^\[/s/^\([a-z0-9_-]*\) = .*/\1/p' Cargo.toml | sort) \
		<(sed -nE 's/^([a-z0-9_-]+)(\.| = \{ )workspace = true.*/\1/p' crates/*/Cargo.toml tests/Cargo.toml | sort -u) | grep .
	@# With the flags of the build, to use its cache.
	cd kubernetes && CGO_ENABLED=0 go vet -trimpath ./...
	cd tests/conformance && go vet ./... && test -z "$$(gofmt -l .)"
	cd bench/lib/wire && go vet ./... && test -z "$$(gofmt -l .)"
	shellcheck --external-sources --source-path=SCRIPTDIR:SCRIPTDIR/..:lab kubernetes/build kubernetes/version-flags $$(find lab examples scripts bench tests .ci -type f -not -name '*.md' -not -name '*.rs' -exec grep -lE '^#!.*(bash|sh)$$' {} +)

.PHONY: advisories
advisories: test-tools ## Look for known vulnerabilities in dependencies (needs the internet)
	cargo deny check advisories

.PHONY: unit
unit: test-tools ## The tests that don't need the lab
	cargo nextest run --workspace --exclude e2e

.PHONY: fuzz
fuzz: test-tools ## Fuzz the parsers of protocols and logs, FUZZ_SECONDS=60 for each
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),60) cargo nextest run --package kubelet-api --package sandbox -E 'test(/fuzz_/)'

.PHONY: conformance
conformance: dist ## Upstream's e2e tests on the lab: FOCUS='expression' chooses (default: those known to pass); see docs/conformance.md
	tests/conformance/run $(if $(NODES),-n $(NODES)) $(if $(FOCUS),-f '$(FOCUS)') $(if $(SKIP),-s '$(SKIP)') $(if $(PROCS),-p $(PROCS)) $(if $(UPDATE),-u)

.PHONY: suite
suite: test-tools
	tests/conformance/build target/conformance

.PHONY: bench
bench: dist ## Measure start-up, pods, streams and memory on the lab; see docs/performance.md
	lab/up $(NODES)
	bench/startup
	bench/pods
	bench/inside
	bench/streams
	bench/carry

.PHONY: dist
dist: coracle kubernetes ## Build everything into target/dist: bin/coracle, bin/kubectl and upstream's programs

.PHONY: coracle
coracle: tools
	cargo build --release --locked --package coracle
	@mkdir -p $(DIST)/bin
	@# Replace by rename: the lab's hosts may be running the old program.
	@cp $(BUILT) $(DIST)/bin/.coracle.new && mv $(DIST)/bin/.coracle.new $(DIST)/bin/coracle

.PHONY: kubernetes
kubernetes: tools coracle
	kubernetes/build $(RELEASE)
	@ln -sfn ../lib/coracle/kubernetes/$(VERSION)/kubectl $(DIST)/bin/kubectl
	@# The seed of new clusters.
	$(DIST)/bin/coracle kubernetes prepare --kubernetes $(RELEASE)

.PHONY: tools
tools: ## Install missing build tools
	@scripts/install-tools

.PHONY: test-tools
test-tools:
	@scripts/install-tools tests

.PHONY: clean
clean: ## Remove all build results (but not the caches in ~/.cache/coracle)
	lab/down
	cargo clean
