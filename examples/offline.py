"""A model without a server, from coroutines: python examples/offline.py [MODEL]."""

import asyncio
import sys

from plait import AsyncLLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


async def main(model: str | None) -> None:
    async with AsyncLLM(model, max_num_seqs=8) as llm:
        prompts = llm.generate(["The capital of France is", "Water boils at"], GREEDY)
        chats = llm.chat([{"role": "user", "content": "Say hello."}], GREEDY)
        for output in [output for outputs in await asyncio.gather(prompts, chats) for output in outputs]:
            print(output.prompt, repr(output.outputs[0].text), output.outputs[0].token_ids)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
