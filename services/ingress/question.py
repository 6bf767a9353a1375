"""A rank request after parsing: the same in every format of the body, its candidates as columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers

from services.ingress import body
from services.ingress.admission import Ask
from services.ingress.fairness import Caller
from services.ingress.text import shown
from shared.errors import InvalidRequestError
from shared.hashing import EntityId
from shared.schema.api import ApiLimits, FeatureInput, RankFields, RankRequest, WeightedIds
from shared.wire import MEDIA_TYPE, BatchLimits, CandidateBatch, columns_of, decode_batch, encode_batch, split_request
from shared.wire.columns import FeatureValue

TIMEOUT_HEADER = "x-request-timeout-ms"
TENANT_HEADER = "x-tenant"
_RAW_TENANT = TENANT_HEADER.encode()
_TENANT = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Sender:
    """What the headers of a request say.

    Args:
        tenant: Who pays for the request, as the network in front names it; empty: nobody in particular.
        timeout_ms: How long the client waits, milliseconds; None: it does not say.
    """

    tenant: str = ""
    timeout_ms: int | None = None

    @classmethod
    def of(cls, headers: Headers) -> Self:
        """Read the headers.

        Raises:
            InvalidRequestError: one of them breaks its rule, or is there twice.
        """
        tenant, timeout = _only(headers, TENANT_HEADER) or "", _only(headers, TIMEOUT_HEADER)
        if tenant and not _TENANT.fullmatch(tenant):
            raise InvalidRequestError(
                f"{TENANT_HEADER} must be 1 to 128 visible ASCII characters, is {shown(tenant)}",
                field=TENANT_HEADER, limit=128, value=shown(tenant),
            )  # fmt: skip
        if timeout is not None and not (timeout.isascii() and timeout.isdigit() and len(timeout) <= 9):
            raise InvalidRequestError(
                f"{TIMEOUT_HEADER} must be whole milliseconds, is {shown(timeout)}",
                field=TIMEOUT_HEADER, limit="an integer", value=shown(timeout),
            )  # fmt: skip
        return cls(tenant, None if timeout is None else int(timeout))


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the tenant that a request's raw headers name; empty where they name none, or one that breaks the rule."""
    for name, value in headers:
        if name == _RAW_TENANT:
            tenant = value.decode("latin-1")
            return tenant if _TENANT.fullmatch(tenant) else ""
    return ""


def _only(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if len(values) > 1:  # which of them counted would be by chance of who stands in front
        raise InvalidRequestError(
            f"{name} must be there once, is there {len(values)} times", field=name, limit=1, value=len(values)
        )
    return values[0] if values else None


NOBODY = Sender()


@dataclass(frozen=True, slots=True)
class RankQuestion:
    """What a client asks.

    Args:
        fields: Everything but the candidates.
        ids: Candidate ids as the client sent them, for the answer.
        batch: The candidates as columns.
        block: The same as bytes, which preprocess reads.
        sender: What its headers say.
    """

    fields: RankFields
    ids: list[EntityId]
    batch: CandidateBatch
    block: bytes
    sender: Sender = NOBODY

    def budget_ms(self, limits: ApiLimits) -> float:
        """Return the whole budget, milliseconds: the smaller of field and header, or the deployment's."""
        given = [value for value in (self.fields.deadline_ms, self.sender.timeout_ms) if value is not None]
        return float(min(given, default=limits.deadline_ms_default))

    def ask(self, limits: ApiLimits) -> Ask:
        """Return what admission looks at."""
        budget_ms = min(self.budget_ms(limits), limits.deadline_ms_max)
        return Ask(len(self.ids), budget_ms, Caller(self.sender.tenant, self.fields.surface))

    @classmethod
    def of(cls, request: RankRequest, limits: ApiLimits, sender: Sender = NOBODY) -> Self:
        """Turn the document form into columns.

        Raises:
            InvalidRequestError: what candidates carry does not fit together, or breaks a limit.
        """
        batch = CandidateBatch.of(request.candidates)
        if request.features is None:
            return cls(request, request.candidates, batch, encode_batch(batch), sender)
        if len(request.features) != len(batch):
            raise InvalidRequestError(
                f"features must be one map a candidate, {len(batch)}, are {len(request.features)}",
                field="features", limit=len(batch), value=len(request.features),
            )  # fmt: skip
        # Before columns are made: each name is one, as long as there are candidates.
        if (num_names := len({name for row in request.features for name in row})) > limits.features_max:
            raise InvalidRequestError(
                f"features must be at most {limits.features_max}, are {num_names}",
                field="features", limit=limits.features_max, value=num_names,
            )  # fmt: skip
        rows = [{name: _plain(value) for name, value in row.items()} for row in request.features]
        block = encode_batch(CandidateBatch(batch.integers, batch.texts, columns_of(rows)))
        return cls(request, request.candidates, decode_batch(block, _batch_limits(limits)), block, sender)

    @classmethod
    def parse(cls, content: bytes, media: str, limits: ApiLimits, sender: Sender = NOBODY) -> Self:
        """Parse a body.

        Raises:
            MalformedBodyError: it is not what ``media`` says.
            InvalidRequestError: a field breaks a rule; names the field, the rule and the value.
        """
        if media != MEDIA_TYPE:
            return cls.of(body.validate(RankRequest, body.decode(content, media)), limits, sender)
        header, block = split_request(content)
        fields = body.validate(RankFields, body.decode(header, body.JSON))
        batch = decode_batch(block, _batch_limits(limits))
        return cls(fields, batch.ids, batch, block, sender)


def _batch_limits(limits: ApiLimits) -> BatchLimits:
    return BatchLimits(limits.candidates_max, limits.features_max, limits.feature_ids_max)


def _plain(value: FeatureInput) -> FeatureValue:
    return {"ids": value.ids, "weights": value.weights} if isinstance(value, WeightedIds) else value
