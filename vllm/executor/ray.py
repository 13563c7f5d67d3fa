"""Ranks as Ray actors, one per bundle of a placement group, on the nodes of a cluster.

Ray places, starts and monitors them. Steps use plain connections, as for local ranks: a Ray actor
call takes longer than a step may.
"""

import secrets
import socket
from collections import Counter
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.errors import ConfigError, EngineDeadError
from vllm.executor.workers import RankHandle
from vllm.platforms.installed import installed_device

_ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.5
_PLACE_SECONDS = 60.0
_ANSWER_SECONDS = 10.0


class Rank:
    """The actor."""

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def serve(self, rank: int, address: tuple[str, int], key: bytes) -> str | None:
        """Serves until `Stop`; returns the failure, if any."""
        from vllm.executor.worker import run

        connection = _wrap(socket.create_connection(address))
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send(rank)
        failure = run(connection)
        return failure.text if failure is not None else None


class RayProcess:
    def __init__(self, ray: Any, actor: Any, serving: Any):
        self._ray = ray
        self._actor = actor
        self._serving = serving

    def end(self, timeout: float) -> str:
        ended, _ = self._ray.wait([self._serving], timeout=timeout)
        if not ended:
            return "it closed its connection"
        try:
            return self._ray.get(self._serving) or "it ended"
        except Exception as error:  # Ray's own errors, which say how the actor's process ended
            return " ".join(str(error).split())

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)


class RayLauncher:
    """Starts Ray, or joins the cluster that RAY_ADDRESS or `ray start` on this machine names."""

    def __init__(self, config: VllmConfig):
        self._ray = ray = _import_ray()
        parallel = config.parallel_config
        self._num_ranks = parallel.num_engine_ranks
        if not ray.is_initialized():
            _connect(ray, parallel.data_parallel_size)
        self._resource = self._pick_resource()
        self._group: Any = None

    def host(self) -> str:
        return str(self._ray.util.get_node_ip_address())

    def launch(self, ranks: range) -> list[RankHandle]:
        actors = self._start_actors(len(ranks))
        nodes = self._ray.get([actor.node.remote() for actor in actors])
        # Neighbouring ranks communicate most, so they should share a node.
        order = sorted(range(len(actors)), key=lambda index: (nodes.index(nodes[index]), index))
        num_ranks_of = Counter(nodes)
        key = secrets.token_bytes(32)
        with socket.create_server((self.host(), 0)) as server:
            address = server.getsockname()[:2]
            servings = [
                actors[index].serve.remote(rank, address, key) for rank, index in enumerate(order)
            ]
            connections = self._accept(server, servings, key)
        return [
            RankHandle(
                connections[rank],
                RayProcess(self._ray, actors[index], servings[rank]),
                device_index=0,  # an actor sees only its own GPU
                num_neighbours=num_ranks_of[nodes[index]] if self._resource == "GPU" else 1,
            )
            for rank, index in enumerate(order)
        ]

    def close(self) -> None:
        if self._group is not None and self._ray.is_initialized():
            self._ray.util.remove_placement_group(self._group)
        self._group = None

    def _pick_resource(self) -> str:
        there = self._ray.cluster_resources()
        kind = "GPU" if there.get("GPU") or installed_device().kind == "cuda" else "CPU"
        if there.get(kind, 0) < self._num_ranks:
            raise ConfigError(
                f"--distributed-executor-backend ray: the cluster has {there.get(kind, 0):g} "
                f"{kind}s, but tensor- and pipeline-parallel sizes make {self._num_ranks} ranks"
            )
        return kind

    def _start_actors(self, num_ranks: int) -> list[Any]:
        ray = self._ray
        needs = {self._resource: 1}
        self._group = ray.util.placement_group([needs] * num_ranks, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=_PLACE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            free = ray.available_resources().get(self._resource, 0)
            raise ConfigError(
                f"--distributed-executor-backend ray: no place for {num_ranks} ranks of one "
                f"{self._resource} each in {_PLACE_SECONDS:.0f} s; {free:g} are free"
            ) from None
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        variables = {**envs.texts(), "PYTHONPATH": f"{_ROOT}:${{PYTHONPATH}}"}
        return [
            ray.remote(Rank)
            .options(
                num_cpus=needs.get("CPU", 0),
                num_gpus=needs.get("GPU", 0),
                runtime_env={"env_vars": variables},
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=index),
            )
            .remote()
            for index in range(num_ranks)
        ]

    def _accept(self, server: socket.socket, servings: list[Any], key: bytes) -> list[Connection]:
        """The connections of all ranks; EngineDeadError where one ended instead of connecting."""
        found: dict[int, Connection] = {}
        server.settimeout(_POLL_SECONDS)
        while len(found) < len(servings):
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                ended, _ = self._ray.wait(servings, timeout=0)
                if ended:
                    rank = servings.index(ended[0])
                    text = RayProcess(self._ray, None, ended[0]).end(0)
                    raise EngineDeadError(f"rank {rank} did not start: {text}") from None
                continue
            connection = _wrap(accepted)
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            found[connection.recv()] = connection
        return [found[rank] for rank in range(len(servings))]


def _connect(ray: Any, num_engines: int) -> None:
    """ConfigError where the cluster does not answer, or every engine would start its own."""
    address = envs.foreign("RAY_ADDRESS") or ""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    host = host.strip("[]")
    if host and port.isdigit():  # Ray itself would try for many minutes
        try:
            socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
        except OSError as error:
            raise ConfigError(
                f"RAY_ADDRESS={address}: nobody answers there ({error}); start Ray on that machine "
                f"(ray start --head), or unset the variable"
            ) from None
    options = {"log_to_driver": True, "logging_level": "warning"}
    if num_engines == 1:
        with envs.without_secrets():  # Ray shows what its processes were started with
            ray.init(include_dashboard=False, **options)
        return
    try:
        if address == "local":
            raise ConnectionError("RAY_ADDRESS=local starts one for each")
        with envs.without_secrets():
            ray.init(address="auto", **options)
    except ConnectionError as error:
        raise ConfigError(
            f"--distributed-executor-backend ray with --data-parallel-size {num_engines}: engines "
            f"need one cluster for all of them, and there is none ({error}); start it with ray "
            f"start --head, or set RAY_ADDRESS"
        ) from None


def _wrap(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    # A message may be two packets; the second must not wait for the first one's ACK.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f"--distributed-executor-backend ray needs Ray, which cannot be imported ({error}): "
            f"pip install 'vllm[ray]', or take mp for ranks on one machine"
        ) from None
    return ray
