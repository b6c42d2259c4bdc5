"""The turns of receives from one source with one tag, when some of the receives fail."""

from __future__ import annotations

import pytest

from asynccoll.order.turns import Turns
from asynccoll.transport import completion
from asynccoll.transport.completion import Completion, Promise
from struck import Struck, nth


class Receives:
    """Asks for messages, and records the order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.asked: dict[str, Promise] = {}

    def take(self, turns: Turns, name: str) -> Completion:
        def ask(asked: Promise) -> Completion:
            self.order.append(name)
            self.asked[name] = asked
            return Promise()

        return turns.take((0, 7), ask)


@pytest.mark.parametrize("waiting", [False, True], ids=["first", "behind another"])
def test_ctrl_c_in_taking_a_turn_leaves_it_to_the_next(
    monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    turns, receives = Turns(lose=print), Receives()
    if waiting:
        receives.take(turns, "earlier")
    with monkeypatch.context() as here:
        here.setattr(turns, "_lock", Struck(nth(1)))
        with pytest.raises(KeyboardInterrupt):
            receives.take(turns, "interrupted")
    receives.take(turns, "later")
    if waiting:
        assert receives.order == ["earlier"], "the message's second piece has not been asked for yet"
        receives.asked["earlier"].settle()
        assert receives.order == ["earlier", "later"]
    assert receives.order[-1] == "later"
    receives.asked["later"].settle()
    assert not turns


def test_ctrl_c_as_a_message_has_been_requested_leaves_the_next_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns, receives = Turns(lose=print), Receives()
    receives.take(turns, "first")
    receives.take(turns, "second")
    with monkeypatch.context() as here:
        here.setattr(completion, "_settling", Struck(nth(1)))
        with pytest.raises(KeyboardInterrupt):
            receives.asked["first"].settle()
    assert receives.order == ["first", "second"]


def test_after_a_receive_that_could_not_be_made_no_other_takes_its_message() -> None:
    told: list[BaseException] = []
    turns, receives = Turns(told.append), Receives()
    receives.take(turns, "first")

    def refused(asked: Promise) -> Completion:
        raise RuntimeError("not accepted")

    second, third = turns.take((0, 7), refused), receives.take(turns, "third")
    receives.asked["first"].settle()
    assert [str(one.error()) for one in (second, third)] == ["not accepted"] * 2
    assert list(map(str, told)) == ["not accepted"]
    assert receives.order == ["first"]
