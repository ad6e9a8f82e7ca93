"""The JSON Schema test suite, followed token by token: which instances masks take, by keyword.

The suite is in the sdist of `jsonschema`, in its folder `json/tests`. The checker is an example of plait-grammar:
`cargo build --release -p plait-grammar --example check_schemas`.

    python tests/bench/grammar/json_schema_suite.py SUITE CHECKER --out FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA_OF = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
MAX_ORDERS = 24
"""Orders of an object's names that are tried: masks take the schema's."""


def orders(value: Any) -> Iterator[Any]:
    """The same value with its names in other orders."""
    if isinstance(value, dict):
        each = [[(name, inner) for inner in orders(part)] for name, part in value.items()]
        for items in itertools.product(*each):
            for order in itertools.islice(itertools.permutations(items), MAX_ORDERS):
                yield dict(order)
    elif isinstance(value, list):
        yield from (list(items) for items in itertools.product(*map(orders, value)))
    else:
        yield value


def texts(value: Any) -> list[str]:
    some = itertools.islice(orders(value), MAX_ORDERS)
    return [json.dumps(one, ensure_ascii=False) for one in some]


def cases(suite: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every group of tests, by its file."""
    for path in sorted((suite / draft).rglob("*.json")):
        keyword = str(path.relative_to(suite / draft).with_suffix(""))
        for group in json.loads(path.read_text()):
            if isinstance(group["schema"], dict):
                group["schema"].setdefault("$schema", SCHEMA_OF[draft])
            yield keyword, group


def check(checker: Path, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = [
        json.dumps(
            {"schema": group["schema"], "instances": [text for test in group["tests"] for text in texts(test["data"])]}
        )
        for group in groups
    ]
    done = subprocess.run([checker], input="\n".join(lines), text=True, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def outcomes(group: dict[str, Any], said: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What became of each instance of one schema."""
    if "error" in said:
        yield "schema_refused", group
        return
    yield "schema_compiled", group
    taken = iter(said["taken"])
    for test in group["tests"]:
        is_taken = any(list(itertools.islice(taken, len(texts(test["data"])))))
        yield f"{'valid' if test['valid'] else 'invalid'}_{'taken' if is_taken else 'not_taken'}", test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("checker", type=Path)
    parser.add_argument("--draft", nargs="*", default=list(SCHEMA_OF))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", default="invalid_taken", help="list the instances of this outcome")
    args = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    for draft in args.draft:
        named = list(cases(args.suite, draft))
        answers = check(args.checker, [group for _, group in named])
        for (keyword, group), said in zip(named, answers, strict=True):
            for outcome, what in outcomes(group, said):
                counts.setdefault(f"{draft}/{keyword}", Counter())[outcome] += 1
                if outcome == args.show:
                    shown = said.get("error", json.dumps(what.get("data"))[:100])
                    print(f"{draft}/{keyword}: {json.dumps(group['schema'])[:200]}: {what['description']}: {shown}")
    report = {name: dict(sorted(count.items())) for name, count in sorted(counts.items())}
    total = sum(counts.values(), Counter())
    required = sum((count for name, count in counts.items() if "/optional/" not in name), Counter())
    print(json.dumps({"required": required, "with_optional": total}, indent=1))
    if args.out:
        args.out.write_text(json.dumps({"required": required, "total": total, "keywords": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
