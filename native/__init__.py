"""Native code for the CPU: gpt.c, what compiles it, and what calls it."""
