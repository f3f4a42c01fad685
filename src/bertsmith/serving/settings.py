"""Settings of the server: where it listens, how much it takes, who may ask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bertsmith.base.settings import (
    Advanced,
    Bounds,
    Count,
    Metavar,
    NotNegative,
    Positive,
    check_bounds,
)

Port = Bounds("must be in 0 to 65535", minimum=0, maximum=65535)


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """A server's address and limits."""

    title = "server"

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines in: give --api-key-file, too."""
    port: Annotated[int, Port] = 8000
    """Port to listen on; 0 takes a free one."""
    workers: Annotated[int, Count] = 1
    """Processes, which share the weights and the port. One computes on all cores; more help where
    a small model answers faster than one process reads requests."""
    api_key_file: Path | None = None
    """File with one key a line; requests then need "Authorization: Bearer KEY". Health, metrics and
    the page itself stay open."""
    allow_origin: Annotated[tuple[str, ...], Metavar("ORIGIN...")] = ()
    """Origins whose pages may ask (CORS), such as https://example.org; * lets all."""
    max_wait: Annotated[float, Positive] = 0.3
    """Seconds that a request may have to wait for others; beyond, it is refused with 429."""
    timeout: Annotated[float, Positive] = 30.0
    """Seconds for a request from its arrival to its answer."""
    max_body: Annotated[int, Count] = 2_000_000
    """Bytes of a request's body."""
    max_texts: Annotated[int, Count] = 2048
    """Texts of a request."""
    max_tokens: Annotated[int, Count] = 500_000
    """Tokens of all requests that wait, about: what they may hold of the memory."""
    max_connections: Annotated[int, Count, Advanced] = 4096
    """Connections of a worker."""
    drain: Annotated[float, NotNegative, Advanced] = 10.0
    """Seconds after SIGTERM in which open connections still get their answers."""
    allow_token_ids: bool = False
    """Take lists of token ids at /v1/embeddings, too; they must be of the model's own vocabulary,
    as those at /embed are."""
    log: Literal["errors", "requests", "texts"] = "requests"
    """A line of JSON on stderr for failures alone, for every request, or with its body as well."""

    def __post_init__(self) -> None:
        check_bounds(self)
