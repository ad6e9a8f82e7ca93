"""Plait: a server for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.offline.llm import LLM, AsyncLLM
    from plait.offline.outputs import CompletionOutput, RequestOutput
    from plait.offline.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "llm",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> object:
    """Imported when they are first used: the commands need none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"plait.offline.{_HOMES[name]}"), name)
