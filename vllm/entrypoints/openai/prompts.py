"""Text to token ids and back, and chat messages to text: off the event loop, in threads.

A long prompt takes seconds to tokenise; the threads release the interpreter lock meanwhile.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from vllm.entrypoints.openai.protocol import TemplateFields
from vllm.entrypoints.openai.segment_cache import SegmentCache
from vllm.errors import ConfigError, QueueFullError, RequestError
from vllm.logger import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

_NUM_THREADS = 2
_SECONDS = 60.0
"""What a prompt may wait for a thread and take there."""

# A prompt is tokenised whole only if its begin, of so many characters per token of the context, has
# not more tokens than the context already. Tokens at the cut may differ: hence the margin.
_CHARS_PER_TOKEN = 16
_MARGIN = 1.25
MAX_TRUNCATED_CHARS = 1 << 20
"""Of a prompt of which truncate_prompt_tokens takes the end; more where the context is long."""

# Templates that ask whether a turn has content, of turns with tool calls.
_TELLS_NONE = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")

# Arguments of apply_chat_template that a request's chat_template_kwargs must not take over.
_RESERVED = frozenset(
    {
        "conversation", "messages", "tools", "documents", "chat_template", "tokenize",
        "add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
        "sanitize_control_tokens",
    }
)  # fmt: skip


@dataclass
class Prompts:
    """The tokenizer and chat template of the served model.

    tokenizer: of transformers, or None (token ids only). chat_template: Jinja text that replaces
    the tokenizer's own. trusts_requests: whether a request may bring a template. template_kwargs:
    arguments of the template, which those of a request override.
    """

    tokenizer: Any
    max_model_len: int
    chat_template: str | None = None
    trusts_requests: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        self._segments = SegmentCache(self.tokenizer, self.chat_template)

    def check_chat_template(self) -> None:
        """Raises ConfigError if --chat-template is not a Jinja template, or its arguments are not
        for it."""
        from jinja2 import TemplateSyntaxError

        if taken := sorted(_RESERVED & self.template_kwargs.keys()):
            raise ConfigError(f"--default-chat-template-kwargs must not set {', '.join(taken)}")
        if self.chat_template is None or self.tokenizer is None:
            return
        probe = [{"role": "user", "content": ""}]
        try:
            self.tokenizer.apply_chat_template(
                probe, chat_template=self.chat_template, tokenize=False
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"--chat-template, line {error.lineno}: {error.message}") from error
        except Exception as error:
            logger.warning("--chat-template fails for one empty user message: %s", error)

    async def encode(
        self, text: str, add_special_tokens: bool, is_truncated: bool = False
    ) -> list[int]:
        """Token ids of `text`; RequestError if it cannot fit the context, told without work, unless
        it `is_truncated` later."""
        self._needed("a prompt given as text")
        least = len(text) / self._max_chars_per_token
        if least > self.max_model_len and not is_truncated:
            raise RequestError(
                f"the prompt has {len(text)} characters, which is at least {int(least)} tokens; "
                f"the context holds {self.max_model_len}",
                "prompt",
            )
        most = max(MAX_TRUNCATED_CHARS, _CHARS_PER_TOKEN * self.max_model_len)
        if is_truncated and len(text) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters; with truncate_prompt_tokens it may have "
                f"{most}: leave out its begin",
                "prompt",
            )
        return await self._in_thread(self._encode, text, add_special_tokens, is_truncated)

    def _encode(self, text: str, add_special_tokens: bool, is_truncated: bool) -> list[int]:
        size = _CHARS_PER_TOKEN * self.max_model_len
        while size < len(text) and not is_truncated:
            begin = self.tokenizer.encode(text[:size], add_special_tokens=False)
            if len(begin) > _MARGIN * self.max_model_len:
                raise RequestError(
                    f"the first {size} of the prompt's {len(text)} characters are {len(begin)} "
                    f"tokens already; the context holds {self.max_model_len}",
                    "prompt",
                )
            size *= 4
        if not add_special_tokens:
            return self._segments.encode(text)
        return list(self.tokenizer.encode(text, add_special_tokens=True))

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`."""
        self._needed("text of token ids")
        return await self._in_thread(self._decode, token_ids, skip_special_tokens)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        size = len(self.tokenizer)
        for token_id in token_ids:
            if token_id >= size:
                raise RequestError(
                    f"token id {token_id} is out of range: the vocabulary has {size} tokens",
                    "tokens",
                )
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return str(text)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        tokenizer = self._needed("text of token ids")
        return await self._in_thread(tokenizer.convert_ids_to_tokens, list(token_ids))

    async def render(self, request: TemplateFields) -> str:
        """The prompt text of a chat; RequestError if the template refuses the messages."""
        tokenizer = self._needed("chat")
        kwargs = request.chat_template_kwargs or {}
        if taken := sorted(_RESERVED & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(taken)}", "chat_template_kwargs"
            )
        template = self.template(request)
        absent = None if _TELLS_NONE.search(template) else ""
        if request.reasoning_effort is not None:
            kwargs = {"reasoning_effort": request.reasoning_effort, **kwargs}
        kwargs = {**self.template_kwargs, **kwargs}

        def render() -> str:
            text = tokenizer.apply_chat_template(
                [message.for_template(absent) for message in request.messages],
                chat_template=template,
                tools=request.template_tools,
                documents=request.documents,
                tokenize=False,
                add_generation_prompt=request.opens_answer,
                continue_final_message=bool(request.continue_final_message),
                **kwargs,
            )
            return str(text)

        try:
            return await self._in_thread(render)
        except (RequestError, QueueFullError):
            raise
        # A template is a program with errors of its own kinds; each means this request cannot be
        # rendered.
        except Exception as error:
            is_broken = type(error).__name__ == "TemplateSyntaxError"  # of any messages
            fix = "; start the server with --chat-template FILE" if is_broken else ""
            raise RequestError(
                f"the chat template cannot render these messages: {error}{fix}", "messages"
            ) from error

    async def tokens(self, text: str) -> list[int]:
        """Of a part of an answer."""
        tokenizer = self._needed("text")
        return await self._in_thread(tokenizer.encode, text, add_special_tokens=False)

    def token_bytes(self, token_id: int, text: str) -> list[int]:
        """UTF-8 bytes of a token; `text` cannot tell where a token holds part of a character."""
        spelling = None
        if "\ufffd" in text and self.tokenizer is not None and token_id < len(self.tokenizer):
            spelling = self.tokenizer.convert_ids_to_tokens(token_id)
        return _bytes_of_spelling(spelling) or list(text.encode())

    def template(self, request: TemplateFields) -> str:
        if request.chat_template is not None:
            if not self.trusts_requests:
                raise RequestError(
                    "chat_template in a request needs a server started with "
                    "--trust-request-chat-template",
                    "chat_template",
                )
            return request.chat_template
        template = self.chat_template or getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template FILE",
                "messages",
            )
        return str(template)

    def _needed(self, purpose: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"{purpose} needs a tokenizer; this server runs with --skip-tokenizer-init and "
                f"takes token ids"
            )
        return self.tokenizer

    @cached_property
    def _max_chars_per_token(self) -> float:
        """Upper bound, infinite for tokenizers where no bound follows from the vocabulary."""
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        model = getattr(backend, "model", None)
        if type(model).__name__ != "BPE":
            return float("inf")
        if getattr(model, "fuse_unk", False) and not getattr(model, "byte_fallback", False):
            return float("inf")
        # Unicode normalisation joins at most four characters into one.
        factor = 1 if backend.normalizer is None else 4
        return factor * max(map(len, self.tokenizer.get_vocab()))

    async def _in_thread(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_SECONDS):
                return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))
        except TimeoutError:
            raise QueueFullError(
                f"the prompt was not tokenised within {_SECONDS:.0f} s: others wait before it, or "
                f"its template or text takes too long",
                retry_after_s=10,
            ) from None


def _bytes_of_spelling(spelling: str | None) -> list[int] | None:
    """Bytes of a token as byte-level and byte-fallback vocabularies spell it, or None."""
    if not spelling:
        return None
    if spelling.startswith("<0x") and spelling.endswith(">"):
        return [int(spelling[3:-1], 16)]
    try:
        return [_BYTE_OF_CHAR[char] for char in spelling]
    except KeyError:
        return None


# GPT-2's alphabet: printable Latin-1 bytes are themselves, others follow from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF_CHAR |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
