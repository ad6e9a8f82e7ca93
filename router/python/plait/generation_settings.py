"""Settings of sampling defaults."""

from __future__ import annotations

from typing import Annotated

import msgspec

from plait.setting import Setting


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults."""

    generation_config: Annotated[
        str,
        Setting(
            "where sampling defaults come from: auto takes the model's generation_config.json, none takes OpenAI's "
            "(vllm says the same), else a folder with such a file"
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str | None,
        Setting(
            'JSON object of sampling fields, such as {"temperature": 0.6}, which go before those of the file',
            unset="none",
        ),
    ] = None
