"""Rates of links, measured by the process that measures GPUs, and what `plait doctor` says of them."""

from __future__ import annotations

import subprocess

import pytest
import torch
from plait.nodes.link_rates import LinkRate, describe_links, links_line, measure_links


@pytest.mark.process
def test_each_pair_is_measured_both_ways() -> None:
    """Copies within this machine's memory, by the same program."""
    rates = measure_links(["cpu", "cpu", "cpu"])
    assert [(rate.source, rate.target) for rate in rates] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(rate.bytes_per_second > 0 for rate in rates)


@pytest.mark.process
def test_a_device_that_is_none_fails_the_measurement() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        measure_links(["cpu", "nothing"])


def test_equal_links_are_well_and_slow_ones_are_named() -> None:
    even = [LinkRate(0, 1, 300e9), LinkRate(1, 0, 290e9)]
    assert describe_links(even) == ("ok", "copies between GPUs: 290 to 300 GB/s")
    state, said = describe_links([*even, LinkRate(0, 2, 40e9)])
    assert state == "note"
    assert "40 to 300 GB/s; slow: 0 to 2 40 GB/s; give a replica's ranks GPUs with fast links" in said


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs to measure")
def test_what_cannot_be_measured_is_a_note() -> None:
    assert links_line(2).startswith("  links    note  rates were not measured: ")


@pytest.mark.multi_gpu
def test_two_gpus_copy_faster_than_a_pcie_link() -> None:
    rates = measure_links(["cuda:0", "cuda:1"])
    assert min(rate.bytes_per_second for rate in rates) > 10e9
