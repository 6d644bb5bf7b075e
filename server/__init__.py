"""The engine behind HTTP, for clients of OpenAI's API."""
