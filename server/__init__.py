"""HTTP server for the engine, with OpenAI's API."""
