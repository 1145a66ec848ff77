# Two commands do everything on a fresh machine: `make demo` and `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

DIST    := target/dist
VERSION := v1.37.1
RELEASE := $(DIST)/lib/coracle/kubernetes/$(VERSION)
BUILT   := target/x86_64-unknown-linux-gnu/release/coracle
NODES   ?= 3

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: dist
dist: kubernetes coracle ## Build everything into target/dist: bin/coracle, bin/kubectl and upstream's programs

.PHONY: coracle
coracle:
	cargo build --release --package coracle
	@mkdir -p $(DIST)/bin
	@# Renamed into place: the lab's hosts may be running the old one.
	@cp $(BUILT) $(DIST)/bin/.coracle.new && mv $(DIST)/bin/.coracle.new $(DIST)/bin/coracle

.PHONY: kubernetes
kubernetes:
	kubernetes/build $(RELEASE)
	@mkdir -p $(DIST)/bin && ln -sfn ../lib/coracle/kubernetes/$(VERSION)/kubectl $(DIST)/bin/kubectl
