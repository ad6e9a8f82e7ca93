"""The budgets of the source: how long functions and files are, how many fields a struct has.

`python tests/plait_testing/budgets.py` prints the figures. A line counts where it holds code: blank lines, comments and
docstrings are free, and so are Rust's inline test modules. A comment `budget: why` in a function, or above the first
code of a file, lifts the ceiling there.
"""

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

MAX_FUNCTION_MEDIAN = 10
MAX_FUNCTION_P90 = 30
MAX_FUNCTION_LINES = 70
MAX_FILE_P90 = 400
MAX_FILE_LINES = 600
MAX_STRUCT_FIELDS = 15

EXCUSE = re.compile(r"(#|//[/!]?)\s*budget: \S")


@dataclass(frozen=True, slots=True)
class Measured:
    """One function, file or struct: its size, and whether a line says why it may be larger."""

    name: str
    size: int
    excused: bool = False


@dataclass(slots=True)
class Measures:
    """The sizes of everything in a set of files."""

    functions: list[Measured] = field(default_factory=list)
    files: list[Measured] = field(default_factory=list)
    structs: list[Measured] = field(default_factory=list)

    def breaches(self) -> Iterator[str]:
        """Each thing above its ceiling without an excuse, in words."""
        limits = (
            ("lines in function", self.functions, MAX_FUNCTION_LINES),
            ("lines in file", self.files, MAX_FILE_LINES),
            ("fields in struct", self.structs, MAX_STRUCT_FIELDS),
        )
        for what, measured, limit in limits:
            for one in measured:
                if one.size > limit and not one.excused:
                    yield f"{one.size} {what} {one.name}, at most {limit} (or a comment `budget: why`)"


def percentile_90(sizes: Sequence[int]) -> int:
    """The 90th percentile; 0 if there are no sizes."""
    ordered = sorted(sizes)
    return ordered[(9 * len(ordered) - 1) // 10] if ordered else 0


def tracked(*suffixes: str) -> list[Path]:
    """The files of the repository with these suffixes, new ones included, ignored ones not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for name in names if name.endswith(suffixes) and (path := ROOT / name).is_file()]


def is_test(path: Path) -> bool:
    """Whether a file holds tests; only ceilings apply to them."""
    return "tests" in path.relative_to(ROOT).parts


def measure(paths: Sequence[Path]) -> Measures:
    """Measure Rust and Python files."""
    measures = Measures()
    for path in paths:
        name = str(path.relative_to(ROOT))
        (measure_rust if path.suffix == ".rs" else measure_python)(name, path.read_text(), measures)
    return measures


def has_excuse(lines: Sequence[str]) -> bool:
    """Whether one of these lines says why a budget is broken."""
    return any(EXCUSE.search(line) for line in lines)


def with_what_stands_above(lines: Sequence[str], first: int, last: int) -> Sequence[str]:
    """Lines `first` to `last`, counted from 1, with the comments, attributes and decorators right above them."""
    while first > 1 and lines[first - 2].lstrip().startswith(("#", "//", "@")):
        first -= 1
    return lines[first - 1 : last]


def measure_python(name: str, text: str, measures: Measures) -> None:
    """Add one Python file."""
    tree = ast.parse(text)
    lines = text.splitlines()
    code = {number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")}
    code -= {number for node in ast.walk(tree) for number in docstring_lines(node)}
    measures.files.append(Measured(name, len(code), has_excuse(lines[: min(code, default=0)])))
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                excused = has_excuse(with_what_stands_above(lines, span.start, span.stop - 1))
                measures.functions.append(Measured(f"{name}:{node.name}", len(code.intersection(span)), excused))
            case ast.ClassDef():
                num_fields = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
                excused = has_excuse(with_what_stands_above(lines, node.lineno, node.end_lineno or node.lineno))
                measures.structs.append(Measured(f"{name}:{node.name}", num_fields, excused))


def docstring_lines(node: ast.AST) -> range:
    """The lines of a node's docstring, if any."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return range(0)
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str())) as doc, *_]:
            return range(doc.lineno, (doc.end_lineno or doc.lineno) + 1)
    return range(0)


