PYTHON ?= python3

demo: .venv/installed  ## write a story with the embedded model, on the CPU
	.venv/bin/python infer.py --prompt "Once upon a time" --device cpu

test: .venv/installed  ## run the tests of this commit
	.venv/bin/python -m pytest

.venv/installed: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.PHONY: demo test
