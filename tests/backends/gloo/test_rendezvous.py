"""How the ranks of a gloo group connect, where some are slow and others leave at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
from threads import on_ranks

from collectives import DistBackendError, HashStore
from collectives.registry.backends import GroupOptions, create_group


class AddressStore(HashStore):
    """Does something when the thread named "rank 1" reads the address of rank 2."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self.then = then

    def get(self, key: str) -> bytes:
        if key.endswith("gloo/0/2") and threading.current_thread().name == "rank 1":
            self.then()
        return super().get(key)


ROUNDS = 20
"""Groups that are made: which of two ranks calls the other depends on the ports that the kernel deals out."""


def test_a_rank_may_leave_as_soon_as_its_group_is_made() -> None:
    for _ in range(ROUNDS):
        left = threading.Event()
        store = AddressStore(lambda left=left: left.wait(0.05))

        def leave(rank: int, store: HashStore = store, left: threading.Event = left) -> str:
            create_group("gloo", GroupOptions(store, rank, 3, group_name="brief")).shutdown()
            left.set()
            return "left"

        assert on_ranks(3, leave) == ["left"] * 3


def test_a_rank_that_cannot_connect_tells_those_who_are_connected() -> None:
    def fail() -> None:
        raise RuntimeError("the address cannot be read")

    for _ in range(ROUNDS):
        store = AddressStore(fail)

        def join(rank: int, store: HashStore = store) -> str:
            options = GroupOptions(store, rank, 3, timedelta(seconds=0.3), group_name="failing")
            with pytest.raises(DistBackendError, match=f"rank {rank}. gloo group 'failing'") as caught:
                create_group("gloo", options)
            return str(caught.value)

        first, second, third = on_ranks(3, join)
        assert "connected by Gloo: the address cannot be read" in second
        if "rank 1 failed with: the address cannot be read" in first + third:
            return
    pytest.fail("no rank was told")


class ForgedStore(HashStore):
    """Has under one key what another rank wrote under its own, as somebody could put it there."""

    def __init__(self, forged: str, source: str) -> None:
        super().__init__()
        self.forged = forged
        self.source = source

    def get(self, key: str) -> bytes:
        if not key.endswith(self.forged):
            return super().get(key)
        source = key.removesuffix(self.forged) + self.source
        self.wait([source])
        return super().get(source)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


@pytest.mark.parametrize(
    ("forged", "source"),
    [("gloo/0/0", "gloo/0/1"), ("devices/0", "devices/1"), ("connected/0", "connected/1")],
)
def test_with_a_secret_only_ranks_say_where_they_are(
    forged: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", "a secret that all ranks of this job share")
    store = ForgedStore(forged, source)

    def join(rank: int) -> str:
        options = GroupOptions(store, rank, 3, timedelta(seconds=1), group_name="misled")
        try:
            create_group("gloo", options).shutdown()
        except DistBackendError as error:
            return str(error)
        return "joined"

    told = on_ranks(3, join)
    shown = forged.removeprefix("gloo/")
    assert any(f"{shown}' is not proved by this process's job secret" in text for text in told), told
