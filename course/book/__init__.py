"""Templates, diffs, prose and glossary of the pages that `make_book.py` writes."""
