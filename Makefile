# make train, make test: everything from an empty machine with Python 3.11 or newer. On a machine with an NVIDIA GPU
# they take requirements.txt, elsewhere requirements-cpu.txt.
PYTHON ?= python3
VENV ?= .venv
REQUIREMENTS := $(if $(shell nvidia-smi -L 2>/dev/null),requirements.txt,requirements-cpu.txt)
RUN := $(VENV)/bin/python

.PHONY: train test test-all smollm2 clean
.DEFAULT_GOAL := train

train: $(VENV)/.ready
	$(RUN) train.py --estimator grpo

test: $(VENV)/.clients
	$(RUN) -m pytest -q -m "not long and not gpu" tests

test-all: $(VENV)/.clients
	$(RUN) -m pytest -q -m "not gpu" tests

smollm2: $(VENV)/.ready
	$(RUN) recipes/smollm2.py

# torchvision, torchaudio and torchcodec come along with vLLM; where pip found builds that do not fit this torch, importing
# them fails, and vLLM with them: nothing here needs them, so they go.
$(VENV)/.ready: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "nanomolt needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --disable-pip-version-check -r $(REQUIREMENTS)
	@$(RUN) -c 'import torchvision' 2>/dev/null || $(RUN) -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# Agent frameworks that the tests talk through; what is installed already satisfies them and stays as it is.
$(VENV)/.clients: $(VENV)/.ready tests/clients.txt
	$(RUN) -m pip install -q --disable-pip-version-check -r tests/clients.txt
	@touch $@

clean:
	rm -rf $(VENV)
