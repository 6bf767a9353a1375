"""Who may call: bearer tokens, each with a name and the tenant that it speaks for.

The file of tokens is YAML::

    tokens:
      - {name: feed-2026-11, tenant: feed, sha256: 3b0c...}     # hex digest of the token
      - {name: feed-2026-12, tenant: feed, token: vS1k...}      # or the token itself

Several tokens of one tenant make rotation: add the new one, move the clients, take the old one out. The file is read
again when it changes; one that cannot be used leaves the tokens as they were, and is logged. Only digests are kept in
memory. A token is compared with every digest in constant time, whichever matches.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, StringConstraints, ValidationError, model_validator
from starlette.types import Scope

from services.ingress.question import TENANT_HEADER
from shared.clock import Clock
from shared.config import Config, load_config
from shared.errors import ConfigError, ForbiddenError, UnauthenticatedError
from shared.log import JsonLogger
from shared.rules import broken

TOKEN_CHARS_MIN = 24
"""A token is drawn, not thought of: 24 characters of base64 are 144 bits."""

TOKEN_CHARS_MAX = 512
TOKENS_MAX = 1_000

OPEN_PATHS = ("/healthz", "/readyz")
"""Probes: they say that the mesh is there, and nothing about it."""

_RELOAD_S = 1.0
_BEARER = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)
_TENANT = TENANT_HEADER.encode()


class TokenEntry(Config):
    """One token.

    Args:
        name: Tells it from the others in logs and while it is replaced.
        tenant: Whose requests it carries, as ``x-tenant`` would say.
        sha256: Hex SHA-256 of the token.
        token: The token itself; one of the two.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    tenant: str = Field(pattern=r"^[\x21-\x7e]{1,128}$")
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    token: SecretStr | None = Field(None, min_length=TOKEN_CHARS_MIN, max_length=TOKEN_CHARS_MAX)

    @model_validator(mode="after")
    def _is_one_of_two(self) -> TokenEntry:
        if (self.sha256 is None) == (self.token is None):
            raise ValueError(f"{self.name} must have either sha256 or token")
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]+", self.token.get_secret_value()):
            raise ValueError(f"the token of {self.name} must be of visible ASCII characters")
        return self

    @property
    def hashed(self) -> bytes:
        """SHA-256 of the token."""
        if self.token is not None:
            return hashlib.sha256(self.token.get_secret_value().encode()).digest()
        return bytes.fromhex(self.sha256 or "")


class TokenList(Config):
    """The file.

    Args:
        tokens: All of them.
    """

    tokens: tuple[TokenEntry, ...] = Field(min_length=1, max_length=TOKENS_MAX)

    @model_validator(mode="after")
    def _are_distinct(self) -> TokenList:
        names = [entry.name for entry in self.tokens]
        if len(set(names)) < len(names):
            raise ValueError(f"names of tokens must be distinct, are {', '.join(sorted(names))}")
        if len({entry.hashed for entry in self.tokens}) < len(names):
            raise ValueError("two names have the same token")
        return self


@dataclass(frozen=True, slots=True)
class Bearer:
    """Who a request comes from.

    Args:
        name: Of the token.
        tenant: That it speaks for.
    """

    name: str
    tenant: str


