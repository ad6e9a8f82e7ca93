"""Send a prompt as token ids, get token ids and log-probabilities back: `python examples/token_ids.py 256 260 104`.

For programs that tokenise themselves, such as a trainer that samples rollouts. `return_token_ids` is vLLM's field.
"""

import argparse

import httpx


def main() -> None:
    """Print each generated id with its log-probability and the likeliest alternatives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("token_ids", nargs="+", type=int, help="the prompt, in the model's vocabulary")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=8)
    args = parser.parse_args()

    request = {
        "prompt": args.token_ids,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
    }
    response = httpx.post(f"{args.url}/v1/completions", json=request, timeout=600)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    logprobs = choice["logprobs"]
    rows = zip(
        choice["token_ids"], logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    for token_id, token, logprob, top in rows:
        print(f"{token_id:>8}  {token!r:<12}  {logprob:8.4f}  {top}")
    print(f"finish_reason: {choice['finish_reason']}")


if __name__ == "__main__":
    main()
