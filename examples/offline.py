"""A model without a server: python examples/offline.py [MODEL]."""

import sys

from plait import LLM, SamplingParams


def main(model: str | None) -> None:
    with LLM(model, max_num_seqs=8) as llm:
        prompts = ["The capital of France is", "Water boils at"]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)):
            print(f"{output.prompt}{output.outputs[0].text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
