"""`LLM`: the engine for scripts, in this process."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.beam_search import BeamSearch, BeamSearchOutput
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.input_processor import Prompt, refuse_lora
from vllm.entrypoints.chat_utils import conversations, resolve_hf_chat_template
from vllm.errors import RequestError
from vllm.logger import get_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import (
    BeamSearchParams,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    default_sampling_params,
)
from vllm.utils import dataclasses
from vllm.utils.startup import begin_report, no_collections

if TYPE_CHECKING:
    from vllm.engine.metrics_reader import Metric

logger = get_logger(__name__)

UseTqdm = bool | Callable[..., Any]
"""Whether to show progress, or what to make in place of tqdm."""


class LLM:
    """Loads a model and generates. Keywords are those of `EngineArgs` (`vllm serve --help`), and
    those of upstream that change nothing here, with a notice. disable_log_stats: False for
    `get_metrics`.

    Raises ConfigError or CheckpointError with what is wrong and what would be right.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: str | None = None,
        *,
        disable_log_stats: bool | None = None,
        **engine_args: Any,
    ):
        from vllm.engine.early_start import started_early

        report = begin_report()  # not with this process, which is the user's
        own = _own_arguments(engine_args)
        args = EngineArgs.from_keywords(model=model, tokenizer=tokenizer, **own)
        with started_early(args), no_collections():
            from vllm.engine.llm_engine import LLMEngine

            with report.phase("configuration"):
                config = args.create_engine_config()
            self.llm_engine = LLMEngine(config, log_stats=disable_log_stats is False)
        self._ids = itertools.count(1)
        self._enqueued: list[str] = []

    def get_tokenizer(self) -> Any:
        return self.llm_engine.tokenizer

    @property
    def model_config(self) -> Any:
        return self.llm_engine.model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """Of the model's generation_config.json, else greedy-free OpenAI defaults."""
        return default_sampling_params(self.llm_engine.config.model_config.generation)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: a text, {"prompt_token_ids": [...]}, a list of token ids, or a list of those.
        sampling_params: one for all, or one per prompt. Nothing is generated when any of them
        is malformed: RequestError.
        """
        refuse_lora(lora_request)
        prompt_list = _as_list(prompts)
        params = self._params_per_prompt(sampling_params, len(prompt_list))
        return self._run(prompt_list, params, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[str]:
        """Queues requests as `generate` does, and returns their ids; `wait_for_completion` runs
        them."""
        refuse_lora(lora_request)
        prompt_list = _as_list(prompts)
        ids = self._add(prompt_list, self._params_per_prompt(sampling_params, len(prompt_list)))
        self._enqueued += ids
        return ids

    def wait_for_completion(self, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Outputs of all that `enqueue` queued, in that order."""
        ids, self._enqueued = self._enqueued, []
        return self._finish(ids, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput]:
        """One vector per prompt, in the order of the prompts: the last hidden state of the prompt's
        last token. RequestError, and no vector, when a prompt is malformed."""
        refuse_lora(lora_request)
        prompt_list = _as_list(prompts)
        params = [pooling_params or PoolingParams()] * len(prompt_list)
        return self._run(prompt_list, params, use_tqdm)

    def embed(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Refused, as are `score`, `classify` and `reward`: RequestError."""
        raise RequestError(
            "this is not a pooling model: it generates text. `LLM.encode` gives the last hidden "
            "state of a prompt"
        )

    score = classify = reward = embed

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best beams of each prompt, in the order of the prompts. concurrency_limit: prompts
        that are searched side by side, None for all.

        Each step computes one token of every beam; with prefix caching, what beams share is
        computed once. RequestError for a malformed prompt.
        """
        refuse_lora(lora_request)
        inputs, eos_ids = self.llm_engine.inputs, self.llm_engine.model_config.eos_token_ids
        probe = SamplingParams(max_tokens=params.max_tokens)
        tokens = [
            inputs.process("", prompt, probe).prompt_token_ids for prompt in _as_list(prompts)
        ]
        searches = [BeamSearch(own, params, eos_ids) for own in tokens]
        size = concurrency_limit or len(searches) or 1
        with _bar(use_tqdm, len(searches), "Beam search") as bar:
            for first in range(0, len(searches), size):
                running = searches[first : first + size]
                while running := [search for search in running if search.live]:
                    self._extend(running)
                    bar.update(sum(not search.live for search in running))
        outputs = [search.best() for search in searches]
        if (tokenizer := self.get_tokenizer()) is not None:
            for beam in (beam for output in outputs for beam in output.sequences):
                beam.text = tokenizer.decode(beam.tokens)
        return outputs

    def _extend(self, searches: Sequence[BeamSearch]) -> None:
        """One token more for every beam."""
        prompts = [beam.tokens for search in searches for beam in search.live]
        params = [search.step_params for search in searches for _ in search.live]
        found = iter(self._run(prompts, params, use_tqdm=False))
        for search in searches:
            outputs = [next(found).outputs[0] for _ in search.live]
            search.advance([output.logprobs[0] for output in outputs])

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: UseTqdm,
    ) -> list[Any]:
        """The output of every prompt, in their order."""
        return self._finish(self._add(prompts, params), use_tqdm)

    def _add(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | PoolingParams]
    ) -> list[str]:
        """All or none of the requests; their ids."""
        ids: list[str] = []
        try:
            for prompt, param in zip(prompts, params):
                ids.append(str(next(self._ids)))
                self.llm_engine.add_request(ids[-1], prompt, param)
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return ids

    def _finish(self, ids: Sequence[str], use_tqdm: UseTqdm) -> list[Any]:
        """Steps until these requests are finished; what others got meanwhile is kept."""
        done = self.llm_engine.finished
        missing = {request_id for request_id in ids if request_id not in done}
        try:
            with _bar(use_tqdm, len(ids), "Generating") as bar:
                while missing:
                    for output in self.llm_engine.step():
                        if output.finished:
                            done[output.request_id] = output
                        if output.request_id in missing:
                            missing.discard(output.request_id)
                            bar.update()
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return [done.pop(request_id) for request_id in ids]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation (a list of {"role", "content"}) or several of them.

        tools: given to the chat template; calls are in the text of the output, in the model's own
        format. chat_template_content_format: no effect, contents are texts.
        """
        tokenizer = self.get_tokenizer()
        if tokenizer is None:
            raise RequestError("chat needs a tokenizer: load without skip_tokenizer_init")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message needs add_generation_prompt=False")
        turns = conversations(messages)
        template = resolve_hf_chat_template(tokenizer, chat_template, tools)
        try:
            prompts = [
                tokenizer.apply_chat_template(
                    conversation,
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=True,
                    return_dict=False,
                    **(chat_template_kwargs or {}),
                )
                for conversation in turns
            ]
        except Exception as error:  # a template is a program with errors of its own kinds
            raise RequestError(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def reset_prefix_cache(self) -> bool:
        """Later requests compute their prompts anew. Always True: it cannot fail."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Frees weights and KV cache, at every level, until `wake_up` loads them again from the
        checkpoint. RequestError while there are requests."""
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Loads the model again, whatever `tags` names."""
        self.llm_engine.wake_up(tags)

    def start_profile(self) -> None:
        """Traces the engine until `stop_profile`, into the folder VLLM_TORCH_PROFILER_DIR."""
        self.llm_engine.core.start_profile()

    def stop_profile(self) -> None:
        self.llm_engine.core.stop_profile()

    def get_metrics(self) -> "list[Metric]":
        """What `/metrics` of a server shows, as values. RequestError without
        disable_log_stats=False."""
        return self.llm_engine.get_metrics()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """What each rank's executor returns for a method, by name or as a function of it."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """What `func` returns for the model (a torch module) of each rank."""
        return self.llm_engine.apply_model(func)

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


def _own_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Without upstream's arguments that change nothing here, one notice for each whose value is not
    None. ConfigError for those that would change an answer; unknown ones stay."""
    own = {f.name for f in dataclasses.fields(EngineArgs)}
    if given.keys() <= own:
        return given
    from vllm.entrypoints.compatibility.flags import judged
    from vllm.entrypoints.compatibility.tables import OBEYED, by_name

    rows = by_name("flags")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    kept = {}
    for name, value in given.items():
        row = rows.get(f"--{name.replace('_', '-')}")
        if name in own or row is None or row.kind == OBEYED:
            kept[name] = value
        elif value is not None:
            logger.info("%s", judged(row, value, words, name))
    return kept


def _bar(use_tqdm: UseTqdm, total: int, title: str) -> Any:
    if isinstance(use_tqdm, bool):
        from tqdm import tqdm

        return tqdm(total=total, desc=title, unit="prompt", disable=not use_tqdm)
    return use_tqdm(total=total, desc=title, unit="prompt", disable=False)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    is_one = not isinstance(prompts, list | tuple) or (prompts and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]
