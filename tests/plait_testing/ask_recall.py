"""`python -m plait_testing.ask_recall URL MODEL NUM CONTEXT`: ask a server recall problems; print the wrong answers."""

from __future__ import annotations

import sys

from plait_testing import recall


def main(url: str, model: str, num: str, context: str) -> None:
    for wrong in recall.ask_all(url, recall.problems(7, int(num), int(context)), model=model):
        print(wrong)


if __name__ == "__main__":
    main(*sys.argv[1:])
