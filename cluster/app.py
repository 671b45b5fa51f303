# SPDX-License-Identifier: Apache-2.0
"""The Serve application: front door -> replicas.

`build` is an application builder, so `cluster.app:build` is an import path for Serve's YAML, with
the fields of `AppSettings` as its `args`.
"""

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from cluster.ingress import FrontDoor
from cluster.replica import VTokenReplica
from cluster.settings import AppSettings
from worker.environment import replica_environment

# The front door holds a request while a replica works on it, so it must take all that replicas
# and their queues hold. Serve's default of 5 would stop requests here, with a plain-text error.
FRONT_DOOR_REQUESTS = 10_000
# Three failures in a row end a replica. Until then it attracts requests, as it answers each of them
# at once with an error.
HEALTH_PERIOD_S = 1.0
# A health check waits for the event loop, which rendering a long prompt may hold for a while.
HEALTH_TIMEOUT_S = 30.0


def build(settings: AppSettings) -> Application:
    """The application for `settings`; starts nothing."""
    return build_front_door(build_replicas(settings), settings.drain_s)


def build_replicas(settings: AppSettings) -> Application:
    """The replicas alone, which answer calls through a handle but no HTTP."""
    environment = {
        **replica_environment(stock=settings.options is None),
        **settings.environment,
    }
    replicas = serve.deployment(
        VTokenReplica,
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_queued_requests,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        # A wrong model or option fails the same way each time, half a minute later.
        max_constructor_retry_count=1,
        ray_actor_options={
            "num_cpus": 1,
            "num_gpus": settings.gpus_per_replica,
            "runtime_env": {"env_vars": environment},
        },
    )
    return replicas.bind(settings)


def build_front_door(replicas: Application | DeploymentHandle, drain_s: float) -> Application:
    """The HTTP side, in front of replicas to start with it or of replicas that run already."""
    front_door = serve.deployment(
        FrontDoor,
        max_ongoing_requests=FRONT_DOOR_REQUESTS,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0},
    )
    return front_door.bind(replicas)
