# A fresh machine needs python3 and make, nothing else: every target makes .venv by itself.
PYTHON ?= python3
EXTRAS ?= dev
OUT    ?= runs/demo
# One test process a core; loadfile keeps a file's tests together, which share compiled programs.
PYTEST_FLAGS ?= -n auto --dist loadfile

BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/stamp
	$(BIN)/jaxrl demo --out $(OUT)

test: .venv/stamp
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow"

lint: .venv/stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check
	$(BIN)/lint-imports

bench: .venv/stamp
	$(BIN)/python -m jaxrl.bench

.venv/stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv .cache build *.egg-info
