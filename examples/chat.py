"""A conversation of two turns, in this process. The second turn finds the first one in the prefix
cache.

    python examples/chat.py [MODEL]

MODEL: a chat model, a folder or a name on the Hugging Face hub; without it the demo model.
"""

import sys

from vllm import LLM, SamplingParams
from vllm.entrypoints.demo import demo_model_path

QUESTIONS = ["Name a colour of the rainbow.", "And another one?"]


def main(model: str) -> None:
    llm = LLM(model, max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=32)
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        output = llm.chat(messages, params, use_tqdm=False)[0]
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"user: {question}\nassistant: {answer}")
        print(
            f"({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached)"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path()))
