"""MHA and GQA: every key-value head is cached."""
