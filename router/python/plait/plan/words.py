"""Numbers and weights as the plan prints them."""

from __future__ import annotations

from plait.plan.stored_form import Storage


def gb(num_bytes: float) -> str:
    """Gigabytes."""
    return f"{num_bytes / 1e9:,.1f} GB"


def held_as(storage: Storage) -> str:
    """The form of the weights, behind their size."""
    if storage.form is not None:
        return f"with {storage.form.title} matrices"
    return "in 16 bits" + (f" ({storage.upcast})" if storage.upcast else "")