class Tokens:
    """The tokens of one ingress replica.

    Args:
        entries: The tokens.
    """

    def __init__(self, entries: Iterable[TokenEntry]) -> None:
        self._held = [(entry.hashed, Bearer(entry.name, entry.tenant)) for entry in entries]

    def replace(self, entries: Iterable[TokenEntry]) -> None:
        """Take these instead of the old ones."""
        self._held = [(entry.hashed, Bearer(entry.name, entry.tenant)) for entry in entries]

    def bearer(self, authorization: bytes | None) -> Bearer:
        """Return who an ``Authorization`` header belongs to.

        Raises:
            UnauthenticatedError: there is none, it is no bearer token, or nobody has this one.
        """
        if authorization is None:
            raise UnauthenticatedError("this mesh asks for a bearer token, the request has none")
        match = _BEARER.fullmatch(authorization)
        if match is None or len(match[1]) > TOKEN_CHARS_MAX:
            raise UnauthenticatedError(
                f"authorization must be 'Bearer' and a token of at most {TOKEN_CHARS_MAX} characters",
                limit=TOKEN_CHARS_MAX,
            )
        digest = hashlib.sha256(match[1]).digest()
        found: Bearer | None = None
        for held, bearer in self._held:  # all of them, so that the time does not tell which one matched
            if hmac.compare_digest(held, digest):
                found = bearer
        if found is None:
            raise UnauthenticatedError("nobody has this token")
        return found

    def admit(self, scope: Scope) -> Scope:
        """Return the request as its bearer's: its tenant is the token's, whatever it says itself.

        Raises:
            UnauthenticatedError: no token that somebody has.
            ForbiddenError: it names another tenant than the token's.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = [value for name, value in headers if name == b"authorization"]
        bearer = self.bearer(given[0] if len(given) == 1 else None)
        named = {value for name, value in headers if name == _TENANT} - {bearer.tenant.encode()}
        if named:
            raise ForbiddenError(
                f"this token speaks for tenant {bearer.tenant}, the request names another one",
                field=TENANT_HEADER, tenant=bearer.tenant,
            )  # fmt: skip
        kept = [(name, value) for name, value in headers if name not in (b"authorization", _TENANT)]
        return {**scope, "headers": [*kept, (_TENANT, bearer.tenant.encode())]}


class TokenFile(Tokens):
    """Tokens of a file, which is read again when it changes.

    Args:
        path: The file.
        clock: Measures how long ago it was looked at.
        logger: Told when a changed file is taken up, and when it cannot be used.

    Raises:
        ConfigError: the file cannot be used; names what is wrong, never a token.
    """

    def __init__(self, path: Path, clock: Clock, logger: JsonLogger) -> None:
        self._path = path
        self._clock = clock
        self._logger = logger
        self._seen = _state(path)
        self._looked_s = clock.monotonic_s()
        super().__init__(read_tokens(path))

    def admit(self, scope: Scope) -> Scope:
        """See ``Tokens.admit``."""
        if self._clock.monotonic_s() - self._looked_s >= _RELOAD_S:
            self._looked_s = self._clock.monotonic_s()
            if (state := _state(self._path)) != self._seen:
                self._seen = state
                self._reload()
        return super().admit(scope)

    def _reload(self) -> None:
        try:
            entries = read_tokens(self._path)
        except ConfigError as error:
            self._logger.error("access_list_refused", error=error)
            return
        self.replace(entries)
        self._logger.info("access_list_read", names=[entry.name for entry in entries])


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """Read a file of tokens.

    Raises:
        ConfigError: it is missing, breaks a rule, or holds a token that every user of the machine can read.
    """
    try:
        entries = load_config(TokenList, path).tokens
    except ConfigError as error:
        raise _without_values(error, path) from None
    if path.stat().st_mode & stat.S_IROTH and any(entry.token is not None for entry in entries):
        raise ConfigError(
            f"{path} holds tokens that everybody on this machine can read: chmod o-r, or keep digests (sha256) there",
            field="http.tokens_file", value=str(path),
        )  # fmt: skip
    return entries


def _without_values(error: ConfigError, path: Path) -> ConfigError:
    """Return the error without what the file holds: whatever stands at the wrong place may be a token."""
    broken_rules = error.__cause__
    if isinstance(broken_rules, ValidationError):
        first = broken_rules.errors()[0]
        loc, is_unknown = first["loc"], first["type"] == "extra_forbidden"
        field = ".".join(map(str, loc[:-1] if is_unknown else loc))  # a name that is no field may be a token too
        words = f"{field or 'it'} has a name that is no field" if is_unknown else broken(field, [first], "")
        return ConfigError(f"{path}: {words}", field=field, value=str(path))
    head, is_yaml, _ = error.message.partition(" is not valid YAML")
    return ConfigError(head + is_yaml, field=str(error.context.get("field", "")), value=str(path))


def _state(path: Path) -> tuple[Any, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
