"""Mistral (arXiv 2310.06825): Llama's block, with a sliding window in every layer or in none."""

from __future__ import annotations

from plait_proto import family

from plait_worker.models.decoder import mha_model
from plait_worker.models.family import FamilySpec
from plait_worker.models.llama import read_block
from plait_worker.weights.json_config import ConfigSpec

FAMILY = FamilySpec(family("mistral"), ConfigSpec(default_window=4096), mha_model(read_block))
