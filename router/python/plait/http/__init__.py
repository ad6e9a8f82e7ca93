"""The front door: HTTP in OpenAI's words."""
