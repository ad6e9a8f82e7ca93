"""Chat problems whose answers a program can check; byte-level tokens plus six specials.

A dialogue is  BOS [SYSTEM table] (USER question ASSISTANT answer END)*  and every answer follows from the table or
from the question alone: one wrong KV row shows as one wrong answer.

The check models were trained on these dialogues. A change to the order of random draws changes every problem.
"""

from __future__ import annotations

import random
from typing import Any, TypedDict

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT = 256, 257, 258, 259, 260, 261
VOCAB = 264
"""The 262 ids, padded to a multiple of 8."""

# fmt: off
GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "zeta": "ζ", "eta": "η", "theta": "θ",
    "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "omicron": "ο", "pi": "π", "rho": "ρ",
    "sigma": "σ", "tau": "τ", "upsilon": "υ", "phi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω",
}
SIGNS = {
    "sun": "☀", "cloud": "☁", "rain": "☔", "star": "★", "heart": "❤", "check": "✓", "cross": "✗", "arrow": "→",
    "euro": "€", "rocket": "🚀", "fire": "🔥", "wave": "🌊", "tree": "🌲", "cat": "🐱", "dog": "🐶", "fish": "🐟",
    "bird": "🐦", "apple": "🍎", "key": "🔑", "book": "📚",
}
# fmt: on
NAMES = {**GREEK, **SIGNS}
CONSONANTS, VOWELS = "bcdfghjklmnprstvz", "aeiou"
KINDS = ["copy", "reverse", "sort", "add", "sign", "json", "count", "count"]

Question = tuple[str, str, str]
"""Question, answer, kind."""


class Problem(TypedDict):
    """Chat messages with the one right answer."""

    messages: list[dict[str, str]]
    answer: str
    kind: str


def word(r: random.Random, length: int) -> str:
    """Consonants and vowels in turn."""
    return "".join(r.choice(CONSONANTS if i % 2 == 0 else VOWELS) for i in range(length))


def table(r: random.Random, num_keys: int) -> dict[str, str]:
    """Distinct words with numbers of two to four digits; a dict, so that its order is the draws'."""
    keys: dict[str, None] = {}
    while len(keys) < num_keys:
        keys[word(r, r.choice((3, 4, 5)))] = None
    return {key: str(r.randrange(10 ** r.choice((2, 3, 4)))) for key in keys}


def question(r: random.Random, known: dict[str, str]) -> Question:
    """One question; about the table in five of thirteen if there is one."""
    kind = r.choice(["lookup"] * 5 * bool(known) + KINDS)
    if kind == "lookup":
        num_keys = min(len(known), r.choice((1, 1, 2, 3)))
        keys = r.sample(list(known), num_keys)
        return "get " + " ".join(keys), " ".join(known[key] for key in keys), kind
    return *without_table(r, kind), kind


def without_table(r: random.Random, kind: str) -> tuple[str, str]:
    """Question and answer of a kind that needs no table."""
    match kind:
        case "copy":
            text = " ".join(word(r, r.randint(2, 6)) for _ in range(r.randint(2, 12)))
            return "copy " + text, text
        case "reverse":
            text = word(r, r.randint(3, 16))
            return "reverse " + text, text[::-1]
        case "sort":
            values = [r.randrange(100) for _ in range(r.randint(3, 10))]
            return "sort " + " ".join(map(str, values)), " ".join(map(str, sorted(values)))
        case "add":
            digits = r.randint(1, 4)
            a, b = r.randrange(10**digits), r.randrange(10**digits)
            return f"add {a} {b}", str(a + b)
        case "sign":
            names = [r.choice(list(NAMES)) for _ in range(r.randint(1, 6))]
            return "sign " + " ".join(names), "".join(NAMES[name] for name in names)
        case "json":
            name, age, town = word(r, r.randint(3, 6)), r.randrange(100), word(r, r.randint(3, 5))
            return f"json name {name} age {age} town {town}", f'{{"name": "{name}", "age": {age}, "town": "{town}"}}'
    first = r.randrange(900)
    last = first + r.choice((3, 5, 8, 12, 20, 40))
    return f"count {first} {last}", " ".join(map(str, range(first, last + 1)))


def max_keys(budget: int) -> int:
    """The largest table that leaves 200 tokens for a question and its answer."""
    return max(1, int((budget - 200) / 11))


def dialogue(r: random.Random, budget: int) -> tuple[list[int], list[float]]:
    """Token ids and loss weights of one dialogue of at most about `budget` tokens."""
    ids, weights = [BOS], [0.0]
    known: dict[str, str] = {}
    if r.random() < 0.75:
        most = max_keys(budget)
        known = table(r, r.randint(1, most) if r.random() < 0.5 else r.randint(max(1, most // 2), most))
        text = as_text(known).encode()
        ids += [SYSTEM, *text]
        weights += [0.0] + [0.02] * len(text)
    for _ in range(40):
        asked, answer, _ = question(r, known)
        q, a = asked.encode(), answer.encode()
        if len(ids) + len(q) + len(a) + 3 > budget:
            break
        ids += [USER, *q, ASSISTANT, *a, EOS]
        weights += [0.02] * (len(q) + 2) + [1.0] * (len(a) + 1)
    return ids, weights


def batch(seed: int, num_rows: int, length: int) -> tuple[Any, Any]:
    """Ids (int16) and weights (float16), `[num_rows, length + 2]`: dialogues packed one after another."""
    import numpy as np

    r = random.Random(seed)
    ids_BT = np.full((num_rows, length + 2), PAD, dtype=np.int16)
    weights_BT = np.zeros((num_rows, length + 2), dtype=np.float16)
    for row in range(num_rows):
        first = 0
        while first < length - 64:
            left = length + 2 - first
            ids, weights = dialogue(r, min(left, r.choice((256, 512, 1024, left, left))))
            ids, weights = ids[:left], weights[:left]
            ids_BT[row, first : first + len(ids)] = ids
            weights_BT[row, first : first + len(ids)] = weights
            first += len(ids)
    return ids_BT, weights_BT


def problems(seed: int, num: int, budget: int) -> list[Problem]:
    """Held-out problems as chat messages; `budget` is the context in tokens."""
    r = random.Random(f"eval-{seed}")
    made: list[Problem] = []
    while len(made) < num:
        most = max_keys(budget)
        known = table(r, r.randint(max(1, most // 2), most)) if r.random() < 0.75 else {}
        asked, answer, kind = question(r, known)
        messages = [{"role": "system", "content": as_text(known)}] if known else []
        made.append({"messages": [*messages, {"role": "user", "content": asked}], "answer": answer, "kind": kind})
    return made


def as_text(known: dict[str, str]) -> str:
    """A table as the system message holds it."""
    return "; ".join(f"{key}={value}" for key, value in known.items())
