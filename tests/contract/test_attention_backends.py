"""The lists of attention backends and kinds agree: command line, wire and worker."""

from __future__ import annotations

from typing import get_args, get_type_hints

from plait.settings import AttentionSettings
from plait_proto.families import AttentionKind
from plait_worker.attention.registry import KINDS, all_names


def test_the_command_line_offers_every_backend_of_the_registry() -> None:
    choices = get_args(get_type_hints(AttentionSettings)["attention_backend"])
    assert sorted(choices) == sorted(["auto", "torch", *all_names()])


def test_every_kind_of_layer_has_backends() -> None:
    assert sorted(KINDS) == sorted(get_args(AttentionKind))
