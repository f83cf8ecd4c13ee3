# `make demo` and `make test` set up everything they need in .venv, on any machine with Python 3.12 or newer.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
comma := ,
ON_GPU := $(if $(HAS_GPU),$(comma)cuda13)
WORKERS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
# The address that this clone came from, which the documentation links to.
REPOSITORY ?= $(shell git remote get-url origin 2>/dev/null | sed -E 's,^git@([^:]+):,https://\1/,; s,\.git$$,,; /^https/!d')

.PHONY: demo test test-site test-all test-gpu test-frameworks test-compile test-tpu lint docs bench clean help
help:
	@echo "make demo      train a small transformer, in a minute on two cores, and compare with stored logits"
	@echo "make test      the packages' tests that need no GPU: each mechanism once, eight to eleven minutes on two cores, less when run again"
	@echo "make test-site the documentation's code blocks, doctests, notebooks, examples, the wheel, the demo and the bench"
	@echo "make test-all  both, and the slow tests: more combinations of parameters"
	@echo "make test-gpu  the tests that need GPUs"
	@echo "make test-frameworks  Tunix, Transformers, TRL, verl, SkyRL, Levanter, MaxText, AReaL and torchtitan with our head, and Liger and CCE, in separate environments"
	@echo "make test-compile  the kernels, compiled to machine code for every GPU generation, on any machine, in its own environment"
	@echo "make test-tpu  every public function, compiled for TPUs, on any machine, in its own environment"
	@echo "make lint      ruff, mypy and the layer contracts"
	@echo "make docs      the documentation, into site/; a warning is an error"
	@echo "make bench     speed and memory on this machine"

demo: $(VENV)/.ready-demo
	$(RUN) -m examples.demo $(DEMO_ARGS)

test: $(VENV)/.ready
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal --durations=15 -m "not site and not gpu and not multi_gpu and not slow"

test-site: $(VENV)/.ready
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "site and not gpu and not multi_gpu and not slow"

test-all: test test-site
	$(RUN) -m pytest -n $(WORKERS) -m "slow and not gpu and not multi_gpu"

test-gpu: $(VENV)/.ready
	JAX_PLATFORMS=cuda,cpu XLA_FLAGS= XLA_PYTHON_CLIENT_PREALLOCATE=false $(RUN) -m pytest -m "gpu or multi_gpu"

# What AReaL imports to train under FSDP. AReaL also pins packages for its servers, with a PyTorch that is too old here.
AREAL := aiofiles aiohttp blosc colorlog datasets einops fastapi flask httpx hydra-core==1.4.0.dev1 lark numba nvidia-ml-py \
	omegaconf==2.4.0.dev2 openai orjson pebble peft psutil pybase64 python-dateutil pyzmq ray setproctitle swanlab==0.6.12 \
	tabulate tenacity tensorboardx torchdata trackio transformers==5.3.0 uvicorn uvloop wandb
# What MaxText imports to train on synthetic data. Its wheel names no dependencies; its extras install a GPU's or a TPU's.
MAXTEXT := absl-py aqtp array_record chex cloudpickle drjax grain jaxtyping jinja2 ml-collections omegaconf optax \
	orbax-checkpoint pathwaysutils pillow portpicker pydantic qwix sentencepiece sympy tensorboardX tiktoken tokamax transformers
