# Every command sets up what it needs in .venv, once; `make` alone lists them.
#
#   PYTHON=python3.12   which Python makes .venv (3.11 to 3.13; by default the first suitable one found)
#   CPU=1, CUDA=1       PyTorch without CUDA, or with it (by default: without on Linux where there is no NVIDIA GPU)
#   TORCH=2.11.0        another PyTorch than constraints.txt names (2.11 to 2.15)
#   EXTRA=gspmd         with `make learn`: JAX, which labs/xla needs; deepspeed: what labs/deepspeed needs;
#                       clusters: submitit, for Slurm; types: spmd_types; or gspmd,deepspeed

PYTHON ?= python3 python3.13 python3.12 python3.11 python
TORCH  ?= $(shell sed -n 's/^torch==//p' constraints.txt)
JUNIT  ?= build/report.xml
PART   ?= 1/1

# The newest that pyproject.toml allows: raise both together.
NEWEST := 2.15.0

# JupyterHub's proxy, which npm installs.
PROXY := configurable-http-proxy@5.3.0

VENV   := .venv
BUILD  := $(if $(CUDA),-cuda,$(if $(CPU),-cpu))
BIN    := $(VENV)/bin
COMMA  := ,
EXTRAS := $(subst $(COMMA), ,$(EXTRA))
COURSE := $(VENV)/course-$(TORCH)$(BUILD)
TESTS  := $(VENV)/tests-$(TORCH)$(BUILD)
ADDED  := $(EXTRAS:%=$(VENV)/%-$(TORCH)$(BUILD))
SETUP  := VENV=$(VENV) CPU=$(CPU) CUDA=$(CUDA) $(BIN)/python -m tools.setup $(TORCH)
PYTEST := $(BIN)/python -m pytest -p tools.lean
NBVAL  := --nbval --nbval-sanitize-with tools/nbval.cfg --nbval-cell-timeout 300

# What leans on PyTorch's own parts and private names: its strategies, a dry run of each row, and two notebooks.
CORE   := $(addprefix tests/,test_contract.py test_private_names.py test_odd.py kit/simulated kit/test_dry.py kit/commands fsdp cost) \
          $(addprefix solutions/,06_fsdp.ipynb 10_pipeline.ipynb)