RUST_OPAQUE = re.compile(
    r"""
    (?P<line>//[^\n]*)
  | (?P<block>/\*.*?\*/)
  | b?r(?P<hashes>\#*)".*?"(?P=hashes)
  | [bc]?"(?:\\.|[^"\\])*"
  | b?'(?:\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F_]+\}|.)|[^\\'\n])'
    """,
    re.VERBOSE | re.DOTALL,
)
RUST_FUNCTION = re.compile(r"\bfn\s+(\w+)[^;{}]*?(?:\[[^\]]*\][^;{}]*?)*\{")
RUST_STRUCT = re.compile(r"\bstruct\s+(\w+)[^;{}()]*\{")
RUST_TEST_MODULE = re.compile(r"#\[cfg\(test\)\]\s*(?:#\[[^\n]*\]\s*)*mod\s+\w+\s*\{")
RUST_FIELD = re.compile(r"(?:^|,|\{|\])\s*(?:pub(?:\([^)]*\))?\s+)?\w+\s*:[^:]", re.MULTILINE)


def measure_rust(name: str, text: str, measures: Measures) -> None:
    """Add one Rust file."""
    lines = text.splitlines()
    opaque = RUST_OPAQUE.sub(masked, text)
    for found in list(RUST_TEST_MODULE.finditer(opaque)):
        opaque = blanked(opaque, found.start(), closing_brace(opaque, found.end() - 1))
    code = {number for number, line in enumerate(opaque.splitlines(), 1) if line.strip()}
    measures.files.append(Measured(name, len(code), has_excuse(lines[: min(code, default=0)])))
    for pattern, measured in ((RUST_FUNCTION, measures.functions), (RUST_STRUCT, measures.structs)):
        for found in pattern.finditer(opaque):
            end = closing_brace(opaque, found.end() - 1)
            first, last = opaque.count("\n", 0, found.start()) + 1, opaque.count("\n", 0, end) + 1
            num_fields = len(RUST_FIELD.findall(opaque[found.end() - 1 : end]))
            size = num_fields if pattern is RUST_STRUCT else len(code.intersection(range(first, last + 1)))
            excused = has_excuse(with_what_stands_above(lines, first, last))
            measured.append(Measured(f"{name}:{found.group(1)}", size, excused))


def masked(found: re.Match[str]) -> str:
    """Remove comments, replace literals by text without braces, keep newlines."""
    filler = " " if found["line"] or found["block"] else "_"
    return re.sub(r"[^\n]", filler, found.group())


def blanked(text: str, begin: int, end: int) -> str:
    """The text with nothing but newlines between two places."""
    return text[:begin] + re.sub(r"[^\n]", " ", text[begin : end + 1]) + text[end + 1 :]


def closing_brace(text: str, opening: int) -> int:
    """Where the brace that opens at `opening` closes."""
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"a brace that opens at character {opening} never closes")


def summary(measures: Measures) -> str:
    """The figures beside their budgets, one line each."""
    functions = [one.size for one in measures.functions]
    files = [one.size for one in measures.files]
    structs = [one.size for one in measures.structs]
    return "\n".join(
        (
            f"{len(functions)} functions: median {statistics.median(functions or [0]):g} (<= {MAX_FUNCTION_MEDIAN}), "
            f"p90 {percentile_90(functions)} (<= {MAX_FUNCTION_P90}), "
            f"longest {max(functions, default=0)} (<= {MAX_FUNCTION_LINES})",
            f"{len(files)} files: p90 {percentile_90(files)} (<= {MAX_FILE_P90}), "
            f"longest {max(files, default=0)} (<= {MAX_FILE_LINES})",
            f"{len(structs)} structs: most fields {max(structs, default=0)} (<= {MAX_STRUCT_FIELDS})",
        )
    )


if __name__ == "__main__":
    for language, suffix in (("Rust", ".rs"), ("Python", ".py")):
        measures = measure([path for path in tracked(suffix) if not is_test(path)])
        print(f"{language}\n{summary(measures)}")
        print("\n".join(measures.breaches()))
