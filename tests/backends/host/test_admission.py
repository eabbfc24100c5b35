"""Which ranks a host group takes in, and the key by which they recognise each other."""

from __future__ import annotations

import pytest

from collectives import DistNetworkError
from collectives.backends.host.admission import check_system, group_key, own_user_only, random_key
from collectives.store.process import system

SECRET = "a secret that all ranks of this job share"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLLECTIVES_SECRET", "COLLECTIVES_SECRET_FILE", "COLLECTIVES_INSECURE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_secret_ranks_stay_on_one_system() -> None:
    check_system(system())
    assert own_user_only()
    with pytest.raises(DistNetworkError, match="run on different machines and have no job secret") as caught:
        check_system("another one")
    assert "export COLLECTIVES_SECRET_FILE=~/.collectives_secret" in str(caught.value)


def test_without_a_secret_rank_0_makes_a_key() -> None:
    published = random_key()
    assert group_key("attempt", published) == group_key("attempt", published)
    assert group_key("attempt", published) != group_key("another attempt", published)
    assert len(group_key("attempt", published)) == 32
    assert random_key() != published


def test_with_a_secret_keys_are_derived_and_nothing_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    check_system("another one")
    assert not own_user_only()
    assert random_key() == ""
    assert group_key("attempt", "") == group_key("attempt", "00" * 32) != group_key("another attempt", "")


def test_the_user_may_let_everybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_INSECURE", "1")
    check_system("another one")
    assert not own_user_only()
    assert len(random_key()) == 64
