"""Functions, files and structs keep their budgets, and the counting itself is right."""

import statistics

import pytest
from plait_testing import budgets

RUST = """
//! budget: this line stands in a comment of the file
pub(crate) struct Pool { pub free: Vec<u8>, leased: usize }
struct Unit;
struct Pair(u8, u8);

fn first<const N: usize>(ids: [u8; 4], text: &'static str) -> char
where
    u8: Copy,
{
    // a comment with a brace }
    let open = '{';

    let raw = r#"} " fn in_a_string() { "#;
    open
}

trait Step { fn required(&self, ids: [u8; 4]); fn given(&self) {} }

#[cfg(test)]
mod tests {
    fn not_counted() {}
}
"""

PYTHON = '''
"""A docstring
of two lines."""

class Plan:
    """Rows."""
    step: int
    rows: list[int]

    def width(self) -> int:
        """Not code."""

        # not code
        return sum(
            self.rows
        )
'''


def measured(text: str, language: str) -> budgets.Measures:
    measures = budgets.Measures()
    (budgets.measure_rust if language == "rs" else budgets.measure_python)("file", text, measures)
    return measures


def sizes(measured: list[budgets.Measured]) -> dict[str, int]:
    return {one.name.removeprefix("file:"): one.size for one in measured}


def test_rust_functions_are_measured_by_their_lines_of_code() -> None:
    assert sizes(measured(RUST, "rs").functions) == {"first": 8, "given": 1}


def test_rust_structs_are_measured_by_their_named_fields() -> None:
    assert sizes(measured(RUST, "rs").structs) == {"Pool": 2}


def test_a_rust_file_is_measured_without_its_tests() -> None:
    assert sizes(measured(RUST, "rs").files) == {"file": 12}


def test_python_functions_are_measured_without_docstrings_comments_and_blank_lines() -> None:
    assert sizes(measured(PYTHON, "py").functions) == {"width": 4}
    assert sizes(measured(PYTHON, "py").structs) == {"Plan": 2}
    assert sizes(measured(PYTHON, "py").files) == {"file": 7}


@pytest.mark.parametrize("excuse", ["", "    # budget:", "    # budget: the format has as many cases"])
def test_a_long_function_needs_a_line_that_says_why(excuse: str) -> None:
    body = "\n".join(["def long() -> None:", excuse, *["    pass"] * budgets.MAX_FUNCTION_LINES])
    assert bool(list(measured(body, "py").breaches())) is not excuse.endswith("cases")


def test_the_line_that_says_why_may_stand_above_the_attributes() -> None:
    fields = ", ".join(f"field_{i}: u8" for i in range(budgets.MAX_STRUCT_FIELDS + 1))
    excused = f"// budget: one field a flag\n#[derive(Debug)]\nstruct Wide {{ {fields} }}"
    text = f"use a::B;\n{excused}\nstruct Other {{ {fields} }}"
    assert [breach.split()[4] for breach in measured(text, "rs").breaches()] == ["file:Other,"]


def test_nine_of_ten_stay_at_or_below_the_ninetieth_percentile() -> None:
    assert budgets.percentile_90(range(1, 11)) == 9
    assert budgets.percentile_90([]) == 0


@pytest.mark.parametrize("suffix", [".rs", ".py"])
def test_the_source_keeps_its_budgets(suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    measures = budgets.measure([path for path in budgets.tracked(suffix) if not budgets.is_test(path)])
    with capsys.disabled():
        print(f"\n{suffix}: {budgets.summary(measures)}")
    assert list(measures.breaches()) == []
    functions = [one.size for one in measures.functions]
    assert statistics.median(functions) <= budgets.MAX_FUNCTION_MEDIAN
    assert budgets.percentile_90(functions) <= budgets.MAX_FUNCTION_P90
    assert budgets.percentile_90([one.size for one in measures.files]) <= budgets.MAX_FILE_P90


@pytest.mark.parametrize("suffix", [".rs", ".py"])
def test_the_tests_keep_the_ceilings(suffix: str) -> None:
    measures = budgets.measure([path for path in budgets.tracked(suffix) if budgets.is_test(path)])
    assert list(measures.breaches()) == []
