"""Processes whose user namespace does not know their user, nor those of others: all have one number there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from strangers import visit

OVERFLOW = "65534"
ANOTHER_USER = 12345
SECRET = "a secret that all processes of this job share"
ENTER = ["unshare", "--user"]


def _namespaces_may_be_made() -> bool:
    try:
        return subprocess.run([*ENTER, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not _namespaces_may_be_made(), reason="no user namespaces here")


def within(*options: str, secret: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Returns the beginning of a command that runs a script in a user namespace, and its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLLECTIVES")}
    environment |= {"OMP_NUM_THREADS": "1"} | ({} if secret is None else {"COLLECTIVES_SECRET": secret})
    return [*ENTER, *options, sys.executable, "-c"], environment


def run_within(script: str, *options: str, secret: str | None = None) -> str:
    """Returns what a script prints in a user namespace."""
    command, environment = within(*options, secret=secret)
    done = subprocess.run(
        [*command, textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_the_number_of_all_unknown_users_stands_for_none() -> None:
    script = (
        "import os; from collectives import _native; print(os.geteuid(), _native.is_own_user(os.geteuid()))"
    )
    assert run_within(script) == f"{OVERFLOW} False\n"
    # A namespace that knows one user under this number knows all others under it, too.
    assert run_within(script, f"--map-user={OVERFLOW}") == f"{OVERFLOW} False\n"
    assert run_within(script, "--map-user=7") == "7 True\n"


STORE = """
    import collectives, sys
    from collectives.store import TCPStore
    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        print(store.port, flush=True)
        sys.stdin.read()
    except collectives.DistNetworkError as error:
        print(error, flush=True)
"""


def test_without_a_secret_no_store_is_served_that_all_users_could_reach() -> None:
    said = run_within(STORE)
    assert said.startswith(f"this process runs as user {OVERFLOW}, as do all users whom its user namespace")
    assert "export COLLECTIVES_SECRET_FILE=~/.collectives_secret" in said


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_with_a_secret_a_store_takes_no_stranger_for_its_own_user() -> None:
    command, environment = within(secret=SECRET)
    with subprocess.Popen(
        [*command, textwrap.dedent(STORE)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        assert visit(port, b"GET", user=ANOTHER_USER) == [b"auth"]
        server.stdin.close()


WORLD = """
    import threading, collectives, torch
    from collectives.registry.backends import GroupOptions, create_group
    from datetime import timedelta
    store, said = collectives.HashStore(), [""] * 2
    def rank(number):
        try:
            options = GroupOptions(store, number, 2, timedelta(seconds=20), group_name="pair")
            group = create_group("host", options)
            total = torch.ones(1)
            group.allreduce([total]).wait()
            said[number] = str(total.item())
            group.shutdown()
        except collectives.DistError as error:
            said[number] = str(error)
    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for each in ranks: each.start()
    for each in ranks: each.join()
    print("\\n".join(said))
"""


@pytest.mark.full
def test_ranks_share_memory_if_they_have_a_secret() -> None:
    assert run_within(WORLD, secret=SECRET) == "2.0\n2.0\n"
    for said in run_within(WORLD).splitlines():
        assert f"this process runs as user {OVERFLOW}, as do all users" in said
