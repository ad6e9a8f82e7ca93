"""The decoders that are Python's, each with its format's words and the errors that it may raise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from plait import chat
from plait.batch_sizes import with_batch_sizes
from plait.bench.datasets import read_prompts, read_text_lines, read_trace
from plait.bench.response import Response
from plait.errors import SettingsError, StartError
from plait.http.auth import ApiKeys
from plait.http.errors import ApiError
from plait.http.messages import read_message
from plait.http.responses import read_response
from plait.http.text_calls import count_message, read_detokenize, read_response_to_count, read_tokenize
from plait.http.validate import ANONYMOUS, read_chat, read_completion
from plait.hub_settings import HubSettings
from plait.launch.group_place import read_key_lines
from plait.launch.hash_key import cache_secrets
from plait.nodes import messages
from plait.nodes.facts import read_model_files
from plait.nodes.key_files import read_keys
from plait.plan.gpus import GPUS
from plait.plan.layout import layouts
from plait.plan.model import read_model
from plait.plan.simulated import SimulatedModel
from plait.restarts import RestartBudget
from plait.settings import ServeSettings
from plait_proto import UNDECODABLE, Malformed, decode, encode
from plait_proto.all_reduce_check import decode_reduced, decode_reply, decode_request
from plait_worker import link_keys
from plait_worker.errors import ModelFilesError, WorkerError
from plait_worker.models.loader import open_checkpoint, open_config
from plait_worker.process import _read_config

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
MODEL = ROOT / "tests/models/recall-gqa"

JSON = (b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b'""', b"0.5", b'{"a":', b"[" * 10_000)
CHAT = [
    b'"%s"' % word
    for word in b"messages role content tools tool_choice response_format stop n logit_bias stream_options tool_calls "
    b"type text image_url structured_outputs chat_template_kwargs reasoning_effort seed max_tokens logprobs".split()
]
COMPLETION = [b'"%s"' % word for word in b"prompt echo suffix best_of prompt_logprobs stop_token_ids user".split()]
RESPONSE = [
    b'"%s"' % word
    for word in b"input instructions message reasoning function_call function_call_output call_id output arguments "
    b"input_text output_text summary text format json_schema allowed_tools include metadata max_output_tokens".split()
]
MESSAGES = [
    b'"%s"' % word
    for word in b"max_tokens system thinking budget_tokens tool_use tool_result tool_use_id is_error input_schema "
    b"tool_choice output_config context_management edits stop_sequences redacted_thinking user_id any".split()
]
CONFIG = [
    b'"%s"' % word
    for word in b"architectures rope_scaling rope_parameters quantization_config head_dim layer_types yarn llama3 "
    b"num_key_value_heads sliding_window n_routed_experts kv_lora_rank rope_type Qwen3ForCausalLM vocab_size "
    b"DeepseekV3ForCausalLM MiniMaxM2ForCausalLM".split()
]
MSGPACK = [marker + b"\xff" * 4 for marker in (b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf")] + [b"\x91", b"\xc0"]
GGUF = [
    *b"GGUF general.architecture general.alignment rope_freqs.weight _exps.weight".split(),
    b"\x08\x00\x00\x00",
    b"\t\x00\x00\x00",
]
SAFETENSORS = [b'"%s"' % word for word in b"dtype shape data_offsets F32 BF16 F8_E4M3 __metadata__".split()]
LINES = [b"\n", b" ", b"\0", b"\r\n"]
KEY_LINES = [*LINES, b"weight=2", b"priority=", b"#"]
HTTP = [
    line + b"\r\n"
    for line in (
        b"POST /v1/chat/completions HTTP/1.1",
        b"GET /health HTTP/1.1",
        b"OPTIONS * HTTP/2.0",
        b"CONNECT a:1 HTTP/1.0",
        b"Content-Length: 4294967296",
        b"Transfer-Encoding: chunked",
        b"Content-Type: application/json",
        b"Expect: 100-continue",
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"0\r\n",
        b" folded",
        b"",
    )
]


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder of bytes from outside."""

    name: str
    """Of its folder in the corpus too."""
    words: Sequence[bytes]
    """What its format is made of."""
    refusals: tuple[type[Exception], ...]
    """How it says no. Anything else is a failure."""
    decode: Callable[[bytes], object]
    num_reduced: int = 60
    """Inputs of a reduced run."""

    def corpus(self) -> list[bytes]:
        """The hand-made inputs, and those that once failed."""
        if self.name == "frames":
            return [path.read_bytes() for path in sorted((ROOT / "proto/golden").glob("*.bin"))] + self._kept()
        return self._kept()

    def _kept(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))]


