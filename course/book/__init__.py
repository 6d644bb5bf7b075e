"""What `make_book.py` makes pages of: templates, and pictures drawn from runs of the models."""
