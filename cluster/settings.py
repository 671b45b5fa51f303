# SPDX-License-Identifier: Apache-2.0
"""What the Serve application is told: one strict model for the CLI, for code and for YAML."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vtoken.options import parse_replica_options

# vLLM's arguments that have a field of their own here, or that vToken sets itself.
RESERVED = frozenset(
    ("model", "served_model_name", "scheduler_cls", "worker_cls", "additional_config")
)


class SettingsError(ValueError):
    """A setting is unknown or out of range; the message names it."""


class AppSettings(BaseModel):
    """Arguments of `cluster.app:build`; an unknown name or an invalid value raises ValueError.

    Serve ignores unknown keys of its own configuration silently, so nothing is left to it that
    can be checked here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """Path or name of the model, as vLLM takes it."""
    served_model_name: str | None = None
    """Name in the API; the model's path or name when absent."""
    options: dict[str, Any] | None = Field(default_factory=dict)
    """vToken's options of each replica; null runs stock vLLM without any vToken code."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """More of vLLM's server arguments, by their Python names."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables of each replica."""
    replicas: int = Field(default=1, ge=1)
    gpus_per_replica: int = Field(default=0, ge=0)
    max_ongoing_requests: int = Field(default=256, ge=1)
    """Requests that one replica holds at a time. The engine batches and queues better than Serve
    does, so this is a bound on memory, not on concurrency."""
    max_queued_requests: int = Field(default=256, ge=0)
    """Requests that wait for a replica before a client is told to come back later (429)."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long a stopping replica lets its running requests finish."""

    @model_validator(mode="after")
    def _check(self) -> "AppSettings":
        if self.options is not None:
            parse_replica_options(self.options)
            shards = max(self.gpus_per_replica, self.engine.get("tensor_parallel_size") or 1)
            if shards > 1:
                raise ValueError(
                    "gpus_per_replica: tensor parallelism is not supported with token eviction "
                    "yet; use 1 GPU per replica and more replicas"
                )
        if taken := sorted(RESERVED & self.engine.keys()):
            raise ValueError(f"engine: {', '.join(taken)} cannot be set here")
        return self

    @property
    def api_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model

    def engine_args(self) -> dict[str, Any]:
        """vLLM's server arguments for one replica."""
        names = None if self.served_model_name is None else [self.served_model_name]
        return {"model": self.model, "served_model_name": names, **self.engine}


def parse_settings(values: Mapping[str, Any]) -> AppSettings:
    """Settings from plain values; raises SettingsError with one line per mistake."""
    try:
        return AppSettings(**values)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{name}: {message}" if name else message)
        raise SettingsError("; ".join(lines)) from None
