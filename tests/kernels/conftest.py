"""Fixtures of the kernels' tests."""

from typing import Any

import pytest


@pytest.fixture
def loops_over_loaded_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes loop bounds of arrays with one element, of which numpy 2.4 makes no int."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