@cache
def _folder() -> Path:
    """Where inputs that decoders read from files lie; gone with the process."""
    keep = _KEPT.append
    keep(folder := tempfile.TemporaryDirectory(prefix="plait-fuzz-"))
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@contextmanager
def _file(name: str, raw: bytes) -> Iterator[Path]:
    path = _folder() / name
    path.parent.mkdir(exist_ok=True)
    path.touch(0o600)
    path.chmod(0o600)
    path.write_bytes(raw)
    yield path


def _of_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def decode_file(raw: bytes) -> object:
        with _file(name, raw) as path:
            return read(path)

    return decode_file


def _split(raw: bytes) -> list[bytes]:
    """Frames as the golden files keep them: each after its length. The last one may be cut."""
    frames = []
    while len(raw) >= 4:
        end = 4 + int.from_bytes(raw[:4], "little")
        frames.append(raw[4:end])
        raw = raw[end:]
    return frames


def _frames(raw: bytes) -> None:
    message = decode(_split(raw))
    assert decode(encode(message)) == message


def _body(read: Callable[[bytes, tuple[str, ...]], object]) -> Callable[[bytes], None]:
    def decode_body(raw: bytes) -> None:
        try:
            msgspec.json.encode(read(raw, ("m",)))
        except ApiError as error:
            if error.status >= 500:
                raise AssertionError(error.status) from error
            raise

    return decode_body


def _text_calls(raw: bytes) -> None:
    """Each reader must take or refuse it; the last one's word counts."""
    for read in (read_detokenize, count_message, read_response_to_count):
        with suppress(ApiError):
            read(raw, ("m",), ANONYMOUS)
    read_tokenize(raw, ("m",), ANONYMOUS)


def _answer(raw: bytes) -> None:
    """What a server under measurement sends, whole and as a stream."""
    for streamed in (True, False):
        response = Response(streamed, "token-ids")
        for begin in range(0, len(raw), 1000):
            response.feed(float(begin), raw[begin : begin + 1000])
        response.finish()


def _chat_answer(raw: bytes) -> None:
    chat._message(raw)
    chat._parse_delta(raw.decode(errors="replace"))


