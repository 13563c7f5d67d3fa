"""The body of the engine process, in a thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from vllm import SamplingParams
from vllm.core.request import EngineRequest
from vllm.engine import process
from vllm.engine.arg_utils import EngineArgs


@dataclass
class Running:
    """A loop in a thread, and what its parent and its other clients have of it."""

    to_engine: Any
    from_engine: Any
    client: Callable[[str], Any]


@contextmanager
def running(model: Any, **options: Any) -> Iterator[Running]:
    context = zmq.Context()
    pairs = []
    for name in ("in", "out"):
        receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        receiver.bind(f"inproc://{name}")
        sender.connect(f"inproc://{name}")
        pairs.append((receiver, sender))
    (inbox, to_engine), (from_engine, outbox) = pairs
    clients = context.socket(zmq.ROUTER)
    clients.bind("inproc://clients")

    def client(name: str) -> Any:
        wire = context.socket(zmq.DEALER)
        wire.setsockopt(zmq.ROUTING_ID, name.encode())
        wire.connect("inproc://clients")
        return wire

    loop = process._EngineLoop(inbox, outbox, clients)
    loop.load(
        EngineArgs.from_keywords(model=model, skip_tokenizer_init=True, **options), process.DPRank()
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield Running(to_engine, from_engine, client)
    finally:
        to_engine.send(process.encode(process.Stop()))
        thread.join(10)
        context.destroy(linger=0)
        assert not thread.is_alive()


def request(name: str, num_prompt: int, max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return EngineRequest(name, list(range(3, 3 + num_prompt)), params, 0, [], max_tokens)


def test_a_busy_engine_gives_signs_of_life_though_it_has_no_tokens_to_tell(checkpoint, monkeypatch):
    monkeypatch.setattr(process, "_HEARTBEAT_SECONDS", 0.0)
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 4}
    with running(checkpoint("llama"), **options) as engine:
        engine.to_engine.send(process.encode(process.Add([request("one#0", 40, 2)], 1)))
        decoder, found = process.decoder(), []
        while not found or not found[-1].outputs or found[-1].outputs[0].finish_reason is None:
            message = decoder.decode(engine.from_engine.recv())
            if isinstance(message, process.Outputs):
                found.append(message)
            else:
                assert msgspec.structs.asdict(message)["is_gpu"] is False  # on a CPU
    # A prompt of 40 tokens takes ten steps, of which the last has the first token.
    assert sum(not message.outputs for message in found) >= 9


def test_each_client_gets_what_concerns_its_requests_and_the_parent_all_statistics(checkpoint):
    with running(checkpoint("llama"), max_num_seqs=4, max_model_len=512) as engine:
        wires = {name: engine.client(name) for name in ("a", "b", "gone")}
        lengths = {"a": 30, "b": 7, "gone": 400}
        for name, wire in wires.items():
            own = request(f"{name}#0", 5, lengths[name])
            wire.send(process.encode(process.Add([own], 1)))
        decoder = process.decoder()
        tokens = dict.fromkeys("ab", 0)
        for name in "ba":
            is_finished = False
            while not is_finished:
                message = decoder.decode(wires[name].recv())
                assert {output.request_id for output in message.outputs} <= {f"{name}#0"}
                assert set(message.started) <= {f"{name}#0"}
                assert not message.stats.step_tokens  # counted once, by the parent
                tokens[name] += sum(len(output.token_ids) for output in message.outputs)
                is_finished = any(output.finish_reason for output in message.outputs)
        assert tokens == {"a": 30, "b": 7}
        engine.to_engine.send(process.encode(process.Leave("gone")))
        num_computed, is_idle = 0, False
        while not is_idle:
            message = decoder.decode(engine.from_engine.recv())
            if isinstance(message, process.Outputs):
                assert not message.outputs
                num_computed += sum(n * k for n, k in message.stats.step_tokens.items())
                is_idle = num_computed > 0 and not message.stats.num_running
        assert 3 * 5 + 30 + 7 <= num_computed < 3 * 5 + 30 + 7 + 400
        # What it had sent may be read after the word that it is gone: nobody waits for it.
        late = process.Add([request("late#0", 5, 400)], 2)
        wires["gone"].send(process.encode(late))
        wires["a"].send(process.encode(process.Add([request("next#0", 5, 3)], 2)))
        outputs = []
        while not outputs or outputs[-1].finish_reason is None:
            outputs += decoder.decode(wires["a"].recv()).outputs
        assert {output.request_id for output in outputs} == {"next#0"}
        while wires["gone"].poll(300):
            told = decoder.decode(wires["gone"].recv())
            assert "late#0" not in {*told.started, *(one.request_id for one in told.outputs)}
