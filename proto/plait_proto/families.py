"""The model families that are served: what the engine, the command line and the worker need to know of each.

``families.json`` is the one list; Rust embeds the same file. A list of ``layers`` shorter than the model repeats.
"""

from __future__ import annotations

from importlib import resources
from typing import Literal

import msgspec

AttentionKind = Literal["mha", "mla", "compressed"]
CacheKind = Literal["full", "sliding_window", "mla", "compressed"]


class LayerKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a layer attends, and what it caches."""

    attention: AttentionKind
    """``mha`` is multi-head or grouped-query attention, ``mla`` multi-head latent attention, ``compressed``
    DeepSeek-V4's."""
    cache: CacheKind
    """``sliding_window``: no token sees keys beyond a window, if the model's files state one."""


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One family of models."""

    name: str
    """Ours."""
    architectures: tuple[str, ...]
    """Its names in ``architectures`` of a ``config.json``."""
    gguf: str | None
    """Its name in ``general.architecture`` of a GGUF; None if GGUF files of it are not supported."""
    layers: tuple[LayerKind, ...]
    """Kinds of the layers in order, repeated to the model's depth."""
    page_size: int | None
    """Tokens of a page unless the user says otherwise; None for the usual number."""
    tool_format: str | None
    """How its chat template writes tool calls; None if they are not parsed."""
    reasoning_format: str | None
    """How it marks its reasoning; None if that is not parsed."""

    @property
    def uses_mla(self) -> bool:
        """Whether any layer is MLA."""
        return any(layer.attention == "mla" for layer in self.layers)

    def kinds(self, num_layers: int) -> list[LayerKind]:
        """Of each layer of a model."""
        return [self.layers[layer % len(self.layers)] for layer in range(num_layers)]


FAMILIES: tuple[Family, ...] = msgspec.json.decode(
    resources.files(__package__).joinpath("families.json").read_bytes(), type=tuple[Family, ...]
)


def family(name: str) -> Family:
    """The family of this name; raises ``KeyError`` if there is none."""
    return {each.name: each for each in FAMILIES}[name]


def family_of(architecture: str) -> Family | None:
    """The family that a ``config.json`` names so; None if it is not supported."""
    return next((each for each in FAMILIES if architecture in each.architectures), None)