def _checkpoint(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in list(checkpoint.source.names)[:8]:
        checkpoint.source.shape(name)
        checkpoint.source.read(name)


def _safetensors(raw: bytes) -> None:
    with _file("weights/config.json", (MODEL / "config.json").read_bytes()), _file("weights/model.safetensors", raw):
        _checkpoint(_folder() / "weights")


def _shard_index(raw: bytes) -> None:
    folder, config = _folder() / "sharded", (MODEL / "config.json").read_bytes()
    with _file("sharded/config.json", config), _file("sharded/model.safetensors.index.json", raw):
        read_model_files(str(folder), HubSettings())
        _checkpoint(folder)


def _config(raw: bytes) -> None:
    """Also as the command line sees it, before any worker."""
    with _file("configured/config.json", raw) as path:
        with_batch_sizes(ServeSettings(), path.parent, lambda: 80 << 30)
        open_config(path.parent)


def _node_keys(raw: bytes) -> None:
    with _file("keys/public.keys", raw), _file("keys/node-0.key", raw[:41]):
        read_keys(_folder() / "keys", 0, 2)


def _plan(path: Path) -> None:
    (_folder() / "scratch").mkdir(exist_ok=True)
    model = read_model(str(path), _folder() / "scratch")
    for layout in layouts(model, 8, 8):
        layout.weight_bytes(model)
        SimulatedModel(model, GPUS["h200"], layout.held(model), 64).config()


def _prompts(path: Path) -> None:
    for is_chat in (True, False):
        with suppress(SettingsError):
            read_prompts(path, is_chat)
    read_text_lines(path)


def _http(raw: bytes) -> None:
    from fuzz.front_door import answer_to

    for status in answer_to(raw):
        assert status < 500 or status == 503, status


_MODEL_FILES = (ModelFilesError, StartError)
TARGETS = (
    Target("frames", MSGPACK, (Malformed,), _frames, 500),
    Target("chat_body", [*JSON, *CHAT], (ApiError,), _body(read_chat), 200),
    Target("completion_body", [*JSON, *COMPLETION], (ApiError,), _body(read_completion), 200),
    Target("response_body", [*JSON, *CHAT, *RESPONSE], (ApiError,), _body(read_response), 200),
    Target("message_body", [*JSON, *CHAT, *MESSAGES], (ApiError,), _body(read_message), 200),
    Target("text_call_body", [*JSON, *CHAT, *COMPLETION], (ApiError,), _text_calls, 100),
    Target("http", HTTP, (), _http),
    Target("api_keys", KEY_LINES, (SettingsError,), _of_file("keys.txt", lambda it: ApiKeys.from_file(it, "fair"))),
    Target("node_keys", LINES, (SettingsError,), _node_keys),
    Target("group_keys", LINES, (SettingsError,), _of_file("group.keys", lambda it: read_key_lines("--k", it, 2))),
    Target("hash_key", LINES, (SettingsError,), _of_file("hash.key", lambda it: cache_secrets(str(it)))),
    Target("link_keys", JSON, (WorkerError,), _of_file("link.json", link_keys.read_keys)),
    Target("node_message", MSGPACK, UNDECODABLE, messages.decode),
    Target("store_request", JSON, UNDECODABLE, decode_request),
    Target("store_reply", JSON, UNDECODABLE, decode_reply),
    Target("reduced", JSON, UNDECODABLE, decode_reduced),
    Target("worker_config", JSON, (WorkerError,), _of_file("worker.json", _read_config)),
    Target("restarts", JSON, (SettingsError,), _of_file("restarts", lambda it: RestartBudget("group", 5, str(it)))),
    Target(
        "kept_restarts",
        JSON,
        (SettingsError,),
        _of_file("kept", lambda it: RestartBudget("group", 5, str(it), model="m")),
    ),
    Target("config", [*JSON, *CONFIG], _MODEL_FILES, _config),
    Target("plan_config", [*JSON, *CONFIG], (StartError,), _of_file("plan.json", _plan)),
    Target("gguf_header", GGUF, _MODEL_FILES, _of_file("model.gguf", _checkpoint), 100),
    Target("safetensors", [*JSON, *SAFETENSORS], _MODEL_FILES, _safetensors),
    Target("shard_index", [*JSON, b'"weight_map"', b"../", b".safetensors"], _MODEL_FILES, _shard_index),
    Target("azure_trace", [*LINES, b",", b'"'], (SettingsError,), _of_file("t.csv", lambda it: read_trace(it, 100))),
    Target("mooncake_trace", [*JSON, *LINES], (SettingsError,), _of_file("t.jsonl", lambda it: read_trace(it, 100))),
    Target("prompts", [*JSON, *LINES, b'"prompt"', b'"messages"'], (SettingsError,), _of_file("p.jsonl", _prompts)),
    Target("answer", [*JSON, b"data: ", b"\n\n", b"data: [DONE]"], (), _answer),
    Target("chat_answer", JSON, (chat.AnswerError,), _chat_answer),
)


def named(name: str) -> Target:
    """The target of this name."""
    return next(target for target in TARGETS if target.name == name)
