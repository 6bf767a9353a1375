"""The trainer's deltas: what an optimizer changed, bit for bit, and the series of a published version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.config import RankerConfig
from models.embedding.tables import ReferenceTables
from models.random_weights import TINY
from shared.clock import ManualClock
from shared.errors import WeightsError
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.errors import DeltaShapeError
from shared.weights.layout import Tensors
from shared.weights.state import TensorState
from training.deltas import DeltaPublisher, TouchedRows, publish_difference, publish_inverse, resume_series

CONFIG: RankerConfig = TINY
ROWS = {table.name: 30 for table in CONFIG.tables}


def groups_of(tables: ReferenceTables) -> dict[str, Tensors]:
    return {f"tables/{name}": {"weight": weight.detach().numpy()} for name, weight in tables.weights.items()}


@pytest.mark.parametrize(
    ("make", "momentum"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), False),
        (lambda parameters: torch.optim.Adam(parameters, lr=0.1), True),
        (lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), False),
    ],
)
def test_marked_rows_are_all_that_an_optimizer_changes(
    make: Callable[[Any], torch.optim.Optimizer], momentum: bool
) -> None:
    torch.manual_seed(0)
    tables = ReferenceTables(CONFIG, ROWS)
    optimizer = make(tables.parameters())
    touched = TouchedRows(tables, momentum=momentum)
    handle = touched.attach(optimizer)
    narrow, full = (DeltaPublisher(TensorState("v", groups_of(tables), {}), clock=ManualClock()) for _ in range(2))
    for step in range(6):
        rows = torch.tensor([step, 7, 29])
        loss = sum(tables.lookup(name, rows).square().sum() for name in ("item", "user"))
        optimizer.zero_grad()
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        delta = narrow.publish(groups_of(tables), touched=touched.take())
        assert delta.encode() == full.publish(groups_of(tables)).encode()
        assert set(delta.rows) == {"tables/item/weight", "tables/user/weight"}
        expected = {*range(step + 1), 7, 29} if momentum else {step, 7, 29}
        assert set(delta.rows["tables/item/weight"].ids.tolist()) == expected
    handle.remove()
    touched.take()
    optimizer.step()
    assert all(not len(ids) for ids in touched.take().values()) or momentum


def test_sparse_gradients_mark_their_rows() -> None:
    tables = ReferenceTables(CONFIG, ROWS)
    touched = TouchedRows(tables, momentum=False)
    weight = tables.weights["item"]
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[3, 3, 9]]), torch.ones(3, weight.shape[1]), weight.shape, check_invariants=True
    )
    touched.mark()
    np.testing.assert_array_equal(touched.take()["tables/item/weight"], [3, 9])


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    """Versions ``a`` and ``b`` of one form, and ``wide`` of another."""
    store = WeightStore(tmp_path, clock=ManualClock())
    rng = np.random.default_rng(0)
    weight = rng.random((30, 4), np.float32)
    for version, rows in (("a", weight), ("b", weight + (np.arange(30) % 3 == 0)[:, None]), ("wide", weight[:29])):
        with store.writer(version) as writer:
            writer.add_tensors("tables/item", {"weight": rows.astype(np.float32)})
            writer.add_tensors("dense", {"w": np.full(3, ord(version[0]), np.float32)})
            writer.add_json("golden", {"of": version})
            writer.add_json("metrics", {"auc": 0.5})
            writer.commit()
    return store


def state_of(store: WeightStore, base: str) -> TensorState:
    return TensorState.of(store.open(base), DeltaLog(store, base).since(0))


def bits(state: TensorState) -> dict[str, bytes]:
    return {group: b"".join(array.tobytes() for array in part.values()) for group, part in state.groups().items()}


def moved(state: TensorState) -> dict[str, Tensors]:
    return {group: {name: array + 1 for name, array in part.items()} for group, part in state.groups().items()}


def test_the_difference_of_two_versions_is_a_delta(store: WeightStore) -> None:
    delta = publish_difference(store, "a", store.open("b"), ManualClock(0.0))
    assert delta.stamp == "a+1"
    assert delta.created == "1970-01-01T00:00:00+00:00"
    np.testing.assert_array_equal(delta.rows["tables/item/weight"].ids, np.arange(0, 30, 3))
    assert list(delta.whole) == ["dense/w"]
    assert delta.documents == {"golden": {"of": "b"}}, "metrics are of their own version"
    state = state_of(store, "a")
    assert bits(state) == bits(TensorState.of(store.open("b")))
    assert state.documents["golden"] == {"of": "b"}
    again = publish_difference(store, "a", store.open("b"))
    assert (again.num_rows, again.whole, again.documents) == (0, {}, {})


def test_another_form_is_no_delta(store: WeightStore) -> None:
    with pytest.raises(DeltaShapeError, match=r"tables/item/weight was float32 \(30, 4\) and is float32 \(29, 4\)"):
        publish_difference(store, "a", store.open("wide"))
    assert DeltaLog(store, "a").sequences() == []


def test_an_inverse_goes_forward_to_what_was(store: WeightStore) -> None:
    publish_difference(store, "a", store.open("b"))
    publisher = resume_series(store, "a")
    groups = {
        group: {name: array + 1 for name, array in part.items()} for group, part in publisher.state.groups().items()
    }
    publisher.publish(groups)
    for sequence, version in ((1, "b"), (0, "a")):
        delta = publish_inverse(store, "a", sequence)
        assert bits(state_of(store, "a")) == bits(TensorState.of(store.open(version)))
        assert state_of(store, "a").documents["golden"] == {"of": version}
    assert delta.stamp == "a+4"
    for sequence in (4, 5, -1):
        with pytest.raises(WeightsError, match=f"a has deltas up to 4, there is no earlier state {sequence}"):
            publish_inverse(store, "a", sequence)


def test_two_publishers_of_one_series(store: WeightStore) -> None:
    first, second = resume_series(store, "a"), resume_series(store, "a")
    first.publish(moved(first.state))
    with pytest.raises(WeightsError, match="applied already"):
        second.publish(moved(second.state))
    assert second.state.sequence == 0