notebooks = $(wildcard $(foreach folder,solutions notebooks,$(folder)/$(1)ipynb))
NUMBERS   = $(sort $(foreach path,$(call notebooks,*.),$(firstword $(subst _, ,$(notdir $(path))))))
of        = $(wildcard tests/$(1) tests/$(dir $(1))test_$(notdir $(1)).py)
MODULES   = $(sort $(patsubst tests/%,%,$(patsubst %/,%,$(dir $(wildcard tests/*/test_*.py)))) $(patsubst tests/test_%.py,%,$(wildcard tests/test_*.py)))

# Where this is set, each rank of each job would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

# Threads of OpenMP that wait for work would take the cores from the ranks: up to 20 × the processor time.
export OMP_WAIT_POLICY ?= PASSIVE

# A half-made file is not left to look finished.
.DELETE_ON_ERROR:

.PHONY: help learn tour test quick lint notebook module bench soak newest part gpu count images notebooks site pages hub release mark nbgrader doctor progress class track update clean

help:
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

learn: $(or $(ADDED),$(COURSE))  ## open the course in JupyterLab; EXTRA=gspmd,deepspeed adds JAX and DeepSpeed
	@$(BIN)/python -m tools.learn

tour: $(COURSE)  ## train with a strategy of each kind and compare; ARGS="--strategies all"
	@$(BIN)/python -m labs tour $(ARGS)

test: $(TESTS) lint  ## every claim on one configuration, and every notebook: what CI runs; JUNIT=report.xml
	$(BIN)/python -m tools.leftovers $(PYTEST) -n auto $(NBVAL) --durations 10 --junitxml $(JUNIT) tests solutions notebooks

quick: $(TESTS) lint  ## the tests of what you have changed, in all configurations; SINCE=main
	$(BIN)/python -m tools.quick $(SINCE)

lint: $(TESTS)  ## style and format of package, tests and notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

notebook: $(TESTS)  ## test one notebook, solved and as shipped; N=03
	$(PYTEST) $(NBVAL) $(or $(call notebooks,$(if $(N),$(N)[_.])*),$(error N=$(N) is no notebook: there are $(NUMBERS)))

module: $(TESTS)  ## test a chapter, or a file of one; M=fsdp, M=fsdp/order
	$(PYTEST) $(or $(if $(M),$(call of,$(M))),$(error M=$(M) is no module with tests: there are $(MODULES)))

bench: $(TESTS)  ## measure against the course's peers
	$(BIN)/python -m bench $(ARGS)

soak: $(TESTS) nbgrader  ## everything, in all configurations, and the long tests; PART=2/3 is the second of three parts
	@command -v bwrap > /dev/null || apt-get install --yes bubblewrap > /dev/null 2>&1 || echo "without bwrap, no sandbox is tested"
	$(PYTEST) -n auto $(NBVAL) -m "" --part $(PART) --durations 20 --junitxml $(JUNIT) tests solutions notebooks

newest:  ## five minutes of the tests on the newest PyTorch, in an environment of its own
	@$(MAKE) --no-print-directory VENV=build/newest TORCH=$(NEWEST) part

part: $(TESTS)
	$(PYTEST) -n auto $(NBVAL) --durations 10 $(CORE)

gpu: $(TESTS)  ## the course on this machine's GPUs, with a report; ARGS="contract tour"
	$(BIN)/python -m tools.gpu $(ARGS)

count: $(COURSE)  ## the lines of the project, by group
	@$(BIN)/python -m tools.count

images: $(COURSE)  ## draw the figures used in prose, and the site's explorers at all their settings
	$(BIN)/python -m tools.images
	$(BIN)/python -m tools.explorers

notebooks: $(TESTS)  ## build solutions/*.ipynb and notebooks/ from solutions/*.py; N=03, FORCE=1
	$(BIN)/python -m tools.notebooks build $(N) $(if $(FORCE),--force)

site:  ## every stored solution as a page to read, in build/site
	@$(MAKE) --no-print-directory VENV=build/site-env pages

pages: $(VENV)/site
	@$(BIN)/python -m tools.site

hub: $(COURSE)  ## play learners who work at once in a JupyterHub, and measure; USERS="1 2 4"
	@$(MAKE) --no-print-directory VENV=build/hub-env build/hub-env/hub
	@$(BIN)/python -m tools.hub.play $(USERS)

release: $(COURSE) nbgrader  ## a notebook to hand out, with points, in marking/release; N=03
	@$(BIN)/python -m tools.marking release $(or $(N),$(error N= is missing: which notebook, N=03?))

mark: $(COURSE) nbgrader  ## mark what learners have handed in, in a sandbox; FOLDER=submitted, a folder in it for each learner
	@$(BIN)/python -m tools.marking mark $(or $(FOLDER),$(error FOLDER= is missing: where are the submissions?)) $(if $(UNSAFE),--without-sandbox)

nbgrader:
	@$(MAKE) --no-print-directory VENV=build/marking-env build/marking-env/marking

doctor: $(COURSE)  ## can this machine run the course?
	@$(BIN)/python -m labs doctor

progress: $(COURSE)  ## which exercises are passed, and when
	@$(BIN)/python -m labs progress

class: $(COURSE)  ## for a teacher: where learners stand, as two pages; FOLDERS="/home/*/training-labs"
	@$(BIN)/python -m tools.classroom $(FOLDERS)

update: | $(BIN)/python  ## the newest version of the course; your answers and progress stay
	@$(BIN)/python -m tools.update

track: $(COURSE)  ## the notebooks of a class, what it leaves out folded; TRACK=afternoon, day, days or term
	@$(BIN)/python -m tools.tracks $(TRACK)

clean:  ## remove everything that make made, .venv included
	rm -rf .venv build .pytest_cache .ruff_cache tour.json tour.png
	find . -name __pycache__ -prune -exec rm -rf {} +

# ---- the environment: a stamp in .venv is newer than what it was made from -------------------------------

$(BIN)/python:
	@for python in $(PYTHON); do \
	    case $$($$python -c 'import sys, venv, ensurepip; print(*sys.version_info[:2])' 2>/dev/null) in \
	        "3 11" | "3 12" | "3 13") echo "Making $(VENV) with $$python"; exec $$python -m venv --clear $(VENV);; \
	    esac; \
	    why=$$($$python --version 2>/dev/null || echo not there); \
	    case $$why in "Python 3.11"* | "Python 3.12"* | "Python 3.13"*) why="$$why without venv";; esac; \
	    tried="$$tried, $$python ($$why)"; \
	done; \
	echo "The course needs Python 3.11, 3.12 or 3.13 with venv. Tried: $${tried#, }."; \
	echo "Name one with \`make $(MAKECMDGOALS) PYTHON=/path/to/python3.12\`; Debian and Ubuntu have venv in python3-venv."; \
	exit 1

# tools/setup.py makes the stamps; those of the tests and of extras bring the course's along.
$(COURSE): pyproject.toml constraints.txt | $(BIN)/python
	@$(SETUP)

$(TESTS): pyproject.toml constraints.txt | $(BIN)/python
	@$(SETUP) test

$(ADDED): pyproject.toml constraints.txt | $(BIN)/python
	@$(SETUP) $(EXTRAS)

# The site, the hub and nbgrader need neither PyTorch nor the course: only their own extra, and the hub's proxy.
$(VENV)/site $(VENV)/hub $(VENV)/marking: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV), once: what the $(@F) needs"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(@F)"], sep="\n")' > $@.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement $@.txt
	@$(if $(filter hub,$(@F)),npm install --silent --no-save --prefix $(VENV) $(PROXY))
	@touch $@
