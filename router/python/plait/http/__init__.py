"""The HTTP server: OpenAI's API."""
