"""Plait: a server for large language models."""
