"""Stream an answer token by token and time it: `python examples/streaming.py "Tell me a story."`."""

import argparse
import time

import openai


def main() -> None:
    """Print the answer as it comes, then the time to the first token and the mean gap."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()

    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    begun = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.question}],
        max_tokens=args.max_tokens,
        stream=True,
    )
    arrivals = []
    for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            arrivals.append(time.monotonic())
            print(text, end="", flush=True)
    print()
    if arrivals:
        gap = (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)
        print(f"[first token after {(arrivals[0] - begun) * 1000:.0f} ms, then one every {gap * 1000:.1f} ms]")


if __name__ == "__main__":
    main()
