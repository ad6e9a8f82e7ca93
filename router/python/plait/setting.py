"""What the command line says of a setting besides its type, range and default."""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    """Meaning and other names of a setting; it stands in the annotation of a field of a settings struct."""

    meaning: str
    aliases: tuple[str, ...] = ()
    """Other names for the same: our short ones, vLLM's and SGLang's."""
    off: tuple[str, ...] = ()
    """Other names for the `--no-` form of a switch."""
    unset: str = ""
    """What None stands for."""
