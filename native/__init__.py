"""Native code for the CPU: gpt.c, and what compiles it."""
