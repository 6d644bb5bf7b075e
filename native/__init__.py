"""Native CPU backend: gpt.c, its build, and its Python bindings."""
