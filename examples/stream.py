"""Text as it is made: drive the engine step by step, print what is new, cancel one request on the way."""

from tritonllm import LLM, SamplingParams
from tritonllm.config.sampling_params import RequestOutputKind
from tritonllm.demo import model_path


def main() -> None:
    engine = LLM(str(model_path())).engine
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=80, output_kind=RequestOutputKind.DELTA)
    engine.add_request("story", "There was a fox named", params)
    engine.add_request("unwanted", "There was a fox named", params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "story":
                print(output.outputs[0].text, end="", flush=True)
        engine.abort_request("unwanted")  # frees its memory at once; harmless once it is gone
    print()


if __name__ == "__main__":
    main()
