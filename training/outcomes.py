"""Joins explored answers with what their users did next.

An outcome is an event of the user on an item of the answer, within a window from the request on. As in training, only
such items have a label: a heavy event is a click, a light one is none, and what nobody touched says nothing. Of several
answers that held the item the newest before the event has it, so no event counts twice, and nor does an answer that a
retry kept twice. The join is made anew each time from what the store holds: an outcome that comes late is found by the
next one, as long as its answer is kept.

Shape letters: N outcomes, C candidates, D depths, O objectives, K signals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pydantic import Field

from models.config import OBJECTIVES
from models.routing import SIGNALS, surface_keys
from shared.config import Config
from shared.hashing import EntityId, store_token
from shared.schema.explored import ExploredAnswer
from shared.schema.user import UserHistory
from shared.userlog import HistoryQuery, UserLog
from shared.userlog.explored import ExploredLog
from shared.weights.deltas import parse_stamp

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

LOGIT_MAX = 50.0
"""Logits further from 0 are no answer of a sound network."""


class JoinConfig(Config):
    """What counts as an outcome, and how much of one user.

    Args:
        delay_s: Age of an answer from which on its outcomes count, seconds: before, those who act at once would stand
            for all.
        window_s: Time after the request within which an event is its outcome, seconds.
        age_s_max: Older answers are left out, seconds.
        click_weight_min: Smallest weight of an event that is a click.
        conversion_weight_min: Smallest weight of one that is a conversion too.
        user_outcomes_max: Outcomes of one user that count, the newest: nobody decides for all.
        user_events_max: Newest events of a user that are looked through.
    """

    delay_s: float = Field(86_400, ge=0)
    window_s: float = Field(86_400, gt=0)
    age_s_max: float = Field(90 * 86_400, gt=0)
    click_weight_min: float = 4.0
    conversion_weight_min: float = 5.0
    user_outcomes_max: int = Field(200, ge=1)
    user_events_max: int = Field(1_000, ge=1)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Candidates of explored answers whose outcome is known.

    Args:
        depths: D depths, ascending.
        logits: float64 [N, D, O], before calibration.
        clicks: bool [N].
        conversions: bool [N], only where there is a click.
        age_s: float64 [N], time since the answer, seconds.
        signals: float32 [N, K], of the request.
        surfaces: int64 [N], id keys.
        counts: What became of answers and candidates, by name.
    """

    depths: tuple[int, ...]
    logits: Floats
    clicks: Bools
    conversions: Bools
    age_s: Floats
    signals: npt.NDArray[np.float32]
    surfaces: Ints
    counts: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of outcomes N."""
        return len(self.clicks)


@dataclass(frozen=True, slots=True)
class _Outcome:
    logits: npt.NDArray[np.float32]
    weight: float
    age_s: float
    answer: ExploredAnswer


def join_outcomes(
    answers: Sequence[ExploredAnswer],
    events: Mapping[str, UserHistory],
    base: str,
    depths: tuple[int, ...],
    now_s: float,
    config: JoinConfig,
) -> Outcomes:
    """Join answers with events.

    Args:
        answers: Explored answers of any users.
        events: ``store_token`` of a user -> what they did; a user who is missing did nothing.
        base: Weights version that counts: another network's logits say nothing of this one's.
        depths: Depths that every answer must have.
        now_s: Time, seconds since the epoch.
        config: What counts.
    """
    counts: Counter[str] = Counter()
    by_user: dict[str, dict[tuple[int, tuple[int, ...]], ExploredAnswer]] = {}
    for answer in answers:
        if (fate := _fate(answer, base, depths, now_s, config)) != "joined":
            counts[f"answers_{fate}"] += 1
            continue
        own = by_user.setdefault(store_token(answer.user), {})
        # One answer is one: what came in twice has the same time and candidates.
        key = (answer.as_of_s, tuple(answer.item_keys.tolist()))
        counts["answers_repeated" if key in own else "answers_joined"] += 1
        own.setdefault(key, answer)
    found: list[_Outcome] = []
    for token, own in by_user.items():
        user = _of_user(list(own.values()), events.get(token), now_s, config, counts)
        counts["outcomes_over_limit"] += max(len(user) - config.user_outcomes_max, 0)
        found += user[: config.user_outcomes_max]
    counts["outcomes"], counts["users"] = len(found), len({store_token(each.answer.user) for each in found})
    return _stacked(found, depths, dict(counts), config)


def _fate(answer: ExploredAnswer, base: str, depths: tuple[int, ...], now_s: float, config: JoinConfig) -> str:
    age_s = now_s - answer.answered_s
    try:
        of = parse_stamp(answer.version)[0]
    except ValueError:
        return "damaged"
    if of != base or answer.depths != depths:
        return "of_other_weights"
    if answer.signals.shape != (len(SIGNALS),) or bool((np.abs(answer.exits) > LOGIT_MAX).any()):
        return "damaged"
    if age_s < config.delay_s:
        return "too_young"
    return "too_old" if age_s > config.age_s_max else "joined"


def _of_user(
    answers: list[ExploredAnswer], events: UserHistory | None, now_s: float, config: JoinConfig, counts: Counter[str]
) -> list[_Outcome]:
    """Return the outcomes of one user, the newest first."""
    holders: dict[int, list[tuple[int, ExploredAnswer, int]]] = {}
    for answer in answers:
        counts["candidates"] += len(answer.item_keys)
        for position, item in enumerate(answer.item_keys.tolist()):
            holders.setdefault(item, []).append((answer.as_of_s, answer, position))
    found: list[_Outcome] = []
    if events is None:
        return found
    used: set[tuple[int, int]] = set()
    for number in range(len(events)):
        item, at_s, weight = (
            column[number].item() for column in (events.item_keys, events.timestamps_s, events.weights)
        )
        before = [one for one in holders.get(item, ()) if one[0] <= at_s < one[0] + config.window_s]
        if not before:
            continue
        as_of_s, answer, position = max(before, key=lambda one: one[0])
        if not np.isfinite(weight):
            counts["events_damaged"] += 1
        elif (item, as_of_s) in used:  # the first event decides
            counts["events_repeated"] += 1
        else:
            used.add((item, as_of_s))
            found.append(_Outcome(answer.exits[position], weight, now_s - answer.answered_s, answer))
    return found[::-1]


def _stacked(found: list[_Outcome], depths: tuple[int, ...], counts: dict[str, int], config: JoinConfig) -> Outcomes:
    weights = np.array([each.weight for each in found], np.float64)
    clicks = weights >= config.click_weight_min
    logits = [each.logits for each in found] or [np.zeros((0, len(depths), len(OBJECTIVES)), np.float32)][:0]
    return Outcomes(
        depths=depths,
        logits=np.array(logits, np.float64).reshape(-1, len(depths), len(OBJECTIVES)),
        clicks=clicks,
        conversions=clicks & (weights >= config.conversion_weight_min),
        age_s=np.array([each.age_s for each in found], np.float64),
        signals=np.array([each.answer.signals for each in found], np.float32).reshape(-1, len(SIGNALS)),
        surfaces=surface_keys(tuple(each.answer.surface for each in found)),
        counts=counts,
    )


async def read_outcomes(
    explored: ExploredLog, log: UserLog, base: str, depths: tuple[int, ...], now_s: float, config: JoinConfig
) -> Outcomes:
    """Read answers and events from the store, and join them.

    Args:
        explored: The answers.
        log: The events.
        base: Weights version that counts.
        depths: Its depths.
        now_s: Time, seconds since the epoch.
        config: What counts.

    Raises:
        StoreUnavailableError: the store cannot be reached or refuses.
    """
    answers: list[ExploredAnswer] = []
    num_damaged = 0
    for data in await explored.read(int(now_s - config.age_s_max)):
        try:
            answers.append(ExploredAnswer.decode(data, len(OBJECTIVES)))
        except ValueError:
            num_damaged += 1
    newest: dict[EntityId, int] = {}
    for answer in answers:
        newest[answer.user] = max(newest.get(answer.user, 0), answer.as_of_s)
    queries = [HistoryQuery(user, as_of_s + int(config.window_s)) for user, as_of_s in newest.items()]
    histories = await log.read_many(queries, config.user_events_max)
    events = {store_token(query.user): history for query, history in zip(queries, histories, strict=True)}
    found = join_outcomes(answers, events, base, depths, now_s, config)
    if num_damaged:
        found.counts["answers_damaged"] = found.counts.get("answers_damaged", 0) + num_damaged
    return found
