# make demo: set up and run the main job.  make test: set up and run every check.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The comparisons with plain loops, once more on accelerators that the CPU plays.
PLAYED := tests/exactness $(addprefix tests/devices/test_,equality.py swapping.py counts.py states.py failures.py)

.PHONY: demo test check format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch==2.13.0"
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[train,test]"
	touch $(STAMP)

demo: $(STAMP)
	rm -rf runs/demo
	$(VENV)/bin/counterpoint train --run runs/demo --model gpt2-bytes --memory 768MiB --steps 20 \
	  --minibatch 8 --sequence-length 32 --learning-rate 1.5e-4 --warmup 12 --decay constant

test: $(STAMP) check
	$(RUN) -m pytest -n 3 --dist worksteal --durations 10  # many tests wait for processes of their own
	if command -v $${CXX:-g++} > /dev/null; then COUNTERPOINT_PLAYED=1 $(RUN) -m pytest -n 3 --dist worksteal $(PLAYED); \
	  else echo "no C++ compiler: nothing was tested on a played accelerator"; fi

check: $(STAMP)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(STAMP)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
