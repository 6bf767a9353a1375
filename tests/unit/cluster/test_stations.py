"""What a replica takes up as it starts."""

from __future__ import annotations

from cluster.stations import take_up
from services.ingress.serving import ServingOrder


def test_what_is_ordered_while_a_replica_starts_is_taken_up_too() -> None:
    first = ServingOrder.first("v")
    coming = first.model_copy(update={"held": ("v", "w")})
    told = coming.model_copy(update={"rollout": coming.rollout.model_copy(update={"reason": "is reading it"})})
    orders, obeyed = [first, coming, told], list[ServingOrder]()
    take_up(lambda: orders[min(len(obeyed), 2)], obeyed.append)
    assert obeyed == [first, coming], "what is only told of it is no other order"


def test_an_order_that_stays_is_obeyed_once() -> None:
    obeyed: list[ServingOrder] = []
    take_up(lambda: ServingOrder.first("v"), obeyed.append)
    assert obeyed == [ServingOrder.first("v")]
