"""docs/limits.md: what Plait accepts at most, each value read from the constant in the source that enforces it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HTTP, OPENAI, GRAMMAR = "router/python/plait/http", "router/openai/src/limits.rs", "router/grammar/src/limits.rs"
TEXT, WEIGHTS, NODES = "router/text/src", "worker/plait_worker/weights", "router/python/plait/nodes"


class Limit(NamedTuple):
    """One row."""

    what: str
    file: str
    name: str
    """Of the constant, or of the field in `Limits`."""
    unit: str = ""
    """`bytes`, `s`, or nothing for a number."""


GROUPS: dict[str, tuple[str, tuple[Limit, ...]]] = {
    "Connections": (
        "Beyond them: 503, 431, 413, 408, or the connection is closed. A longer X-Request-Id is replaced.",
        (
            Limit("connections at a time", f"{HTTP}/connection_limits.py", "MAX_CONNECTIONS"),
            Limit("request line and headers", f"{HTTP}/connection_limits.py", "MAX_HEADER_BYTES", "bytes"),
            Limit("headers", f"{HTTP}/connection_limits.py", "MAX_HEADERS"),
            Limit("a body", f"{HTTP}/connection_limits.py", "MAX_BODY_BYTES", "bytes"),
            Limit("until the headers are there", f"{HTTP}/connection_limits.py", "HEADER_SECONDS", "s"),
            Limit("until the body is there", f"{HTTP}/connection_limits.py", "BODY_SECONDS", "s"),
            Limit("a full socket buffer that the client leaves", f"{HTTP}/connection_limits.py", "WRITE_SECONDS", "s"),
            Limit("an idle connection", f"{HTTP}/connection_limits.py", "KEEP_ALIVE_SECONDS", "s"),
            Limit("answer that waits for one slow client", f"{HTTP}/streams.py", "MAX_BACKLOG_BYTES", "bytes"),
            Limit("a client's X-Request-Id, in bytes", f"{HTTP}/request_ids.py", "MAX_REQUEST_ID_BYTES"),
        ),
    ),
    "Requests": (
        "Beyond them: 400 that names the field. [API](api.md) has the ranges of the sampling fields.",
        (
            Limit("objects and lists in a body", f"{HTTP}/body_reader.py", "MAX_CONTAINERS"),
            Limit("`messages`", OPENAI, "MESSAGES"),
            Limit("items of a response's `input`", f"{HTTP}/responses.py", "MAX_ITEMS"),
            Limit("`documents`", OPENAI, "DOCUMENTS"),
            Limit("prompts of one completion", OPENAI, "PROMPTS"),
            Limit("`n`", OPENAI, "CHOICES"),
            Limit("answers of one request: prompts times `n`", OPENAI, "MAX_CHOICES"),
            Limit("`chat_template_kwargs`", OPENAI, "TEMPLATE_ARGUMENTS"),
            Limit("`stop`", OPENAI, "STOP_STRINGS"),
            Limit("a stop string, in bytes", OPENAI, "STOP_BYTES"),
            Limit("`stop_token_ids`", OPENAI, "STOP_IDS"),
            Limit("`logit_bias`", OPENAI, "BIASES"),
            Limit("`allowed_token_ids`", OPENAI, "ALLOWED_IDS"),
            Limit("`bad_words`", OPENAI, "BAD_WORDS"),
            Limit("`top_logprobs`, `prompt_logprobs`", OPENAI, "BEST_TOKENS"),
            Limit("log-probabilities of prompts in one answer", OPENAI, "MAX_PROMPT_LOGPROBS"),
            Limit("text that `/detokenize` answers", OPENAI, "MAX_DETOKENISED_BYTES", "bytes"),
        ),
    ),
    "Constraints": (
        "Beyond them: 400 that says which.",
        (
            Limit("a JSON schema or structural tag", GRAMMAR, "schema_bytes", "bytes"),
            Limit("levels of nesting in a schema", GRAMMAR, "schema_depth"),
            Limit("a regular expression", GRAMMAR, "regex_bytes", "bytes"),
            Limit("texts to choose from", GRAMMAR, "num_choices"),
            Limit("all these texts", GRAMMAR, "choice_bytes", "bytes"),
            Limit("a grammar", GRAMMAR, "grammar_bytes", "bytes"),
            Limit("computing of one compilation", GRAMMAR, "compile_time", "s"),
        ),
    ),
    "Model files": (
        "Beyond them the start ends with exit code 4.",
        (
            Limit("config.json and other small JSON files", f"{TEXT}/model_files.rs", "MAX_CONFIG_BYTES", "bytes"),
            Limit("tokenizer.json", f"{TEXT}/hf_folder.rs", "MAX_TOKENIZER_BYTES", "bytes"),
            Limit("tokens of a vocabulary", f"{TEXT}/vocabulary.rs", "MAX_TOKENS"),
            Limit("shards", f"{WEIGHTS}/safetensors_folder.py", "MAX_SHARDS"),
            Limit("a JSON file of the weights", f"{WEIGHTS}/safetensors_folder.py", "MAX_JSON_BYTES", "bytes"),
            Limit("metadata fields of a GGUF", f"{WEIGHTS}/gguf_header.py", "MAX_FIELDS"),
            Limit("tensors of a GGUF", f"{WEIGHTS}/gguf_header.py", "MAX_TENSORS"),
            Limit("a text in a GGUF", f"{WEIGHTS}/gguf_header.py", "MAX_STRING_BYTES", "bytes"),
            Limit("instructions of a chat template", f"{TEXT}/template.rs", "FUEL"),
            Limit("more of them for each message", f"{TEXT}/template.rs", "FUEL_PER_MESSAGE"),
        ),
    ),
    "Between processes": (
        "Beyond them the message is dropped and counted, or the value refused.",
        (
            Limit("frames of a message", "proto/src/codec.rs", "MAX_FRAMES"),
            Limit("a message's header", "proto/src/codec.rs", "MAX_HEADER_BYTES", "bytes"),
            Limit("a message", "proto/src/codec.rs", "MAX_MESSAGE_BYTES", "bytes"),
            Limit("a value that ranks leave for each other", "router/engine/src/store.rs", "MAX_VALUE_BYTES", "bytes"),
            Limit("such values", "router/engine/src/store.rs", "MAX_ENTRIES"),
            Limit("replicas of a group", "router/engine/src/group/settings.rs", "MAX_REPLICAS"),
            Limit("a message between launchers", f"{NODES}/channel.py", "MAX_MESSAGE_BYTES", "bytes"),
        ),
    ),
    "Files": (
        "Beyond them: exit code 2.",
        (
            Limit("an API key file", f"{HTTP}/auth.py", "MAX_KEY_FILE_BYTES", "bytes"),
            Limit("public.keys and a node's key", f"{NODES}/key_files.py", "MAX_BYTES", "bytes"),
            Limit("a file of restarts", "router/python/plait/restarts.py", "MAX_FILE_BYTES", "bytes"),
            Limit("requests of a trace for `plait simulate`", "router/sim/src/trace.rs", "MAX_REQUESTS"),
            Limit("a dataset for `plait bench`", "router/python/plait/bench/datasets.py", "MAX_FILE_BYTES", "bytes"),
        ),
    ),
}


def rows(limits: tuple[Limit, ...]) -> Iterator[tuple[str, ...]]:
    """What, how much, and where the source has it."""
    for limit in limits:
        yield limit.what, value(limit), f"`{limit.name}` in `{limit.file}`"


def value(limit: Limit) -> str:
    """For people."""
    return _shown(constant(limit.file, limit.name), limit.unit)


def constant(file: str, name: str) -> str:
    """What the source says. Raises `ValueError` if it has no such constant."""
    source = (ROOT / file).read_text()
    found = re.search(
        rf"^(?:pub(?:\(\w+\))? )?(?:const )?\s*{name}(?:: [^=\n]+?)?(?: = |: )([^\n]+?)[;,]?$", source, re.M
    )
    if found is None:
        raise ValueError(f"{file} has no {name}")
    return found[1]


def _shown(text: str, unit: str) -> str:
    if span := re.fullmatch(r"(\d+)\.\.=(\w+)", text):
        return f"{int(span[1])} to {_number(span[2]):,}"
    seconds = re.fullmatch(r"Duration::from_secs\((\d+)\)", text)
    number = float(seconds[1]) if seconds else _number(text)
    if unit == "s":
        return f"{number:g} s"
    if unit == "bytes":
        shift, name = next(each for each in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if number >= 1 << each[0])
        return f"{number / (1 << shift):g} {name}"
    return f"{number:,}"


def _number(text: str) -> float:
    if shifted := re.fullmatch(r"(\d+) << (\d+)", text):
        return int(shifted[1]) << int(shifted[2])
    return float(text) if "." in text else int(text.replace("_", ""), 0)
