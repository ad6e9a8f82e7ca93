"""llguidance's compile and mask times beside xgrammar's, on 50 schemas of real programs, one thread each.

    python tests/bench/grammar/beside_xgrammar.py CHECKER --tokens FILE --out FILE

The schemas are every so many of `real_schemas`; the checker is the example `check_schemas`, and FILE its vocabulary.
Random walks through our masks write texts; xgrammar follows them by the longest tokens that fit. A schema that xgrammar
refuses, or a text that it does not take, is counted. An environment needs `xgrammar`, `jsonschema`,
`kubernetes-validate` and `check-jsonschema`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import xgrammar
from plait.bench.result_file import commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.grammar.real_schemas import NUM_WALKS, builtin, kubernetes, percentile

NUM_SCHEMAS = 50
MAX_CPU_SECONDS = 10
"""Of xgrammar, for one schema with its texts; some take it minutes."""


class Vocabulary:
    """Tokens as bytes, and the longest that fit a text."""

    def __init__(self, file: Path) -> None:
        self.tokens = [text.encode("latin-1") for text in json.loads(file.read_text())]
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.longest = max(map(len, self.tokens))

    def split(self, text: bytes) -> Iterator[int]:
        while text:
            length = next(n for n in range(min(self.longest, len(text)), 0, -1) if text[:n] in self.ids)
            yield self.ids[text[:length]]
            text = text[length:]


class XGrammar:
    """The library with one thread and no cache."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        tokens = [*vocabulary.tokens, b"<end>"]
        info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[len(tokens) - 1])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def follow(self, schema: Any, texts: list[str]) -> dict[str, Any]:
        """Seconds of compiling and of each mask, and how many of the texts it takes."""
        begin = time.perf_counter()
        try:
            compiled = self.compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        except RuntimeError as error:
            return {"error": str(error)[:200]}
        seconds, masks, num_taken = time.perf_counter() - begin, [], 0
        for text in texts:
            matcher, is_taken = xgrammar.GrammarMatcher(compiled), True
            for token in self.vocabulary.split(text.encode()):
                begin = time.perf_counter()
                matcher.fill_next_token_bitmask(self.mask, 0)
                masks.append(time.perf_counter() - begin)
                is_taken = is_taken and matcher.accept_token(token)
                if not is_taken:
                    break
            num_taken += is_taken
        return {"seconds": seconds, "mask_seconds": masks, "taken": num_taken}


def follow_limited(library: XGrammar, schema: Any, texts: list[str]) -> dict[str, Any]:
    """The same in a process of its own, which ends after `MAX_CPU_SECONDS`."""
    receiver, sender = Pipe(duplex=False)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
        sender.send(library.follow(schema, texts))

    process = get_context("fork").Process(target=child)
    process.start()
    sender.close()
    try:
        told: dict[str, Any] = receiver.recv()
    except EOFError:
        told = {"error": f"not over after {MAX_CPU_SECONDS} s of computing"}
    process.join()
    return told


def summary(case: str, times: list[float]) -> Iterator[dict[str, object]]:
    figures = {"p50": statistics.median(times), "p99": percentile(times, 0.99), "max": max(times), "total": sum(times)}
    for name, value in figures.items():
        yield {"case": case, "metric": name, "unit": "seconds", "value": round(value, 7), "goal": None}


def count(case: str, metric: str, value: int, goal: int | None = None) -> dict[str, object]:
    return {"case": case, "metric": metric, "unit": "count", "value": value, "goal": goal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checker", type=Path)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    named = [*kubernetes(400), *builtin()]
    schemas = [schema for _, schema in named[:: len(named) // NUM_SCHEMAS]][:NUM_SCHEMAS]
    lines = "\n".join(json.dumps({"schema": schema, "num_walks": NUM_WALKS}) for schema in schemas)
    command = [options.checker, options.tokens]
    done = subprocess.run(command, input=lines, text=True, stdout=subprocess.PIPE, check=True)
    ours = [json.loads(line) for line in done.stdout.splitlines()]
    library = XGrammar(Vocabulary(options.tokens))
    walks = [[text for text in one.get("walks", []) if text is not None] for one in ours]
    theirs = [follow_limited(library, schema, texts) for schema, texts in zip(schemas, walks, strict=True)]
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if "error" not in a and "error" not in b]
    rows: list[dict[str, object]] = []
    for name, each in (("llguidance, as here", [a for a, _ in both]), ("xgrammar", [b for _, b in both])):
        rows += summary(f"compile, {name}", [one["seconds"] for one in each])
        rows += summary(f"mask, {name}", [seconds for one in each for seconds in one["mask_seconds"]])
    rows += [
        count("schemas", "asked", len(schemas)),
        count("schemas", "refused here", sum("error" in one for one in ours)),
        count("schemas", "refused by xgrammar, or given up", sum("error" in one for one in theirs)),
        count("texts of our walks", "ended", sum(map(len, walks))),
        count("texts of our walks", "taken by xgrammar", sum(one.get("taken", 0) for one in theirs)),
    ]
    report = {
        "commit": commit(),
        "command": "tests/bench/grammar/beside_xgrammar.py",
        "machine": machine(),
        "versions": versions(("plait", "xgrammar")),
        "rows": rows,
        "refused": [one["error"] for one in [*ours, *theirs] if "error" in one],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
