"""The engine without HTTP: `plait.LLM`, and batch files."""
