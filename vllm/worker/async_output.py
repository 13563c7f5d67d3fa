"""The output of a step that may still run on the GPU."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.core.outputs import ModelRunnerOutput, StepRows, TokenLogprobs
from vllm.distributed.groups import wait_for
from vllm.kernels.jit.monitor import MONITOR
from vllm.worker.drafts import Proposals
from vllm.worker.input_batch import InputBatch
from vllm.worker.numerics import BROKEN, NumericsWatch
from vllm.worker.speculation import Verification


@dataclass(slots=True)
class AsyncModelRunnerOutput:
    """The output of a step in flight. On a GPU the next step can be launched meanwhile.

    places: where each request's token goes in the batch; None for a step with draft tokens, whose
    rows are as many as `verification` says. tokens: int64 [S] in host memory, valid after `copied`;
    None: at once. logprobs: by request, of its rows. pooled: vectors of pooling requests. rows: of
    its kernels. verification: None where nothing is verified or drafted. watch: of the layers, with
    --debug-numerics. first_broken: the first module it had found when the step was launched.
    timeout_s: the longest wait. catch_up_seconds: as in Proposals, before there was a result.
    """

    batch: InputBatch
    request_ids: list[str]
    places: np.ndarray | None
    tokens: Tensor
    copied: torch.cuda.Event | None
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    pooled: dict[str, list[float]]
    rows: StepRows
    verification: Verification | None = None
    watch: NumericsWatch | None = None
    first_broken: str | None = None
    timeout_s: float | None = None
    catch_up_seconds: float = 0.0

    @classmethod
    def without_tokens(
        cls,
        batch: InputBatch,
        rows: StepRows,
        prompt_logprobs: dict[str, list[TokenLogprobs]] | None = None,
        pooled: dict[str, list[float]] | None = None,
        catch_up_seconds: float = 0.0,
    ) -> "AsyncModelRunnerOutput":
        """Of a step that samples nothing."""
        places, tokens = np.empty(0, np.int64), torch.empty(0, dtype=torch.int64, device="cpu")
        return cls(
            batch, [], places, tokens, None, {}, prompt_logprobs or {}, pooled or {}, rows,
            catch_up_seconds=catch_up_seconds,
        )  # fmt: skip

    def result(self) -> ModelRunnerOutput:
        """Waits for the step. To be called once, in the order of the steps."""
        if self.copied is not None:
            wait_for(self.copied, self.timeout_s)
        if self.places is not None:
            self.batch.put_tokens(self.request_ids, self.places, self.tokens.numpy())
            sampled = self.tokens[:, None].tolist()
        else:
            assert self.verification is not None
            sampled = self.verification.accepted(self.request_ids, self.tokens.tolist())
            self.batch.append_tokens(self.request_ids, sampled)
        broken = [name for name, vector in self.pooled.items() if not math.isfinite(sum(vector))]
        if any(tokens[-1] == BROKEN for tokens in sampled):  # which no draft token is
            broken += [i for i, tokens in zip(self.request_ids, sampled) if tokens[-1] == BROKEN]
            sampled = [[] if tokens[-1] == BROKEN else tokens for tokens in sampled]
        drafts = Proposals({})
        if self.verification is not None:
            drafts = self.verification.propose(
                [i for i, tokens in zip(self.request_ids, sampled) if tokens]
            )
        return ModelRunnerOutput(
            request_ids=[*self.request_ids, *self.pooled],
            sampled_token_ids=sampled + [[] for _ in self.pooled],
            logprobs=self._logprobs_of(sampled),
            prompt_logprobs=self.prompt_logprobs,
            pooler_output=self.pooled,
            draft_token_ids=drafts.drafts,
            catch_up_seconds=self.catch_up_seconds + drafts.catch_up_seconds,
            errors=dict.fromkeys(broken, self._what_broke()) if broken else {},
            compile_waits=[(made.end - made.seconds, made.seconds) for made in MONITOR.take()],
            rows=self.rows,
        )

    def _logprobs_of(self, sampled: list[list[int]]) -> dict[str, list[TokenLogprobs]]:
        """Those of accepted rows. sampled: new tokens of each request."""
        if self.places is not None or not self.logprobs:
            return self.logprobs
        counts = dict(zip(self.request_ids, map(len, sampled)))
        return {i: entries[: counts[i]] for i, entries in self.logprobs.items()}

    def _what_broke(self) -> str:
        text = "the model's logits for the next token are NaN or infinite"
        if self.watch is None:
            return f"{text}; start with --debug-numerics to learn in which layer that begins"
        self.watch.first = None  # the next failure may begin elsewhere
        return f"{text}; the first output that is not finite is that of {self.first_broken}"
