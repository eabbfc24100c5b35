"""The double of NCCL finds accesses to memory that nothing orders, and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from nccl_double.accesses import is_on_host
from nccl_double.device import DoubleDevice, Graph, pool_stream, races, tensors_on_device
from nccl_double.groups import load, run_over_double

from collectives import ProcessGroup

CPU = torch.device("cpu")


def device() -> DoubleDevice:
    shared = DoubleDevice.shared(CPU)
    assert isinstance(shared, DoubleDevice)
    return shared


def written_elsewhere() -> None:
    x = torch.zeros(4)
    with device().using(pool_stream()):
        x.add_(1)


def read_elsewhere() -> None:
    x = torch.zeros(4)
    with device().using(pool_stream()):
        torch.empty(4).copy_(x)


def overwritten_while_read() -> None:
    x = torch.zeros(4)
    other = pool_stream()
    device().wait(other, device().record(device().current_stream()))
    with device().using(other):
        torch.empty(4).copy_(x)
    x.zero_()


def a_step_of_a_task() -> None:
    x = torch.zeros(4)
    device().call(pool_stream(), lambda: x.add_(1))


def noted_too_early() -> None:
    x = torch.zeros(4)
    event = device().record(device().current_stream())
    x.add_(1)
    other = pool_stream()
    device().wait(other, event)
    with device().using(other):
        x.add_(1)


def read_on_the_host() -> None:
    values, _ = device().to_host(torch.ones(2))
    values.tolist()


def asked_for_by_another_thread() -> None:
    """A thread that waited for a stream tells nobody."""
    own, other = pool_stream(), pool_stream()
    with device().using(own):
        x = torch.zeros(4)
    with device().using(other):
        torch.ones(1).add_(1)  # this thread is known before the other waits
    waits = threading.Thread(target=device().synchronize, args=(own,))
    waits.start()
    waits.join()
    with device().using(other):
        x.add_(1)


def nodes_of_a_graph() -> None:
    graph, other = Graph(), pool_stream()
    x = torch.zeros(4)
    with graph.capture():
        own = device().current_stream()
        device().wait(other, device().record(own))
        with device().using(other):
            x.add_(1)
        x.add_(1)
        device().wait(own, device().record(other))
    graph.replay()
    graph.reset()


def given_back_while_read() -> None:
    """The allocator was not told of the stream that still reads."""
    x, other = torch.zeros(4), pool_stream()
    device().wait(other, device().record(device().current_stream()))
    with device().using(other):
        torch.empty(4).copy_(x)
    del x


def dropped_while_read() -> None:
    kept, other = [torch.zeros(4)], pool_stream()
    device().wait(other, device().record(device().current_stream()))
    with device().using(other):
        torch.empty(4).copy_(kept[0])
    device().synchronize(device().current_stream())
    device().drop(kept)


RACES = [
    written_elsewhere,
    read_elsewhere,
    overwritten_while_read,
    a_step_of_a_task,
    noted_too_early,
    read_on_the_host,
    asked_for_by_another_thread,
    nodes_of_a_graph,
    given_back_while_read,
    dropped_while_read,
]


def behind_an_event() -> None:
    x = torch.zeros(4)
    own, other = device().current_stream(), pool_stream()
    device().wait(other, device().record(own))
    with device().using(other):
        x.add_(1)
        read = torch.empty(4).copy_(x)
    device().wait(own, device().record(other))
    assert x.tolist() == read.tolist() == [1.0] * 4


def behind_a_wait_of_the_host() -> None:
    x = torch.zeros(4)
    device().synchronize(device().current_stream())
    other = pool_stream()
    with device().using(other):
        x.add_(1)
        event = device().record(other)
    while not device().done(event):
        pass
    x.add_(1)
    values, event = device().to_host(x)
    device().block(event)
    assert values.tolist() == [2.0] * 4


def both_read() -> None:
    x = torch.zeros(4)
    device().synchronize(device().current_stream())
    for stream in (pool_stream(), pool_stream()):
        device().share(stream, x)
        with device().using(stream):
            torch.empty(4).copy_(x)


def other_parts() -> None:
    x, y = torch.zeros(8), torch.zeros(4, 4)
    device().synchronize(device().current_stream())
    for place, stream in enumerate((pool_stream(), pool_stream())):
        with device().using(stream):
            x[4 * place : 4 * place + 4].add_(1)
            y[:, place::2].add_(1)
        device().share(stream, x)
        device().share(stream, y)


def memory_given_out_again() -> None:
    for _ in range(100):  # the allocator of the CPU gives the same memory out again
        with device().using(pool_stream()):
            torch.zeros(1000).add_(1)
            device().synchronize(device().current_stream())


def steps_known_late() -> None:
    """What a task accesses is known when it is carried out, behind what was put on its stream since."""
    own = pool_stream()
    x = torch.zeros(4)
    device().synchronize(device().current_stream())
    device().sleep(own, 0.1)
    device().call(own, lambda: x.add_(1))
    with device().using(own):
        x.add_(1)
        assert x.tolist() == [2.0] * 4


def replays_in_order() -> None:
    graph, other = Graph(), pool_stream()
    x = torch.zeros(4)
    with graph.capture():
        own = device().current_stream()
        x.add_(1)
        device().wait(other, device().record(own))
        with device().using(other):
            x.add_(1)
        device().wait(own, device().record(other))
        device().call(own, lambda: x.add_(1))
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [9.0] * 4
    graph.reset()


def given_back_once_it_was_read() -> None:
    x, other = torch.zeros(4), pool_stream()
    own = device().current_stream()
    device().wait(other, device().record(own))
    with device().using(other):
        torch.empty(4).copy_(x)
    device().wait(own, device().record(other))
    del x


def given_back_with_a_word_to_the_allocator() -> None:
    x, other = torch.zeros(4), pool_stream()
    device().wait(other, device().record(device().current_stream()))
    with device().using(other):
        torch.empty(4).copy_(x)
    device().share(other, x)
    del x


ORDERED = [
    behind_an_event,
    behind_a_wait_of_the_host,
    both_read,
    other_parts,
    memory_given_out_again,
    steps_known_late,
    replays_in_order,
    given_back_once_it_was_read,
    given_back_with_a_word_to_the_allocator,
]


def found(rank: int, size: int, path: Path, bodies: list[Callable[[], None]]) -> dict[str, str]:
    load(path)
    told = {}
    with DoubleDevice.shared(CPU).activate():
        for body in bodies:
            with tensors_on_device():
                body()
                device().synchronize(device().current_stream())
                for _ in range(32):
                    device().synchronize(pool_stream())  # late steps are known
                told[body.__name__] = races()
    return told


def test_what_nothing_orders_is_found(nccl_library: Path) -> None:
    (told,) = run_ranks(found, 1, nccl_library, RACES, isolated=True)
    assert [name for name, text in told.items() if "nothing says which comes first" not in text] == []
    assert "test_races.py:" in told["written_elsewhere"]


def test_what_is_ordered_is_no_race(nccl_library: Path) -> None:
    (told,) = run_ranks(found, 1, nccl_library, ORDERED, isolated=True)
    assert [text for text in told.values() if text] == []


def pinned(rank: int, size: int, path: Path) -> list[bool]:
    load(path)
    with DoubleDevice.shared(CPU).activate(), tensors_on_device():
        copied, _ = device().to_host(torch.ones(2))
        return [is_on_host(tensor) for tensor in (copied, device().pinned([2], torch.int32), torch.ones(2))]


def test_what_streams_write_for_the_host_is_pinned(nccl_library: Path) -> None:
    """CUDA copies to other memory of the host as it likes, and graphs cannot."""
    assert run_ranks(pinned, 1, nccl_library, isolated=True) == [[True, True, False]]


def received(group: ProcessGroup) -> None:
    """A receive that is waited for, and a read and a write behind it."""
    for _ in range(3):
        x = torch.zeros(1000)
        if group.rank() == 0:
            group.recv(x, 1).wait()
            assert x.sum().item() == 1000.0
            x.add_(1)
        else:
            group.send(x.add_(1), 0).wait()


def sent_and_dropped(group: ProcessGroup) -> None:
    """Sends of temporaries, whose Works go at once, too; others get their memory."""
    for turn in range(20):
        if group.rank() == 0:
            group.send(torch.full((1000,), float(turn)), 1)
            torch.full((1000,), -1.0).add_(1)
        else:
            group.recv(x := torch.zeros(1000), 0).wait()
            assert x.eq(float(turn)).all()


def messages(group: ProcessGroup) -> None:
    received(group)
    sent_and_dropped(group)


def test_messages_that_are_kept_and_awaited_are_no_races(nccl_library: Path) -> None:
    run_over_double(messages, 2, nccl_library)


def unordered(group: ProcessGroup) -> None:
    x = torch.ones(4)
    with device().using(pool_stream()):
        group.allreduce(x).wait()


def unawaited(group: ProcessGroup) -> None:
    x = torch.ones(4)
    group.allreduce(x)
    x.add_(1)


def twice_in_one_launch(group: ProcessGroup) -> None:
    x = torch.ones(8)
    with group._together():
        works = [group.allreduce(x[:6]), group.allreduce(x[2:])]
    for work in works:
        work.wait()


@pytest.mark.parametrize("body", [unordered, unawaited, twice_in_one_launch])
def test_operations_of_nccl_are_looked_at(nccl_library: Path, body: Callable[[ProcessGroup], None]) -> None:
    with pytest.raises(AssertionError, match=r"ncclAllReduce .*and nothing says which comes first"):
        run_over_double(body, 2, nccl_library)
