"""A rank request after parsing: the same in every format of the body, its candidates as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from services.ingress import body
from shared.errors import InvalidRequestError
from shared.hashing import EntityId
from shared.schema.api import ApiLimits, FeatureInput, RankFields, RankRequest, WeightedIds
from shared.wire import MEDIA_TYPE, BatchLimits, CandidateBatch, columns_of, decode_batch, encode_batch, split_request
from shared.wire.columns import FeatureValue


@dataclass(frozen=True, slots=True)
class RankQuestion:
    """What a client asks.

    Args:
        fields: Everything but the candidates.
        ids: Candidate ids as the client sent them, for the answer.
        batch: The candidates as columns.
        block: The same as bytes, which preprocess reads.
    """

    fields: RankFields
    ids: list[EntityId]
    batch: CandidateBatch
    block: bytes

    @classmethod
    def of(cls, request: RankRequest, limits: ApiLimits) -> Self:
        """Turn the document form into columns.

        Raises:
            InvalidRequestError: what candidates carry does not fit together, or breaks a limit.
        """
        batch = CandidateBatch.of(request.candidates)
        if request.features is None:
            return cls(request, request.candidates, batch, encode_batch(batch))
        if len(request.features) != len(batch):
            raise InvalidRequestError(
                f"features must be one map a candidate, {len(batch)}, are {len(request.features)}",
                field="features", limit=len(batch), value=len(request.features),
            )  # fmt: skip
        rows = [{name: _plain(value) for name, value in row.items()} for row in request.features]
        block = encode_batch(CandidateBatch(batch.integers, batch.texts, columns_of(rows)))
        return cls(request, request.candidates, decode_batch(block, _batch_limits(limits)), block)

    @classmethod
    def parse(cls, content: bytes, media: str, limits: ApiLimits) -> Self:
        """Parse a body.

        Raises:
            MalformedBodyError: it is not what ``media`` says.
            InvalidRequestError: a field breaks a rule; names the field, the rule and the value.
        """
        if media != MEDIA_TYPE:
            return cls.of(body.validate(RankRequest, body.decode(content, media)), limits)
        header, block = split_request(content)
        fields = body.validate(RankFields, body.decode(header, body.JSON))
        batch = decode_batch(block, _batch_limits(limits))
        return cls(fields, batch.ids, batch, block)


def _batch_limits(limits: ApiLimits) -> BatchLimits:
    return BatchLimits(limits.candidates_max, limits.features_max, limits.feature_ids_max)


def _plain(value: FeatureInput) -> FeatureValue:
    return {"ids": value.ids, "weights": value.weights} if isinstance(value, WeightedIds) else value
