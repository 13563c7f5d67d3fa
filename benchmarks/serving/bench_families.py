"""Whether `vllm serve` answers for published models of many families, and by which kernels.

usage: python benchmarks/serving/bench_families.py [CONFIG ...] [--layers 4] [--engine-args "..."]
           [--jobs 1] [--seconds 540] [--out benchmarks/results/h100]

CONFIG: a config.json, a name that `vllm kernels explain` knows, or one of family_sizes.json (sizes
of a model of each other family, as published; written from memory of their pages and transformers'
defaults); default: the files of tests/select/configs and all these names. Each has its sizes,
random weights and its first layers: as many as it takes to have a layer of every kind, at least
--layers. The server answers one request, then the same again beside 15 others at temperature 0;
reported are the seconds until it is ready, whether both answers were equal, and the kernels of
every layer from GET /kernels. A model that fails or does not fit is reported with its error and
spares the others; none is begun after --seconds. With --jobs several are served at a time, which
takes a --gpu-memory-utilization of each in --engine-args, and says nothing of how fast they start.
Needs a GPU, or a CPU with memory for the embeddings.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "kernels"))

START_SECONDS, ANSWER_SECONDS = 240, 120
# Fields of a config whose entries are one for each layer.
PER_LAYER = (
    "layer_types", "mlp_layer_types", "moe_layers_enum", "attn_type_list", "layers_block_type",
    "hybrid_override_pattern", "no_rope_layers", "moe_topk", "moe_intermediate_size",
    "num_shared_expert",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", metavar="CONFIG")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100"))
    args = parser.parse_args()
    from gpu_results import write_results

    end = time.monotonic() + args.seconds
    found: dict[str, Any] = {}

    def serve(config: Mapping[str, Any]) -> dict[str, Any]:
        if time.monotonic() > end:
            return {"error": f"not begun: {args.seconds:g} s were over"}
        try:
            return serve_once(with_first_layers(config, args.layers), args.engine_args)
        except Exception as error:
            return {"error": str(error)}

    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(serve, config): name for name, config in configs(args.configs)}
        for future in as_completed(running):
            name = running[future]
            found[name] = future.result()
            print(name, json.dumps(found[name]), flush=True)
            options = {"engine_args": args.engine_args, "jobs": args.jobs}
            write_results(args.out, "families.json", **options, models=found)
    failed = [name for name, one in found.items() if "error" in one]
    print(f"{len(found) - len(failed)} of {len(found)} models answered")
    return bool(failed)


def configs(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    from vllm.architectures.registry import builtin_names, is_described, is_served

    if not names:
        names = [str(file) for file in sorted((ROOT / "tests/select/configs").glob("*.json"))]
        names += [*builtin_names(), *family_sizes()["models"]]
    for name in names:
        config = config_of(name)
        if is_described(config) and is_served(config):
            yield Path(name).name.removesuffix(".json"), config
        else:
            print(f"{name}: not served", flush=True)


def config_of(name: str) -> dict[str, Any]:
    """name: as CONFIG above."""
    from vllm.architectures.registry import builtin_config

    sizes = family_sizes()
    if one := sizes["models"].get(name):
        return {**one["config"], "quantization_config": sizes["formats"][one["format"]]}
    found: dict[str, Any] = builtin_config(name) or json.loads(Path(name).read_text())
    return found


def family_sizes() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]]
    found = json.loads(Path(__file__).with_name("family_sizes.json").read_text())
    return found


def with_first_layers(config: Mapping[str, Any], least: int) -> dict[str, Any]:
    """`config` with its first layers, among which is one of every kind of mixer, cache and feed
    forward."""
    from vllm.architectures.registry import describe

    layers = describe(config).layers
    kinds = [
        tuple(map(type, (one.mixer, getattr(one.mixer, "cache", None), one.feed_forward)))
        for one in layers
    ]
    needed = 1 + max(kinds.index(kind) for kind in set(kinds))
    count = min(len(layers), max(least, needed))

    def reduced(fields: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(fields)
        if "num_hidden_layers" in own:
            own["num_hidden_layers"] = count
        for name in PER_LAYER:
            if isinstance(own.get(name), list | str):
                own[name] = own[name][:count]
        if isinstance(own.get("text_config"), Mapping):
            own["text_config"] = reduced(own["text_config"])
        return own

    return reduced(config)


def serve_once(config: Mapping[str, Any], engine_args: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        write_tokenizer(folder)
        start = time.monotonic()
        with server(folder, engine_args) as address:
            ready = time.monotonic() - start
            body = {"model": name, "prompt": list(range(10, 300)), "max_tokens": 16,
                    "temperature": 0, "ignore_eos": True}  # fmt: skip
            others = [{**body, "prompt": list(range(10 + i, 60 + 7 * i))} for i in range(1, 16)]
            first = ask(address, body)
            with ThreadPoolExecutor(16) as pool:
                again, *_ = pool.map(lambda one: ask(address, one), [body, *others])
            kernels = get(f"{address}/kernels")
    for answer in (first, again):
        if (given := answer["usage"]["completion_tokens"]) != 16:
            raise RuntimeError(f"{given} tokens were answered, not 16")
    return {
        "layers": num_layers(config),
        "ready_s": round(ready, 1),
        "equal_in_a_batch": first["choices"][0]["text"] == again["choices"][0]["text"],
        "kernels": kernels_by_layer(kernels),
    }


def num_layers(config: Mapping[str, Any]) -> int:
    return int(config.get("text_config", config)["num_hidden_layers"])


def kernels_by_layer(report: Mapping[str, Any]) -> dict[str, str]:
    """By the first of the layers that share a decision; of attention also what writes its cache."""
    found: dict[str, str] = {}
    for decision in report["decisions"]:
        name, chosen = decision["layers"][0], str(decision["chosen"])
        found[name] = f"{found[name]}, {chosen}" if name in found else chosen
    return found


def write_tokenizer(folder: Path, size: int = 256) -> None:
    """Bytes as tokens, and further ones up to `size`, each a word: prompts are token ids, answers
    any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"Ġ{i:x}" for i in range(len(texts), size)]  # Ġ: a space
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@contextmanager
def server(folder: Path, engine_args: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--port",
               str(port), "--load-format", "dummy", "--max-model-len", "4096",
               *shlex.split(engine_args)]  # fmt: skip
    log = folder / "log.txt"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
        )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"not ready: {log.read_text()[-1500:]}")


def ask(address: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def get(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


if __name__ == "__main__":
    sys.exit(main())
