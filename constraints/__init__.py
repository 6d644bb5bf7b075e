"""Structured output: choices, JSON schemas, regular expressions and grammars."""
