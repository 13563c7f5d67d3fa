"""The body of the engine process, in a thread."""

import threading

import msgspec
import zmq

from vllm import SamplingParams
from vllm.core.request import EngineRequest
from vllm.engine import process
from vllm.engine.arg_utils import EngineArgs


def test_a_busy_engine_gives_signs_of_life_though_it_has_no_tokens_to_tell(checkpoint, monkeypatch):
    monkeypatch.setattr(process, "_HEARTBEAT_SECONDS", 0.0)
    context = zmq.Context()
    pairs = []
    for name in ("in", "out"):
        receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        receiver.bind(f"inproc://{name}")
        sender.connect(f"inproc://{name}")
        pairs.append((receiver, sender))
    (inbox, to_engine), (from_engine, outbox) = pairs
    loop = process._EngineLoop(inbox, outbox)
    args = EngineArgs.from_keywords(
        model=checkpoint("llama"),
        skip_tokenizer_init=True,
        max_num_seqs=1,
        max_num_batched_tokens=4,
    )
    loop.load(args, process.DPRank())
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    request = EngineRequest("one#0", list(range(3, 43)), params, 0, [], 2)
    to_engine.send(process.encode(process.Add([request], 1)))
    thread = threading.Thread(target=loop.run)
    thread.start()
    decoder, found = process.decoder(), []
    while not found or not found[-1].outputs or found[-1].outputs[0].finish_reason is None:
        message = decoder.decode(from_engine.recv())
        if isinstance(message, process.Outputs):
            found.append(message)
        else:
            assert msgspec.structs.asdict(message)["is_gpu"] is False  # on a CPU
    to_engine.send(process.encode(process.Stop()))
    thread.join(10)
    context.destroy(linger=0)
    assert not thread.is_alive()
    # A prompt of 40 tokens takes ten steps, of which the last has the first token.
    assert sum(not message.outputs for message in found) >= 9
