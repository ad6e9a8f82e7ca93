"""GGUF's tensor names in Hugging Face's spelling."""

from __future__ import annotations

import re
from collections.abc import Iterator

WHOLE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""One tensor for all experts in a GGUF, one for each in Hugging Face's files."""

_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_WHOLE = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_names(name: str, num_rows: int) -> Iterator[tuple[str, int | None]]:
    """Hugging Face's names of a GGUF tensor, each with its index in the first dimension of a tensor of all experts.

    An unknown name is returned as it is, to be reported as left over.
    """
    if (block := _BLOCK.fullmatch(name)) and block[2] in OF_EXPERTS:
        for expert in range(num_rows):
            yield f"model.layers.{block[1]}.mlp.experts.{expert}.{OF_EXPERTS[block[2]]}.{block[3]}", expert
    elif block and block[2] in IN_BLOCK:
        yield f"model.layers.{block[1]}.{IN_BLOCK[block[2]]}.{block[3]}", None
    elif (whole := _WHOLE.fullmatch(name)) and whole[1] in WHOLE_MODEL:
        yield f"{WHOLE_MODEL[whole[1]]}.{whole[2]}", None
    else:
        yield name, None
