# The virtual environment is made once, and again when pyproject.toml changes.
VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= dev,docs,xla,tpu,cuda,browser,ray
WORKERS ?= 2
RUN := $(VENV)/bin
NEWEST ?= .venv-newest
# For the tests alone: the package takes any torch from 2.9 on.
NEWEST_TORCH := torch==2.13.0
NEWEST_TESTS := $(addprefix tests/,$(addprefix program/test_,import_torchax.py torch.py torch_calls.py torch_layers.py \
	torch_operations.py torch_policy.py torch_scans.py hf_decoders.py hf_tasks.py gradients.py) \
	$(addprefix exec/,apply/test_distributed.py apply/test_split_ops.py apply/test_torch_plan.py run/test_eager_check.py) \
	$(addprefix report/test_export,.py _torch.py _pipelining.py _parallelize.py _transformers.py))
STAMP := $(VENV)/.autoshard-installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTORCH_XLA
# A program that wants another environment's packages is not ours.
unexport PYTHONPATH

.PHONY: demo readme environments check test test-newest test-full test-browser docs lint bench bench-quick bench-spmd clean

demo: $(STAMP)
	mkdir -p build
	$(RUN)/autoshard plan hf:llama3-8b --train --remat full --batch 64 --seq 8192 \
		--topology v5p:4x8x8 --mesh data=32,model=8 --out build/llama3-8b.plan.json
	$(RUN)/autoshard measure hf:llama-tiny --train --batch 8 --seq 128 --dtype float32 \
		--topology cpu:8 --mesh data=4,model=2 --check

# What the demo prints as a first run, as the README shows it, and the picture of its page.
readme: $(STAMP)
	mkdir -p build
	rm -rf build/cache
	AUTOSHARD_CACHE_DIR=build/cache $(MAKE) --silent --no-print-directory demo > build/demo.txt
	$(RUN)/python experiments/lib/readme.py build/demo.txt
	$(RUN)/python experiments/lib/picture.py build/llama3-8b.plan.json docs/report.jpg

environments: $(STAMP) $(NEWEST)/.autoshard-installed

# In one to three minutes, before each commit: the rooms whose tests need neither XLA's compiler nor a child process.
# Types are left to `make lint`.
CHECKED := $(addprefix tests/,base cost graph mlir planning/record planning/space planning/xla solver \
	$(addprefix test_,cli_rules.py glossary.py json.py kernels.py prose.py public_names.py rooms.py rules.py)) \
	$(filter-out tests/report/test_export%,$(wildcard tests/report/test_*.py))
check: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pytest -n $(WORKERS) --dist loadfile -p tests.light -m "not full and not heavy" $(CHECKED)

test: lint
	$(RUN)/pytest -n $(WORKERS) --dist loadfile

# What depends on torch, in an environment with a newer torch than PyTorch/XLA's.
test-newest: $(NEWEST)/.autoshard-installed
	$(NEWEST)/bin/pytest -n $(WORKERS) --dist loadfile $(NEWEST_TESTS)

# With the cases that `make test` leaves out, being larger ones of what it holds too.
test-full: $(STAMP)
	$(RUN)/pytest -n $(WORKERS) --dist loadfile -m "full or not full"

# The pages in a real browser. Debian's Chromium is installed if it is missing.
test-browser: $(STAMP)
	command -v chromium >/dev/null || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; }
	$(RUN)/pytest tests-browser

# The pages, with the API from the docstrings. A broken link, a missing page or bad markup fails.
docs: $(STAMP)
	$(RUN)/sphinx-build --fail-on-warning --keep-going --quiet --fresh-env --builder html docs build/docs
	! grep -rlE '<(script|link|img)[^>]+https?://' build/docs --include='*.html'  # nothing may come from the network
	@echo "The docs are in build/docs/index.html"

lint: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyrefly check --python-interpreter-path $(RUN)/python

# Folders of experiments in the order of `make bench`: what judges results first, what takes hours last. `lib` has what
# they share, and `torch_xla/programs` what torch_xla_scripts.py runs.
EXPERIMENTS := correctness models fidelity quality speed torch_xla gpu

bench: $(STAMP)
	for script in $(foreach folder,$(EXPERIMENTS),$(sort $(wildcard experiments/$(folder)/*.py))); do \
		$(RUN)/python $$script || exit 1; done

# About ten minutes: small programs against their unplanned runs, known step times, and how long a plan takes.
bench-quick: $(STAMP)
	$(RUN)/autoshard validate
	$(RUN)/python experiments/models/families.py --only hf:llama-tiny/ --again --out build/bench-quick
	$(RUN)/python experiments/speed/planning_speed.py --again --out build/bench-quick --only "llama3-8b 32x8" \
		"llama3-8b searched" "gpt2-xl searched" "resnet-50 searched"

# PyTorch/XLA's own tests of SPMD with auto-sharding and without, where PYTORCH_XLA is a checkout of it (v2.9.0); `make
# bench PYTORCH_XLA=...` runs them too, and without one both run what those tests do in words of our own.
bench-spmd: $(STAMP)
	$(RUN)/python experiments/torch_xla/torch_xla_spmd.py

clean:
	rm -rf build

$(STAMP): pyproject.toml
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	$(RUN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/other/site-packages torchax  # torch_xla brings its own
	$(RUN)/python -m autoshard.solver.warm_solver
	$(RUN)/python -m autoshard.planning.warm_planner
	touch $@

$(NEWEST)/.autoshard-installed: pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet $(NEWEST_TORCH)  # first, or pip brings the newest one
	$(NEWEST)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@
