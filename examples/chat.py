"""Ask a running server one question with OpenAI's SDK: `python examples/chat.py "What is a KV cache?"`."""

import argparse

import openai


def main() -> None:
    """Print the whole answer and what it cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()

    # A server without --api-key-file takes any key; the SDK wants one.
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": args.question}], temperature=0
    )
    print(answer.choices[0].message.content)
    if answer.usage is not None:
        print(f"[{answer.usage.prompt_tokens} prompt tokens, {answer.usage.completion_tokens} generated]")


if __name__ == "__main__":
    main()
