"""Many texts at once: each request has the text of its own run in `generate`."""
