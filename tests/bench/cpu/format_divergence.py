"""What each format of quantised weights does to next-token distributions, and which part of that is the engine's.

    PYTHONPATH=tests python tests/bench/cpu/format_divergence.py --out tests/bench/results/format-divergence.json

Three distributions of the same tokens: transformers' in float32 with the unquantised weights, transformers' in float32
with the de-quantised ones, and Plait's on this CPU, which computes with the files by every default. The divergence
(KL, nats) of the second from the first is the weights' loss, that of the third from the second the engine's, that of
the third from the first all of it. Unquantised bfloat16 files, whose loss is the engine's alone, stand beside.

Models: the check models on their dialogues, and SmolLM2-135M (its demo file de-quantised and rounded to bfloat16, which
counts as unquantised here) on this tree's documentation. Matrices are rounded to the nearest: AWQ's and GPTQ's own
calibration would lose less. GGUF files need `--llama-quantize PATH` (README.md beside this).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import safetensors.torch
import torch
import transformers
from models import recall_tasks
from plait.bench.result_file import Row, commit, machine, versions
from plait_kernels.cpu.library import set_num_threads
from plait_testing import fp8_models, packed_models
from plait_testing.model_driver import Driver
from plait_testing.packed_models import FORMS, write_packed
from plait_testing.reference import load_tokenizer, read_llama
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu import peer_models

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
LIBRARIES = ("plait", "torch", "transformers")
NUM_TEXTS, LENGTH, CHUNK, NUM_DECODED = 4, 512, 192, 48
"""Texts and their tokens; of each some are computed in chunks, the last ones one by one."""
CHECK_MODELS, SMOLLM2 = ("recall-gqa", "recall-mla"), "SmolLM2-135M"


@dataclass(frozen=True)
class Written:
    """One model in one format."""

    files: Path
    """As Plait is given them."""
    reference: Callable[[], transformers.PreTrainedModel]
    """The same weights in transformers, float32."""


Write = Callable[[Path, Path], Written]
"""From the unquantised folder in float32, into a new one."""


@dataclass(frozen=True)
class Subject:
    """A model with the texts that it is given."""

    name: str
    folder: Path
    """Unquantised, bfloat16."""
    texts: list[list[int]]


def dialogues(num: int, length: int = LENGTH) -> list[list[int]]:
    """Of the kind that the check models were trained on: tables that nobody can guess, and answers that follow."""
    return [recall_tasks.dialogue(random.Random(f"divergence-{text}"), length)[0] for text in range(num)]


def pages_of_docs(demo: Path, num: int) -> list[list[int]]:
    """As many tokens each, from all over the documentation."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    ids: list[int] = load_tokenizer(demo)(text)["input_ids"]
    stride = (len(ids) - LENGTH) // num
    return [ids[begin : begin + LENGTH] for begin in range(0, num * stride, stride)]


