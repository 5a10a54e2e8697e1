"""Vectors of texts, and which of them fit a question, by an engine that also generates."""

from tritonllm import LLM, PoolingParams, SamplingParams
from tritonllm.demo import model_path


def main() -> None:
    llm = LLM(str(model_path()), pooler_config={"pooling_type": "MEAN"})  # or an embedding model's folder or hub id
    texts = ["There was a fox named Finn.", "47 + 38 = 85", "A fox and a hen were friends."]
    for output in llm.embed(texts, use_tqdm=False):
        vector = output.outputs.embedding
        print(f"{len(vector)} numbers, from {vector[0]:+.3f} to {vector[-1]:+.3f}")

    scores = llm.score("a story about a fox", texts, use_tqdm=False)  # cosines; a cross-encoder would read both texts
    for text, output in sorted(zip(texts, scores, strict=True), key=lambda pair: -pair[1].outputs.score):
        print(f"{output.outputs.score:.3f}  {text}")

    params = PoolingParams(normalize=False)
    (tokens,) = llm.encode(texts[0], params, pooling_task="token_embed", use_tqdm=False)
    print(f"one vector for each token: {tuple(tokens.outputs.data.shape)}")

    (answer,) = llm.generate("47 + 38 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print(answer.outputs[0].text)


if __name__ == "__main__":
    main()
