"""Numbers and weights as the plan prints them."""

from __future__ import annotations

from plait.plan.parts import ActOrderCost
from plait.plan.stored_form import Storage


def amount(num_bytes: float) -> str:
    """In gigabytes, or megabytes if it is less than one."""
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"


def held_as(storage: Storage) -> str:
    """The form of the weights, behind their size."""
    held = "in 16 bits" if storage.form is None else f"with {storage.form.title} matrices"
    return held + (f" ({storage.upcast})" if storage.upcast else "")


def act_order_note(cost: ActOrderCost) -> str:
    """What act-order costs in memory, and why."""
    return (
        f"Act-order (desc_act, actorder): {' and '.join(cost.names)} in 16 bits, {amount(cost.num_bytes)} instead of "
        f"{amount(cost.quantised_bytes)}; no kernels take experts whose groups mix inputs."
    )
