# Everything lives in .venv and target; nothing else of this machine is touched.
# ARGS passes settings on: make serve ARGS="--port 9000", make test ARGS="-k stop".

.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:

BIN := .venv/bin
SUITES := spine cpu deepseek-v4 scheduler faults blackwell
CARGO := $(BIN)/python tools/cargo.py
# Cargo's profile of the router in .venv. For `dev` the Rust tests have built all that it needs, and it checks overflow; what
# asks for an installed Plait builds the release afterwards.
ROUTER_PROFILE ?= release
MANIFESTS := Cargo.toml Cargo.lock pyproject.toml proto/pyproject.toml kernels/pyproject.toml worker/pyproject.toml \
             tools/install.py
RUST := $(shell find router proto -name "*.rs" -o -name Cargo.toml -o -path "*/plait_proto/families.json" -o -name schema.txt)
NATIVE := kernels/hatch_build.py kernels/compile_native.py $(wildcard kernels/csrc/*)
PYTHON_ROOMS := router/python/plait worker/plait_worker kernels/plait_kernels proto/plait_proto

# A .venv whose Python has gone is made anew.
VENV = set -e; python=$$(tools/preflight.sh); \
        $(BIN)/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv

.PHONY: help install serve test test-fast test-rust test-python test-cluster test-image acceptance fuzz audit soak \
        bench-cpu bench-scheduler lint lint-rust lint-python wheel clean

help:
	@echo "make serve      build, install into .venv and serve the demo model (ARGS=\"--port 9000\")"
	@echo "make test       every claim, reduced: Rust and Python tests"
	@echo "make test-fast  unit tests only: under 90 s once all is built"
	@echo "make install    build and install only"
	@echo "make test-cluster the chart on a real Kubernetes control plane (needs Go, etcd, kubectl)"
	@echo "make test-image the images, built with buildah and looked through (needs root, debootstrap)"
	@echo "make acceptance the suites at their full size (SUITES=\"spine cpu\": these alone)"
	@echo "make fuzz       broken bytes for every decoder (SECONDS=600, or INPUTS=1000000 TARGETS=frames)"
	@echo "make soak       hours of load and random faults: nothing grows, nothing is wrong (SOAK_SECONDS=7200)"
	@echo "make audit      licences and known vulnerabilities of all dependencies (asks osv.dev)"
	@echo "make bench-cpu  this machine's CPU, beside llama.cpp, vLLM and transformers where they are installed"
	@echo "make bench-scheduler  what planning costs, into tests/bench/results/scheduler.json and its table"
	@echo "make lint       formats, lints, types, arrows between rooms, budgets"
	@echo "make wheel      the four wheels, into dist"
	@echo "make clean      remove what make made"

# Python sources are installed in place: only Rust, C++ and the manifests ask for another build.
.venv/.installed: $(MANIFESTS) $(RUST) $(NATIVE)
	@$(VENV)
	@$(BIN)/python tools/install.py --stamp $@

.venv/.tested: $(MANIFESTS) $(RUST) $(NATIVE)
	@$(VENV)
	@$(BIN)/python tools/install.py --extras hub,test --stamp .venv/.installed --test-stamp $@ \
	    --router-profile $(ROUTER_PROFILE)

install: .venv/.installed
	@echo "plait: installed; serve with: make serve, or $(BIN)/plait serve MODEL"

serve: .venv/.installed
	@exec $(BIN)/plait serve $(ARGS)

# A run draws the cases that the run before it drew. `make acceptance` draws others, and far more.
SAME_CASES := PROPTEST_RNG_SEED=20261128

# Crates whose tests start no process and open no socket.
FAST_CRATES := plait-core plait-proto plait-text plait-openai

# Under 90 s on two cores once all is built: Rust and Python at once, a core each.
test-fast: .venv/.tested
	$(CARGO) test --locked --quiet $(FAST_CRATES:%=-p %) --no-run
	$(SAME_CASES) $(CARGO) test --locked --quiet $(FAST_CRATES:%=-p %) & rust=$$!; \
	    $(BIN)/python -m pytest -m "unit and not slow" --ignore tests/e2e $(ARGS) && wait $$rust

test: test-rust test-python

test-rust: .venv/.tested
	$(SAME_CASES) $(CARGO) test --locked --quiet

# Many tests wait for servers: three processes share two cores well, each with whole files.
test-python: .venv/.tested
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

# Built once into build/cluster: some 12 minutes on two cores.
CLUSTER_TOOLS ?= build/cluster

test-cluster: .venv/.tested .venv/.installed
	sh tests/deploy/cluster/build_tools.sh $(CLUSTER_TOOLS)
	PATH="$(abspath $(CLUSTER_TOOLS)):$$PATH" PLAIT_CLUSTER_TOOLS=$(abspath $(CLUSTER_TOOLS)) \
	    $(BIN)/python -m pytest --suite cluster --full --record --timeout 900 $(ARGS)
	@echo "plait: figures are in tests/bench/results/acceptance-cluster.json"

# Rust compiles the wheels inside: some 20 minutes on two cores. IMAGE_FLAGS="TORCH=..." as its script says.
test-image: .venv/.tested .venv/.installed
	$(IMAGE_FLAGS) sh tests/deploy/image/build_images.sh
	$(BIN)/python -m pytest --suite image --full --record --timeout 900 $(ARGS)
	@echo "plait: figures are in tests/bench/results/acceptance-image.json"

# One suite may take longer than any test may: each server's load is bounded by its client instead.
acceptance: .venv/.tested .venv/.installed
	PLAIT_CASES=1000000 $(CARGO) test --locked --quiet -p plait-core --test core -- properties moves explorer
	status=0; for suite in $(SUITES); do \
	    $(BIN)/python -m pytest --suite $$suite --full --record --timeout 3600 $(ARGS) || status=1; done; exit $$status
	@echo "plait: figures are in tests/bench/results: $(SUITES:%=acceptance-%.json)"

SECONDS := 60
TARGETS :=

# All decoders share the seconds; each gets the inputs. What failed lies in target/fuzz.
fuzz: .venv/.tested
	PYTHONPATH=tests $(BIN)/python -m fuzz.run $(TARGETS) $(if $(INPUTS),--inputs $(INPUTS),--seconds $(SECONDS)) $(ARGS)

SOAK_SECONDS := 7200

# Hours of load and faults on two cores that do nothing else. ARGS="--layout 'one host'": without namespaces.
soak: .venv/.tested .venv/.installed
	PYTHONPATH=tests $(BIN)/python tests/bench/faults/soak.py --seconds $(SOAK_SECONDS) \
	    --out tests/bench/results/soak.json $(ARGS)

# Exit code 3: the source of advisories cannot be reached from here, so nothing was checked.
audit: .venv/.tested
	$(BIN)/python tools/check_dependencies.py $(ARGS)

# On a machine that does nothing else; tests/bench/cpu/README.md says how to get the peers.
bench-cpu: .venv/.tested .venv/.installed
	$(BIN)/python tests/bench/cpu/bench_cpu.py --out tests/bench/results/cpu.json $(ARGS)

# A minute once all is built. Times depend on what else runs; instructions do not.
bench-scheduler: .venv/.tested .venv/.installed
	$(BIN)/python tests/bench/scheduler/plan_cost.py --out tests/bench/results/scheduler.json $(ARGS)
	$(BIN)/python tests/bench/scheduler/results_docs.py

lint: .venv/.tested lint-rust lint-python
	$(BIN)/python -m pytest tests/contract --quiet
	@echo "plait: formats, lints, types, arrows and budgets hold"

lint-rust:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets --quiet -- --deny warnings

lint-python: .venv/.tested
	$(BIN)/ruff format --check $(PYTHON_ROOMS) tests tools examples
	$(BIN)/ruff check $(PYTHON_ROOMS) tests tools examples
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest plait._router
	$(BIN)/lint-imports

wheel: .venv/.installed
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . ./proto ./kernels ./worker
	@ls dist/*.whl

clean:
	rm -rf .venv target dist
