"""Structured output: choices, regular expressions and grammars."""
