"""The reference pages of docs/ are what the generator writes, and name every error code of the source."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from plait.http.errors import ERRORS
from plait_testing import budgets

RUST_CODE = re.compile(r'code: Some\("(\w+)"\)|RequestError::new\(\s*[\w".]+,\s*"(\w+)"')
PYTHON_CODE = re.compile(r'\bcode="(\w+)"')


def generator(name: str = "generate_docs") -> ModuleType:
    sys.path.insert(0, str(budgets.ROOT / "tools"))
    spec = importlib.util.spec_from_file_location(name, budgets.ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings", "metrics", "errors", "limits"])
def test_a_reference_page_is_up_to_date(name: str) -> None:
    page = budgets.ROOT / "docs" / f"{name}.md"
    assert page.read_text() == generator().page(name), f"run `python tools/generate_docs.py {name}`"


def test_the_description_of_the_api_has_the_engines_limits() -> None:
    made = generator("engine_limits")
    assert made.TARGET.read_text() == made.module(), "run `python tools/engine_limits.py`"


def codes(paths: list[Path], pattern: re.Pattern[str]) -> set[str]:
    return {code for path in paths for found in pattern.findall(path.read_text()) for code in flat(found) if code}


def flat(found: str | tuple[str, ...]) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else found


def test_the_table_of_errors_names_every_code_that_the_source_answers_with() -> None:
    rust = [path for path in budgets.tracked(".rs") if "/src/" in str(path)]
    python = [path for path in budgets.tracked(".py") if "plait/http" in str(path)]
    answered = codes(rust, RUST_CODE) | codes(python, PYTHON_CODE) | {"invalid_value"}
    assert answered == {code for kind in ERRORS.values() for code in kind.codes}
