"""Native CPU backend: gpt.c and its build."""
