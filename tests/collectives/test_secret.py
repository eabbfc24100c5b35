"""The job's secret: where it comes from, what is refused, and what is made of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import secret

TEXT = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secret.SECRET, secret.SECRET_FILE, secret.INSECURE):
        monkeypatch.delenv(name, raising=False)


def test_without_a_secret_there_is_no_key() -> None:
    assert secret.derived_key("store") is None
    assert not secret.is_insecure()


def test_a_key_is_that_of_hkdf_and_of_its_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.SECRET, TEXT)
    # openssl kdf -keylen 32 -kdfopt digest:SHA256 -kdfopt key:TEXT -kdfopt salt:collectives \
    #     -kdfopt info:store HKDF
    key = secret.derived_key("store")
    assert key is not None
    assert key.hex() == "e026918d9ba1a975cedc31cfdd09cd064a293b935d24f2e246d45de2626d380b"


def test_keys_of_different_purposes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.SECRET, TEXT)
    keys = {secret.derived_key(purpose) for purpose in ("store", "records", "mesh a", "mesh b")}
    assert len(keys) == 4
    assert all(key is not None and len(key) == 32 for key in keys)


def test_a_file_holds_the_same_secret(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv(secret.SECRET, TEXT)
    expected = secret.derived_key("store")
    monkeypatch.delenv(secret.SECRET)
    file = tmp_path / "secret"
    file.write_text(f"{TEXT}\n")
    file.chmod(0o600)
    monkeypatch.setenv(secret.SECRET_FILE, str(file))
    assert secret.derived_key("store") == expected


def test_a_link_to_a_file_of_ours_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Secrets that are mounted into containers are links."""
    file = tmp_path / "secret"
    file.write_text(TEXT)
    file.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(file)
    monkeypatch.setenv(secret.SECRET_FILE, str(link))
    assert secret.derived_key("store") is not None


def test_a_file_that_others_can_read_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    file = tmp_path / "secret"
    file.write_text(TEXT)
    file.chmod(0o640)
    monkeypatch.setenv(secret.SECRET_FILE, str(file))
    with pytest.raises(ValueError, match="with mode 0640, so that others could know it") as caught:
        secret.derived_key("store")
    assert TEXT not in str(caught.value)


def test_what_is_no_file_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for path, found in (
        (tmp_path, "Is a directory"),
        (Path("/dev/null"), "is no file"),
        (tmp_path / "none", "No such file"),
    ):
        monkeypatch.setenv(secret.SECRET_FILE, str(path))
        with pytest.raises(ValueError, match=found):
            secret.derived_key("store")


def test_a_short_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.SECRET, "hunter2")
    with pytest.raises(ValueError, match="has 7 characters, fewer than 16") as caught:
        secret.derived_key("store")
    assert "hunter2" not in str(caught.value)


def test_insecure_and_a_secret_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.INSECURE, "1")
    assert secret.is_insecure()
    monkeypatch.setenv(secret.SECRET, TEXT)
    with pytest.raises(ValueError, match="unset one"):
        secret.is_insecure()
    monkeypatch.setenv(secret.INSECURE, "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        secret.is_insecure()


@pytest.mark.usefixtures("preloaded_python")
def test_a_launcher_provides_a_secret_once() -> None:
    program = "from collectives import secret; print(secret.derived_key('store').hex())"
    with secret.provided():
        first = secret.derived_key("store")
        with secret.provided():
            assert secret.derived_key("store") == first
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert first is not None
    assert child.stdout.strip() == first.hex()
    assert secret.derived_key("store") is None


def test_a_launcher_provides_none_where_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.INSECURE, "1")
    with secret.provided():
        assert not os.environ.get(secret.SECRET)