def from_folder(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def write_float32(folder: Path, target: Path) -> Path:
    """The same values in float32, so that de-quantised twins are exact."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    packed_models.write_folder(folder, target, wide, {})
    return target


def packed(form: str, group_size: int, base: Path, folder: Path) -> Written:
    write_packed(base, folder, FORMS[form], group_size)
    return Written(folder, partial(from_folder, packed_models.dense_twin(folder)))


def fp8(form: fp8_models.Form, base: Path, folder: Path) -> Written:
    twin = packed_models.dense_twin(folder)
    fp8_models.write_fp8(base, folder, form)
    fp8_models.write_dequantised(base, twin, form)
    return Written(folder, partial(from_folder, twin))


def gguf(form: str, program: Path, demo: Path, models: Path, _base: Path, _folder: Path) -> Written:
    """By llama.cpp, of the demo model in BF16."""
    file = peer_models.quantised_gguf(form, program, demo, models)
    return Written(file, lambda: read_llama(file))


FOLDERS: dict[str, Write] = {
    "FP8, blocks of 128 x 128": partial(fp8, "blocks"),
    "FP8, a scale a channel": partial(fp8, "channel"),
    "GPTQ, 8 bits, groups of 64": partial(packed, "gptq-8", 64),
    "AWQ, groups of 64": partial(packed, "awq", 64),
    "GPTQ, 4 bits, groups of 64": partial(packed, "gptq", 64),
    "compressed-tensors, 4 bits with zeros, groups of 32": partial(packed, "compressed-zeros", 32),
    "MXFP4": partial(packed, "mxfp4", 32),
    "NVFP4": partial(packed, "nvfp4", 16),
}
K_QUANTS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M")


class Reference:
    """transformers' log-probabilities of each text."""

    def __init__(self, model: transformers.PreTrainedModel, texts: list[list[int]]) -> None:
        with torch.inference_mode():
            self.texts = [distributions(model(torch.tensor([ids])).logits[0]) for ids in texts]


class Engine:
    """Plait's of each text, by its defaults on this CPU."""

    def __init__(self, files: Path, texts: list[list[int]]) -> None:
        self.model = load_model(files, "auto", CPU, Parallel())
        with torch.inference_mode():
            self.texts = [self._logprobs(ids) for ids in texts]
        held = sorted(self.model.quantised_types) or [str(self.model.dtype).removeprefix("torch.")]
        self.held = " and ".join(held)

    def _logprobs(self, ids: list[int]) -> Tensor:
        """``[T, V]``: chunks of a prompt, then rows that decode."""
        driver = Driver(self.model, num_pages=-(-len(ids) // 16) + 1)
        decoded = min(NUM_DECODED, len(ids) // 4)
        prompt, rest = ids[:-decoded], ids[-decoded:]
        parts = [driver.step({"a": prompt[begin : begin + CHUNK]})["a"] for begin in range(0, len(prompt), CHUNK)]
        parts += [driver.step({}, {"a": token})["a"] for token in rest]
        return distributions(torch.cat(parts))


def distributions(logits_TV: Tensor) -> Tensor:
    """Log-probabilities in float64: those of float32 would add some 1e-8 nats."""
    return logits_TV.double().log_softmax(-1)


def divergences(right: Reference, given: Reference | Engine) -> Tensor:
    """KL of each token's distribution, nats."""
    pairs = zip(right.texts, given.texts, strict=True)
    return torch.cat([(right_TV.exp() * (right_TV - given_TV)).sum(-1) for right_TV, given_TV in pairs])


def rows_of(case: str, of: str, kl_T: Tensor) -> Iterator[Row]:
    figures = {"median": kl_T.median(), "p99": kl_T.quantile(0.99), "mean": kl_T.mean()}
    for name, value in figures.items():
        yield Row(case, f"{of}_kl_{name}", "nats", float(value))


Pairs = dict[str, tuple[Reference, Reference | Engine]]
"""The right distributions, and those compared with them."""


def measure(subject: Subject, forms: dict[str, Write], held: dict[str, str]) -> Iterator[Row]:
    """Rows of bfloat16 and of every format; ``held`` learns what Plait multiplies by."""
    right = Reference(from_folder(subject.folder), subject.texts)
    case, whole = f"{subject.name}, bfloat16", Engine(subject.folder, subject.texts)
    held[case] = whole.held
    yield Row(case, "tokens", "tokens", float(sum(map(len, subject.texts))))
    yield from said(list(rows_of(case, "engine", divergences(right, whole))))
    with tempfile.TemporaryDirectory() as made:
        base = write_float32(subject.folder, Path(made) / "float32")
        for number, (name, write) in enumerate(forms.items()):
            case, written = f"{subject.name}, {name}", write(base, Path(made) / f"form-{number}")
            twin, engine = Reference(written.reference(), subject.texts), Engine(written.files, subject.texts)
            held[case] = engine.held
            parts: Pairs = {"weights": (right, twin), "engine": (twin, engine), "both": (right, engine)}
            yield from said([row for of, pair in parts.items() for row in rows_of(case, of, divergences(*pair))])


def said(rows: list[Row]) -> list[Row]:
    words = ", ".join(f"{row.metric} {row.value:.3g}" for row in rows if "mean" not in row.metric)
    print(f"{rows[0].case}: {words}", file=sys.stderr, flush=True)
    return rows


def subjects(names: Sequence[str], models: Path, num_texts: int) -> Iterator[Subject]:
    for name in CHECK_MODELS:
        if name in names:
            yield Subject(name, ROOT / "tests/models" / name, dialogues(num_texts))
    if SMOLLM2 in names and (demo := peer_models.demo_model()) is not None:
        yield Subject(SMOLLM2, peer_models.hugging_face_folder(demo, models), pages_of_docs(demo, num_texts))


def k_quants(program: Path, models: Path) -> dict[str, Write]:
    demo = peer_models.demo_model()
    if demo is None:
        return {}
    return {f"GGUF {form}": partial(gguf, form, program, demo, models) for form in K_QUANTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=(*CHECK_MODELS, SMOLLM2), default=(*CHECK_MODELS, SMOLLM2))
    parser.add_argument("--texts", type=int, default=NUM_TEXTS, help=f"of {LENGTH} tokens (default: %(default)s)")
    parser.add_argument("--llama-quantize", type=Path, help="llama.cpp's program that makes GGUF files")
    parser.add_argument("--peer-models", type=Path, default=Path("target/bench-cpu/models"), help="as of bench_cpu.py")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    begun_at, rows, held = commit(), list[Row](), dict[str, str]()
    torch.set_num_threads(1)
    set_num_threads(1)
    asked.peer_models.mkdir(parents=True, exist_ok=True)
    more = k_quants(asked.llama_quantize, asked.peer_models) if asked.llama_quantize else {}
    for subject in subjects(asked.models, asked.peer_models, asked.texts):
        rows += measure(subject, FOLDERS | (more if subject.name == SMOLLM2 else {}), held)
        record = {
            "commit": begun_at,
            "command": f"python {' '.join(sys.argv)}",
            "machine": machine(),
            "versions": versions(LIBRARIES),
            "held": held,
            "rows": rows,
        }
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    print(table(rows, held))


def table(rows: Sequence[Row], held: dict[str, str]) -> str:
    """As docs/quantisation.md has it: median and p99 of each, in thousandths of a nat."""
    found = {(row.case, row.metric): 1e3 * row.value for row in rows}
    lines = ["| model, format | held in | weights' loss | engine's | both |", "|---|---|---|---|---|"]
    for case, kind in held.items():
        cells = (_cell(found, case, of) for of in ("weights", "engine", "both"))
        lines.append(f"| {case} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: dict[tuple[str, str], float], case: str, of: str) -> str:
    pair = [found.get((case, f"{of}_kl_{name}")) for name in ("median", "p99")]
    return " / ".join("-" if each is None else f"{each:.2g}" for each in pair)


if __name__ == "__main__":
    main()
