"""A cache of keys and values that is too small for its prompts, and the host's memory behind it."""

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path

PARAMS = SamplingParams(temperature=0, max_tokens=12)


def main() -> None:
    # 40 blocks of 8 tokens on the device, and a hundredth of a GiB of the host's memory for what they give up
    llm = LLM(str(model_path()), num_blocks=40, block_size=8, max_num_seqs=4, kv_offloading_size=0.01)
    story = "Once upon a time, there was a little dog. He liked to play in the park with his friend. " * 2
    others = [f"{animal} had a friend. " * 10 for animal in ("A cat", "A bird", "A frog", "A bear", "A fish")]
    llm.generate(story, PARAMS, use_tqdm=False)
    llm.generate(others, PARAMS, use_tqdm=False)  # they take the blocks of the story
    (again,) = llm.generate(story, PARAMS, use_tqdm=False)
    stats = llm.engine.stats
    print(again.outputs[0].text)
    print(f"{again.num_cached_tokens} of {len(again.prompt_token_ids)} prompt tokens were not computed again;")
    print(f"{stats.stored_blocks} blocks went to the host and {stats.loaded_blocks} came back")


if __name__ == "__main__":
    main()
