"""Output that must match a JSON schema, a regular expression, or one of several texts.

    python examples/structured_output.py [MODEL]

MODEL: a folder or a name on the Hugging Face hub; without it the demo model. Needs xgrammar, which
`make serve` installs.
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.entrypoints.demo import demo_model_path
from vllm.sampling_params import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(model: str) -> None:
    llm = LLM(model, max_model_len=512)

    def generate(prompt: str, structure: StructuredOutputsParams) -> str:
        params = SamplingParams(temperature=0, max_tokens=96, structured_outputs=structure)
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

    person = json.loads(
        generate("A person of a novel, as JSON: ", StructuredOutputsParams(json=PERSON))
    )
    print(f"name {person['name']!r}, age {person['age']}")
    print(generate("A date: ", StructuredOutputsParams(regex=r"(19|20)\d\d-[01]\d-[0-3]\d")))
    moods = ["positive", "negative"]
    print(generate("'I love it' is ", StructuredOutputsParams(choice=moods)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path()))
