"""From the engine's packed records to each client's bytes."""

from __future__ import annotations

import asyncio
import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.http.streams import MAX_BACKLOG_BYTES, Data, Failure, Gone, Streams, parse_records

_spec = importlib.util.spec_from_file_location("in_memory_engine", Path(__file__).with_name("in_memory_engine.py"))
