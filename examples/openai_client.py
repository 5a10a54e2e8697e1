"""Ask a server with OpenAI's client. Start one in another terminal: ``tritonllm serve --served-model-name demo``."""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none")  # the key that the server was given, if it was
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is 47 + 66?"}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    print(answer.choices[0].message.content)
    stream = client.completions.create(
        model=model,
        prompt="There was a fox named",
        max_tokens=60,
        seed=7,
        stream=True,
        extra_body={"top_k": 50},  # what vLLM has and OpenAI lacks
    )
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
