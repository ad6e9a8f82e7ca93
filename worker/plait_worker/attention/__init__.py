"""Attention over the paged KV cache: specs, backends, and the choice among them."""
