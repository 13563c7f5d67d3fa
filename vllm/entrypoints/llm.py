"""`LLM`: the engine for scripts, in this process."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.early_start import started_early
from vllm.engine.input_processor import Prompt
from vllm.errors import RequestError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import (
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    default_sampling_params,
)
from vllm.utils.startup import begin_report, no_collections


class LLM:
    """Loads a model and generates. Keywords are those of `EngineArgs` (`vllm serve --help`).

    Raises ConfigError or CheckpointError with what is wrong and what would be right.
    """

    def __init__(self, model: str | Path, tokenizer: str | None = None, **engine_args: Any):
        report = begin_report()  # not with this process, which is the user's
        args = EngineArgs.from_keywords(model=model, tokenizer=tokenizer, **engine_args)
        with started_early(args), no_collections():
            from vllm.engine.llm_engine import LLMEngine

            with report.phase("configuration"):
                config = args.create_engine_config()
            self.llm_engine = LLMEngine(config)
        self._ids = itertools.count(1)

    def get_tokenizer(self) -> Any:
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Of the model's generation_config.json, else greedy-free OpenAI defaults."""
        return default_sampling_params(self.llm_engine.config.model_config.generation)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: a text, {"prompt_token_ids": [...]}, a list of token ids, or a list of those.
        sampling_params: one for all, or one per prompt. Nothing is generated when any of them
        is malformed: RequestError.
        """
        prompt_list = _as_list(prompts)
        params = self._params_per_prompt(sampling_params, len(prompt_list))
        return self._run(prompt_list, params, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """One vector per prompt, in the order of the prompts: the last hidden state of the prompt's
        last token. RequestError, and no vector, when a prompt is malformed."""
        prompt_list = _as_list(prompts)
        params = [pooling_params or PoolingParams()] * len(prompt_list)
        return self._run(prompt_list, params, use_tqdm)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: bool,
    ) -> list[Any]:
        """The output of every prompt, in their order."""
        ids = []
        done: dict[str, Any] = {}
        try:
            for prompt, param in zip(prompts, params):
                ids.append(str(next(self._ids)))
                self.llm_engine.add_request(ids[-1], prompt, param)
            with tqdm(
                total=len(ids), desc="Generating", unit="prompt", disable=not use_tqdm
            ) as bar:
                while self.llm_engine.has_unfinished:
                    for output in self.llm_engine.step():
                        done[output.request_id] = output
                        bar.update()
        except BaseException:
            for request_id in ids:
                self.llm_engine.abort(request_id)
            raise
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation (a list of {"role", "content"}) or several of them."""
        tokenizer = self.get_tokenizer()
        if tokenizer is None:
            raise RequestError("chat needs a tokenizer: load without skip_tokenizer_init")
        conversations = _conversations(messages)
        try:
            prompts = [
                tokenizer.apply_chat_template(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=True,
                    return_dict=False,
                    **(chat_template_kwargs or {}),
                )
                for conversation in conversations
            ]
        except Exception as error:  # a template is a program with errors of its own kinds
            raise RequestError(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error
        return self.generate(prompts, sampling_params, use_tqdm)

    def _params_per_prompt(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        params = list(given) if isinstance(given, Sequence) else [given] * count
        if not all(isinstance(param, SamplingParams) for param in params):
            raise RequestError(
                f"sampling_params takes a SamplingParams or a list of them, not {given!r}"
            )
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts: give one each")
        for param in params:
            param.output_kind = RequestOutputKind.FINAL_ONLY
        return params


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    is_one = not isinstance(prompts, list | tuple) or (prompts and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several as a list of them, the text parts of a message joined."""
    given = messages if isinstance(messages, list | tuple) else ()
    conversations = [given] if given and isinstance(given[0], dict) else list(given)
    if not conversations or not all(isinstance(c, list | tuple) and c for c in conversations):
        raise RequestError(
            f'chat takes a list of messages {{"role": ..., "content": ...}}, or a list of such '
            f"lists, none of them empty, not {messages!r}",
            "messages",
        )
    return [[_plain_message(message) for message in messages] for messages in conversations]


def _plain_message(message: Any) -> dict[str, Any]:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"a message takes a role and a content, each a text (content also as parts of type "
            f"text), not {message!r}",
            "messages",
        )
    return {**message, "content": content}
