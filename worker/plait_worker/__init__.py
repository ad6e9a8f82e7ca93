"""Plait."""
