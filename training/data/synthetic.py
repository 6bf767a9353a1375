"""A seeded synthetic ad log of any size with a known truth, streamed in time order.

A request shows one user a slate of distinct ads on one surface; each impression may be clicked and each click may
convert. The probabilities come from a small world that a ranker can learn: the user's taste times the ad's topics, what
the user did lately (clicked topics attract, passed-over ones tire), ad quality, surface, and the slot on the page. They
are given beside the labels, so the least reachable loss (Bayes) can be computed.

An impression has rating 3 without a click, 4 with one and 5 with a conversion: the labels follow as on MovieLens.

Randomness comes from one generator a round, seeded by (seed, round): chunks cut the stream but never change it.

Shape letters: U users, A ads, K topics, M requests of a round, S slots of a slate, E events of a chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from shared.config import Config
from training.data.dataset import Catalog, Dataset, Truth, UserTable
from training.data.log import EventLog
from training.data.split import split_by_time

SURFACES = ("feed", "search")
TOPICS = (
    *("travel", "sports", "cooking", "music", "gaming", "fashion", "finance", "gardening"),
    *("cars", "books", "health", "movies", "pets", "science", "home", "photography"),
)
_OCCUPATIONS = ("student", "engineer", "teacher", "nurse", "artist", "farmer", "lawyer", "retired")
_AGES = (18, 25, 35, 45, 50, 56)
_WORLD, _ROUND = 0, 1  # first word after the seed: what a generator is for

Float = npt.NDArray[np.float64]


class SyntheticConfig(Config):
    """Size and nature of the synthetic world.

    Args:
        num_events: Impressions of the log.
        num_users: Users; memory of the stream grows with users and ads, never with events.
        num_ads: Ads, at least ``slate_size``.
        num_groups: Ad groups; the ads of a group share their main topic.
        num_topics: Topics of tastes and ads.
        slate_size: Impressions of one request.
        start_s: Time of the first round, seconds since the epoch.
        round_s: Length of a round in seconds; a user makes at most one request a round.
        activity: Mean share of the users that make a request in a round.
        taste_weight: Logit weight of taste times topics.
        history_weight: Logit weight of what the user did lately; 0: a history tells nothing that the user id does not.
        history_decay: What is left of an interest after one more request.
    """

    num_events: int = Field(200_000, ge=1, le=10**10)
    num_users: int = Field(2_000, ge=1, le=10**7)
    num_ads: int = Field(1_000, ge=1, le=10**7)
    num_groups: int = Field(100, ge=1, le=10**6)
    num_topics: int = Field(8, ge=1, le=len(TOPICS))
    slate_size: int = Field(4, ge=1, le=64)
    start_s: int = Field(1_600_000_000, ge=0, le=2**40)
    round_s: int = Field(3_600, ge=1, le=10**6)
    activity: float = Field(0.15, gt=0, le=1)
    taste_weight: float = Field(1.5, ge=0, le=10)
    history_weight: float = Field(2.0, ge=0, le=10)
    history_decay: float = Field(0.7, ge=0, lt=1)

    @model_validator(mode="after")
    def _slate_fits(self) -> SyntheticConfig:
        if self.num_ads < self.slate_size:
            raise ValueError(f"num_ads must be at least slate_size {self.slate_size}, is {self.num_ads}")
        return self


@dataclass(frozen=True, slots=True)
class SyntheticChunk:
    """E consecutive impressions of the stream, in (timestamp, user, item) order.

    Args:
        user_index: int32 [E], 0 to U - 1; the user id is one more.
        item_id: int64 [E], 1 to A.
        rating: uint8 [E], 3 impression, 4 click, 5 conversion.
        timestamp_s: int64 [E].
        surface: uint8 [E], position in ``SURFACES``.
        slot: uint8 [E], 0 to S - 1.
        click_probability: float32 [E].
        conversion_probability: float32 [E], of the impression, so at most ``click_probability``.
    """

    user_index: npt.NDArray[np.int32]
    item_id: npt.NDArray[np.int64]
    rating: npt.NDArray[np.uint8]
    timestamp_s: npt.NDArray[np.int64]
    surface: npt.NDArray[np.uint8]
    slot: npt.NDArray[np.uint8]
    click_probability: npt.NDArray[np.float32]
    conversion_probability: npt.NDArray[np.float32]

    def __len__(self) -> int:
        """Number of impressions E."""
        return len(self.item_id)


def stream_events(config: SyntheticConfig, seed: int, chunk_events: int) -> Iterator[SyntheticChunk]:
    """Yield ``config.num_events`` impressions in chunks of ``chunk_events`` (the last may be shorter).

    Memory is bounded by users, ads, one round and one chunk. The same config and seed give the same impressions
    whatever the chunk size, and a longer log begins with the shorter one.

    Raises:
        ValueError: ``chunk_events`` is under 1.
    """
    if chunk_events < 1:
        raise ValueError(f"chunk_events must be at least 1, is {chunk_events}")
    left = config.num_events
    waiting: list[SyntheticChunk] = []
    num_waiting = 0
    for produced in _rounds(_World.make(config, seed), seed):
        taken = _cut(produced, 0, left)
        left -= len(taken)
        waiting.append(taken)
        num_waiting += len(taken)
        if num_waiting >= chunk_events or left == 0:
            joined = _join(waiting)
            whole = len(joined) if left == 0 else len(joined) - len(joined) % chunk_events
            for start in range(0, whole, chunk_events):
                yield _cut(joined, start, min(start + chunk_events, whole))
            rest = _cut(joined, whole, len(joined))
            waiting, num_waiting = [rest], len(rest)
        if left == 0:
            return


def load_synthetic(config: SyntheticConfig, seed: int) -> Dataset:
    """Collect the stream into a ``Dataset`` with its truth; about 70 bytes of memory an event.

    Args:
        config: Size and nature.
        seed: Any integer from 0.
    """
    chunk = _join(list(stream_events(config, seed, chunk_events=1 << 18)))
    # One sort for log and truth, which goes by event position.
    by_user = np.lexsort((chunk.item_id, chunk.timestamp_s, chunk.user_index))
    log = EventLog.from_sorted(
        user_index=chunk.user_index[by_user],
        item_id=chunk.item_id[by_user],
        rating=chunk.rating[by_user],
        timestamp_s=chunk.timestamp_s[by_user],
        surface=chunk.surface[by_user],
        slot=chunk.slot[by_user],
        num_users=config.num_users,
    )
    world = _World.make(config, seed)
    return Dataset(
        name="synthetic",
        provenance=f"synthetic ad log, seed {seed}, {config.num_events} impressions (no real data)",
        surfaces=SURFACES,
        catalog=world.catalog(),
        users=world.users(),
        log=log,
        split=split_by_time(log),
        truth=Truth(chunk.click_probability[by_user], chunk.conversion_probability[by_user]),
    )


@dataclass(frozen=True, slots=True)
class _World:
    """What does not change while the log runs.

    Args:
        config: Its sizes.
        group: int64 [A], ad group from 0.
        main_topic: int64 [A].
        side_topic: int64 [A].
        topics: float32 [A, K], share of each topic, rows sum to 1.
        quality: float64 [A], logit offset.
        value: float64 [A], logit offset of the conversion.
        ad_of_rank: int64 [A], ads by falling popularity.
        popularity: float64 [A // S], cumulative Zipf shares of strata of S ranks; the last A % S ads stay unseen.
        taste: float32 [U, K].
        activity: float64 [U], probability of a request in a round.
        home_surface: uint8 [U].
        gender: uint8 [U]; occupation: int16 [U]; age: int16 [U].
    """

    config: SyntheticConfig
    group: npt.NDArray[np.int64]
    main_topic: npt.NDArray[np.int64]
    side_topic: npt.NDArray[np.int64]
    topics: npt.NDArray[np.float32]
    quality: Float
    value: Float
    ad_of_rank: npt.NDArray[np.int64]
    popularity: Float
    taste: npt.NDArray[np.float32]
    activity: Float
    home_surface: npt.NDArray[np.uint8]
    gender: npt.NDArray[np.uint8]
    occupation: npt.NDArray[np.int16]
    age: npt.NDArray[np.int16]

    @classmethod
    def make(cls, config: SyntheticConfig, seed: int) -> _World:
        random = np.random.default_rng((seed, _WORLD))
        num_ads, num_users, num_topics = config.num_ads, config.num_users, config.num_topics
        group = random.integers(0, config.num_groups, num_ads)
        main_topic = random.integers(0, num_topics, config.num_groups)[group]
        side_topic = random.integers(0, num_topics, num_ads)
        topics = np.zeros((num_ads, num_topics), np.float32)
        topics[np.arange(num_ads), main_topic] += 0.75
        topics[np.arange(num_ads), side_topic] += 0.25
        occupation = random.integers(0, len(_OCCUPATIONS), num_users)
        shared_taste = random.normal(0.0, 0.6, (len(_OCCUPATIONS), num_topics)).astype(np.float32)
        taste = random.standard_normal((num_users, num_topics), np.float32) * np.float32(0.8) + shared_taste[occupation]
        shares = 1.0 / np.arange(10, num_ads // config.slate_size + 10) ** 0.8
        spread = random.lognormal(-0.5, 1.0, num_users)  # mean 1, heavy tail
        return cls(
            config=config,
            group=group,
            main_topic=main_topic,
            side_topic=side_topic,
            topics=topics,
            quality=random.normal(0.0, 0.5, num_ads),
            value=random.normal(0.0, 0.5, num_ads),
            ad_of_rank=random.permutation(num_ads),
            popularity=np.cumsum(shares / shares.sum()),
            taste=taste,
            activity=np.clip(config.activity * spread, 1e-3, 1.0),
            home_surface=(random.random(num_users) < 0.4).astype(np.uint8),
            gender=random.integers(1, 3, num_users).astype(np.uint8),
            occupation=occupation.astype(np.int16),
            age=np.array(_AGES, np.int16)[random.integers(0, len(_AGES), num_users)],
        )

    def catalog(self) -> Catalog:
        ids = np.arange(1, len(self.group) + 1, dtype=np.int64)
        one_topic = self.main_topic == self.side_topic
        both = np.stack([self.main_topic, self.side_topic], axis=1) + 1
        listed = np.ones(both.shape, np.bool_)
        listed[:, 1] = ~one_topic
        return Catalog(
            item_id=ids,
            title=tuple(
                f"{TOPICS[topic].capitalize()} offer {ad}" for ad, topic in zip(ids, self.main_topic, strict=True)
            ),
            year=np.zeros(len(ids), np.int16),
            genre_names=("", *TOPICS[: self.config.num_topics]),
            genre_values=both[listed].astype(np.int16),
            genre_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(listed.sum(axis=1), dtype=np.int64)]),
            group_id=self.group + 1,
        )

    def users(self) -> UserTable:
        num_users = len(self.activity)
        return UserTable(
            user_id=np.arange(1, num_users + 1, dtype=np.int64),
            gender=self.gender,
            age=self.age,
            occupation=self.occupation,
            occupation_names=_OCCUPATIONS,
            zip_code=("",) * num_users,
        )


@dataclass(frozen=True, slots=True)
class _Slates:
    """What M users are shown in one round.

    Args:
        users: int64 [M], distinct.
        surface: uint8 [M].
        ads: int64 [M, S], distinct within a slate, from 0.
        topics: float32 [M, S, K], those of the ads.
    """

    users: npt.NDArray[np.int64]
    surface: npt.NDArray[np.uint8]
    ads: npt.NDArray[np.int64]
    topics: npt.NDArray[np.float32]

    @classmethod
    def draw(cls, world: _World, users: npt.NDArray[np.int64], random: np.random.Generator) -> _Slates:
        num_slots = world.config.slate_size
        shape = (len(users), num_slots)
        away = random.random(len(users)) < 0.2
        # Distinct ads without rejection: each slot has its own residue class of the popularity ranks.
        stratum = np.minimum(np.searchsorted(world.popularity, random.random(shape)), len(world.popularity) - 1)
        residue = np.argsort(random.random(shape), axis=1)
        ads = world.ad_of_rank[stratum * num_slots + residue]
        return cls(users, world.home_surface[users] ^ away.astype(np.uint8), ads, world.topics[ads])


def _rounds(world: _World, seed: int) -> Iterator[SyntheticChunk]:
    """Yield one round after the other without end; only the interests, float32 [U, K], are carried along."""
    interest = np.zeros_like(world.taste)
    for number in itertools.count():
        random = np.random.default_rng((seed, _ROUND, number))
        # A round's users are distinct, so its requests do not depend on one another and are drawn all at once.
        users = np.flatnonzero(random.random(len(world.activity)) < world.activity)
        if len(users):
            yield _round(world, interest, number, _Slates.draw(world, users, random), random)


def _round(
    world: _World, interest: npt.NDArray[np.float32], number: int, slates: _Slates, random: np.random.Generator
) -> SyntheticChunk:
    """Draw what the users of a round do, and update their interests in place."""
    config, users, shape = world.config, slates.users, slates.ads.shape
    click, conversion = _probabilities(world, interest[users], slates)
    draw_click, draw_conversion = random.random(shape), random.random(shape)
    clicked = draw_click < click
    converted = clicked & (draw_conversion < conversion)
    pull = np.where(clicked, 1.0, -0.25).astype(np.float32)
    interest[users] = np.float32(config.history_decay) * interest[users] + np.einsum("ms,msk->mk", pull, slates.topics)

    times = config.start_s + number * config.round_s + random.integers(0, config.round_s, len(users))
    items = slates.ads + 1
    order = np.lexsort((items.ravel(), np.repeat(users, shape[1]), np.repeat(times, shape[1])))
    request = order // shape[1]
    return SyntheticChunk(
        user_index=users[request].astype(np.int32),
        item_id=items.ravel()[order],
        rating=(3 + clicked.astype(np.uint8) + converted).ravel()[order].astype(np.uint8),
        timestamp_s=times[request],
        surface=slates.surface[request],
        slot=(order % shape[1]).astype(np.uint8),
        click_probability=click.ravel()[order].astype(np.float32),
        conversion_probability=(click * conversion).ravel()[order].astype(np.float32),
    )


def _probabilities(world: _World, interest: npt.NDArray[np.float32], slates: _Slates) -> tuple[Float, Float]:
    """Return the probabilities of a click and of a conversion given a click: float64 [M, S] each."""
    config = world.config
    taste = np.einsum("mk,msk->ms", world.taste[slates.users], slates.topics).astype(np.float64)
    lately = np.einsum("mk,msk->ms", np.tanh(interest), slates.topics).astype(np.float64)
    searching = slates.surface[:, None].astype(np.float64)
    slot_bias = -0.5 * np.log1p(np.arange(slates.ads.shape[1]))
    click = -1.6 + config.taste_weight * taste + config.history_weight * lately + world.quality[slates.ads]
    click += 0.5 * searching + (1.0 - 0.5 * searching) * slot_bias
    conversion = -1.0 + 0.7 * config.taste_weight * taste + world.value[slates.ads] + 0.4 * searching
    return _sigmoid(click), _sigmoid(conversion)


def _sigmoid(logits: Float) -> Float:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def _cut(chunk: SyntheticChunk, begin: int, end: int) -> SyntheticChunk:
    return SyntheticChunk(**{field.name: getattr(chunk, field.name)[begin:end] for field in fields(chunk)})


def _join(chunks: list[SyntheticChunk]) -> SyntheticChunk:
    names = [field.name for field in fields(SyntheticChunk)]
    return SyntheticChunk(**{name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names})
