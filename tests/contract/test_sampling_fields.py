"""A sampling field has the same name in the HTTP body, in the engine and on the wire."""

from __future__ import annotations

import tempfile
from typing import Any

import msgspec
from plait._router import Engine
from plait.batch_sizes import with_batch_sizes
from plait.http.bodies import SamplingFields
from plait.page_size import with_page_size
from plait.settings import ServeSettings, engine_settings
from plait_proto import Adjustment, NewSlot
from plait_testing import budgets

MODEL = budgets.ROOT / "tests/models/recall-gqa"


def description() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        settings, _ = with_batch_sizes(with_page_size(ServeSettings(), MODEL), MODEL)
        engine = Engine(msgspec.json.encode(engine_settings(settings, str(MODEL), None, folder)))
        try:
            described: dict[str, Any] = msgspec.json.decode(engine.describe())
            return described
        finally:
            engine.close()


def test_the_engine_reads_every_sampling_field_of_the_body_and_no_other() -> None:
    assert set(description()["generation_defaults"]) == set(SamplingFields.__struct_fields__)


def test_the_wire_carries_every_sampling_field_of_the_body() -> None:
    on_the_wire = {*NewSlot.__struct_fields__, *Adjustment.__struct_fields__}
    assert set(SamplingFields.__struct_fields__) <= on_the_wire