test-frameworks:
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --upgrade pip
	.venv-frameworks/bin/python -m pip install --quiet --editable '.[torch]' 'megatron-core>=0.19.2' pytest \
		'google-tunix==0.1.7' 'trl==1.16.0' 'verl==0.9.1' optax accelerate datasets peft
	.venv-frameworks/bin/python -m pip install --quiet --no-deps \
		'skyrl==0.3.0' loguru 'liger-kernel==0.8.5' 'cut-cross-entropy==25.1.1'
	.venv-frameworks/bin/python -m pytest \
		examples/frameworks/test_tunix.py examples/frameworks/test_trl.py examples/frameworks/test_hugging_face.py examples/frameworks/test_frameworks.py \
		examples/frameworks/test_deferred_sweep.py examples/frameworks/test_deferred_training.py \
		tests/recipes/test_migration.py
	$(PYTHON) -m venv .venv-marin
	.venv-marin/bin/python -m pip install --quiet --editable '.[flax]' pytest 'marin-levanter==0.2.227.dev40316220070'
	.venv-marin/bin/python -m pytest examples/frameworks/test_marin.py
	$(PYTHON) -m venv .venv-maxtext
	.venv-maxtext/bin/python -m pip install --quiet --editable '.[flax]' pytest $(MAXTEXT)
	.venv-maxtext/bin/python -m pip install --quiet --no-deps 'maxtext==0.2.5'
	.venv-maxtext/bin/python -m pytest examples/frameworks/test_maxtext.py
	$(PYTHON) -m venv .venv-areal
	.venv-areal/bin/python -m pip install --quiet --editable '.[torch]' pytest $(AREAL)
	.venv-areal/bin/python -m pip install --quiet --no-deps 'areal==1.0.4'
	.venv-areal/bin/python -m pytest examples/frameworks/test_areal.py
	$(PYTHON) -m venv .venv-torchtitan
	.venv-torchtitan/bin/python -m pip install --quiet --editable '.[torch]' pytest 'torchtitan==0.3.0'
	.venv-torchtitan/bin/python -m pytest examples/frameworks/test_torchtitan.py

# JAX's plugin and NVIDIA's compiler, added to what .venv has; no driver and no GPU. JAX=, FLAX= choose other versions.
CUDA := nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-nvrtc nvidia-nvjitlink
CUDA_VERSION := 13.5.37
COMPILE := .venv-compile$(JAX)
test-compile: $(VENV)/.ready
	$(PYTHON) -m venv $(COMPILE)
	version=$(or $(JAX),$$($(RUN) -c 'import jax; print(jax.__version__)')); \
	$(COMPILE)/bin/python -m pip install --quiet --no-deps $(CUDA:%=%==$(CUDA_VERSION)) \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version $(if $(JAX),jax==$(JAX) jaxlib==$(JAX) flax==$(FLAX))
	purelib() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	site=$$(purelib $(COMPILE)); purelib $(VENV) > $$site/borrowed.pth; \
	export PATH=$$site/nvidia/cu13/bin:$$PATH JAX_PLATFORMS=cpu; \
	$(COMPILE)/bin/python -m pytest tests/compiled

# Google's compiler (484 MB) in the version that JAX asks for, added to what .venv has.
TPU := .venv-tpu
test-tpu: $(VENV)/.ready
	$(PYTHON) -m venv $(TPU)
	$(TPU)/bin/python -m pip install --quiet --no-deps \
		"$$($(RUN) -c 'from lce_jax.explain._compile_targets import libtpu; print(libtpu())')"
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(TPU)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth
	ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu $(TPU)/bin/python -m pytest tests/compiled/test_tpu.py

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

docs: $(VENV)/.ready-docs
	$(RUN) docs/_build/tables.py
	$(RUN) docs/_build/programs.py
	$(RUN) docs/_build/figures.py
	$(RUN) docs/_build/notebooks.py
	$(RUN) docs/_build/api.py
	$(RUN) docs/_build/memory.py
	REPOSITORY='$(REPOSITORY)' $(VENV)/bin/zensical build --strict --clean

bench: $(VENV)/.ready
	$(RUN) -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .venv-jax-* .venv-frameworks .venv-areal .venv-marin .venv-maxtext .venv-torchtitan .venv-compile* .venv-tpu .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache demo-out bench-out docs/api docs/notebooks docs/assets/memory-numbers.js site

# One environment, to which each command adds: the demo's packages, then the tests' and linters', then the documentation's.
$(VENV)/.ready-demo: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
		echo "lce-jax needs Python 3.12 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
		"Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[demo$(ON_GPU)]'
	@touch $@

$(VENV)/.ready: $(VENV)/.ready-demo
	$(RUN) -m pip install --quiet --editable '.[test,lint$(ON_GPU)]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(RUN) -m pip install --quiet --editable '.[docs]'
	@touch $@
