"""The retired words that a tracked file still holds: `python3 tests/contract/retired_words.py [PATH...]`.

retired_words.toml lists them: a pattern, the word to use, and where the pattern applies. Prints `file:line: retired
"X": use "Y"` for each hit and exits with 1 if there is one. Needs Python 3.11 and git, no package.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True)
class Hit:
    """A retired word in a line of a file; line 0 is the file's path."""

    path: str
    line: int
    found: str
    use: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: retired "{self.found}": use "{self.use}"'


@dataclass(frozen=True, slots=True)
class Word:
    """One entry of the list."""

    use: str
    text: re.Pattern[str] | None
    path: re.Pattern[str] | None
    within: tuple[str, ...]
    kept_in: tuple[str, ...]

    def applies(self, path: str) -> bool:
        """Whether the entry covers this file; an entry that names no folder covers all."""
        return (not self.within or path.startswith(self.within)) and not path.startswith(self.kept_in)

    def hits(self, path: str, text: str) -> Iterator[Hit]:
        """The retired words in a file's path and text."""
        if self.path and (match := self.path.search(path)):
            yield Hit(path, 0, match.group(), self.use)
        for match in self.text.finditer(text) if self.text else ():
            yield Hit(path, text.count("\n", 0, match.start()) + 1, match.group(), self.use)


@dataclass(frozen=True, slots=True)
class WordList:
    """The list of retired words, and the files that it leaves out."""

    words: tuple[Word, ...]
    left_out: tuple[str, ...]

    def hits(self, path: str, text: str) -> list[Hit]:
        """All hits in one file, in the order of its lines."""
        if path.startswith(self.left_out):
            return []
        found = {hit for word in self.words if word.applies(path) for hit in word.hits(path, text)}
        return sorted(found, key=lambda hit: (hit.line, hit.found))


def read_list(source: Path = LIST) -> WordList:
    """Parse the data file."""
    table = tomllib.loads(source.read_text(encoding="utf-8"))
    return WordList(tuple(map(parse, table["word"])), tuple(entry["path"] for entry in table["left_out"]))


def parse(entry: dict[str, Any]) -> Word:
    """One `[[word]]` of the data file; raises ValueError if it matches neither text nor paths."""
    text, path = (re.compile(entry[key]) if key in entry else None for key in ("text", "path"))
    if text is None and path is None:
        raise ValueError(f"the entry for {entry['use']!r} has neither `text` nor `path`; give one")
    return Word(entry["use"], text, path, tuple(entry.get("within", ())), tuple(entry.get("kept_in", {})))


def tracked(paths: Sequence[str]) -> list[str]:
    """The tracked files under these paths, relative to the repository's root; all without paths."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--", *(str(Path(path).resolve()) for path in paths)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def all_hits(paths: Sequence[str] = ()) -> Iterator[Hit]:
    """Hits in every tracked text file."""
    words = read_list()
    for path in tracked(paths):
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield from words.hits(path, text)


def main(paths: Sequence[str]) -> int:
    """Print the hits; 1 if there are any."""
    num_hits = 0
    for hit in all_hits(paths):
        print(hit)
        num_hits += 1
    print(f"{num_hits} retired words", file=sys.stderr)
    return 1 if num_hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
