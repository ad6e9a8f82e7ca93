"""The list of families that both languages read and the worker's registrations have the same families."""

from __future__ import annotations

from plait_proto import FAMILIES
from plait_worker.models import registry


def test_every_family_in_the_list_has_a_worker_spec_and_the_reverse() -> None:
    assert [spec.family for spec in registry.FAMILIES] == list(FAMILIES)


def test_a_family_that_names_ggufs_says_how_they_are_read_and_the_reverse() -> None:
    assert [spec.gguf is None for spec in registry.FAMILIES] == [family.gguf is None for family in FAMILIES]


def test_a_family_reads_mla_from_its_configuration_as_its_layers_say() -> None:
    assert [spec.config.read_mla is not None for spec in registry.FAMILIES] == [family.uses_mla for family in FAMILIES]


def test_no_two_families_have_a_name_in_common() -> None:
    names = [name for family in FAMILIES for name in (family.name, *family.architectures)]
    ggufs = [family.gguf for family in FAMILIES if family.gguf]
    assert len(set(names)) == len(names)
    assert len(set(ggufs)) == len(ggufs)
