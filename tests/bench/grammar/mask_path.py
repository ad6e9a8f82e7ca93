"""What the masks of a step cost between its tokens' landing and its sampling, part by part.

    python tests/bench/grammar/mask_path.py MASK_TIMES --tokenizer FILE --out FILE

MASK_TIMES is the example `mask_times` of plait-grammar, built for release; FILE is a byte-level `tokenizer.json`. 256
answers go on under the schemas of `fields_load`: following the tokens, filling the masks, and how many the ranks do not
have. Then messages with so many new masks go over ipc to a rank's side: sending and receiving them is timed with both
ends and ZeroMQ's threads together, in processor time, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from plait.bench.result_file import Row, commit, machine, versions
from plait_proto import StepMasks, decode, encode
from plait_worker.masks import MaskTable

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.fields_load import SCHEMAS
from bench.gpu.model_shapes import byte_characters

NUM_ROWS, NUM_STEPS, NUM_ROUNDS = 256, 128, 20
NUM_NEW = (0, 8, 48, 256)
"""New masks of a message: none, what compact JSON and any white space bring, and one for each row."""


def tokens(tokenizer: Path) -> list[str]:
    """Each token's bytes as Latin-1 letters; special ones are no text."""
    read = json.loads(tokenizer.read_bytes())
    bytes_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary: dict[str, int] = read["model"]["vocab"]
    special = {one["id"] for one in read.get("added_tokens", [])}
    texts = [""] * (max([*vocabulary.values(), *special]) + 1)
    for word, index in vocabulary.items():
        if index not in special:
            texts[index] = bytes(bytes_of[character] for character in word).decode("latin-1")
    return texts


def filling(mask_times: Path, texts: list[str]) -> Iterator[Row]:
    """The mask threads' part, by the example."""
    with TemporaryDirectory() as folder:
        files = {"tokens": texts, "schemas": SCHEMAS}
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content))
        arguments = [*(str(Path(folder) / name) for name in files), str(NUM_ROWS), str(NUM_STEPS)]
        done = subprocess.run([mask_times, *arguments], text=True, stdout=subprocess.PIPE, check=True)
    for line in map(json.loads, done.stdout.splitlines()):
        told: dict[str, Any] = line["of"]
        case = f"white space {line['white_space']}"
        for part in ("follow_us", "fill_us", "fill_us_of_a_step"):
            yield from (Row(case, f"{part}_{name}", "us", value) for name, value in told[part].items())
        yield Row(case, "distinct_masks_a_step", "count", told["distinct_masks_a_step"])
        for kept, num_new in told["new_masks_a_step_by_masks_kept"].items():
            yield Row(case, f"new_masks_a_step_of_{kept}_kept", "count", num_new)


def message(num_new: int, num_words: int) -> StepMasks:
    """Of a step whose rows have these masks in turn."""
    drawn = np.random.default_rng(7)
    records = drawn.integers(0, 1 << 32, (num_new, 1 + num_words), dtype=np.uint32)
    records[:, 0] = np.arange(num_new)
    masked = np.array([(row, 0, row % max(1, num_new)) for row in range(NUM_ROWS if num_new else 0)], dtype="<u4")
    return StepMasks(1, True, num_words, masked.tobytes(), b"", records.tobytes())


def transfer(num_new: int, vocab_size: int, device: torch.device) -> Iterator[Row]:
    """The way from the engine's socket to the device's masks."""
    case = f"{num_new} new masks of {vocab_size} tokens"
    frames = encode(message(num_new, -(-vocab_size // 32)))
    with TemporaryDirectory() as folder, zmq.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.bind(f"ipc://{folder}/link")
        dealer.setsockopt(zmq.ROUTING_ID, b"rank-0")
        dealer.connect(f"ipc://{folder}/link")
        dealer.send(b"")
        router.recv_multipart()

        def send() -> list[bytes]:
            router.send_multipart([b"rank-0", *frames])
            return dealer.recv_multipart()

        yield Row(case, "send_and_receive_cpu", "us", _micros(send, time.process_time))
        yield Row(case, "decode_cpu", "us", _micros(lambda: decode(frames), time.thread_time))
        received, table = decode(send()), MaskTable(vocab_size, device)
        assert isinstance(received, StepMasks)
        read = _micros(lambda: table.read([received], NUM_ROWS), time.thread_time)
        yield Row(case, "give_to_device_cpu", "us", read)
        router.close()
        dealer.close()


def _micros(run: Callable[[], object], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(NUM_ROUNDS):
        begin = clock()
        run()
        times.append(clock() - begin)
    return round(1e6 * statistics.median(times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mask_times", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    texts, device = tokens(options.tokenizer), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = list(filling(options.mask_times, texts))
    for num_new in NUM_NEW:
        rows += transfer(num_new, len(texts), device)
    report = {
        "commit": commit(),
        "command": "tests/bench/grammar/mask_path.py",
        "machine": machine(),
        "versions": versions(("plait", "torch")),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(row.case, row.metric, row.value, row.unit)


if __name__ == "__main__":
    main()
