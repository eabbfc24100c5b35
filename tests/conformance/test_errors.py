"""Wrong arguments: an error that names values and rank, before anything is sent; the group goes on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from harness import run_ranks

from collectives import ProcessGroup, ReduceOp, UnsupportedOperationError
from collectives.core.types import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceOptions,
    make_premul_sum,
)

Case = tuple[str, Callable[[ProcessGroup], Any], type[Exception], str]


def f32(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def wrong_calls(n: int) -> list[Case]:
    """Returns name, call, class and text of the errors, for a group of ``n`` ranks."""
    i32 = torch.int32
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(2, device="meta")
    many = [f32(2) for _ in range(n)]
    repeated = f32(1).expand(2)
    return [
        ("no tensor", lambda g: g.allreduce([3]), TypeError, "must be a tensor, but is of type int"),
        ("no list", lambda g: g.allreduce("x"), TypeError, "must be a tensor or a list of one, but is str"),
        ("two", lambda g: g.allreduce([f32(2), f32(2)]), ValueError, "must hold one tensor.*but holds 2"),
        ("none", lambda g: g.broadcast([]), ValueError, "but holds 0"),
        ("sparse", lambda g: g.allreduce(sparse), UnsupportedOperationError, "layout torch.sparse_coo"),
        ("device", lambda g: g.allreduce(meta), UnsupportedOperationError, "on meta are not taken.*cpu"),
        ("bitwise", lambda g: g.allreduce(f32(2), ReduceOp.BAND), UnsupportedOperationError,
         "BAND is not defined for torch.float32; .*SUM.* are"),
        ("average", lambda g: g.allreduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG),
         UnsupportedOperationError, "AVG is not defined for torch.bool"),
        ("complex", lambda g: g.allreduce(torch.ones(2, dtype=torch.complex64), ReduceOp.MAX),
         UnsupportedOperationError, "MAX is not defined for torch.complex64"),
        ("factor", lambda g: g.allreduce(torch.ones(2, dtype=i32), make_premul_sum(2.0)),
         UnsupportedOperationError, "PREMUL_SUM is not defined for torch.int32"),
        ("op", lambda g: g.allreduce(f32(2), op="SUM"), TypeError, "op must be a ReduceOp.*'SUM'"),
        ("shared elements", lambda g: g.allreduce(repeated), ValueError, r"\[2\].*strides \[0\].*clone"),
        ("shared outputs", lambda g: g.allgather([*many[1:], repeated], f32(2)), ValueError,
         "share their memory"),
        ("a shared output", lambda g: g.reduce_scatter(repeated, many), ValueError, "share their memory"),
        ("a shared message", lambda g: g.recv(repeated, 0), ValueError, "share their memory"),
        ("root", lambda g: g.broadcast(f32(2), root=n), ValueError, f"root is {n}, but .* 0 to {n - 1}"),
        ("negative root", lambda g: g.reduce(f32(2), root=-1), ValueError, "root is -1"),
        ("root's type", lambda g: g.broadcast([f32(2)], BroadcastOptions(rootRank="0")), TypeError,
         "root must be an int, but is '0' of type str"),
        ("root in a record", lambda g: g.reduce([f32(2)], ReduceOptions(rootRank=9)), ValueError,
         "root is 9"),
        ("root tensor", lambda g: g.broadcast([f32(2)], BroadcastOptions(rootTensor=1)), ValueError,
         "rootTensor is 1, but there is only tensor 0"),
        ("few outputs", lambda g: g.allgather([f32(2)] * (n + 1), f32(2)), ValueError,
         f"one tensor for each of {n} ranks, but holds {n + 1}"),
        ("outputs' dtype", lambda g: g.allgather([torch.zeros(2, dtype=i32)] * n, f32(2)), ValueError,
         "one data type.*torch.float32.*torch.int32"),
        ("own output", lambda g: g.allgather([f32(3)] * n, f32(2)), ValueError, "3 elements.*not 2"),
        ("no list of outputs", lambda g: g.allgather(f32(2), f32(2)), TypeError, "must be a list of tensors"),
        ("single output", lambda g: g.all_gather_single(f32(2 * n + 1), f32(2)), ValueError,
         f"{2 * n + 1} elements.*not {2 * n}"),
        ("single dtype", lambda g: g.all_gather_single(torch.zeros(2 * n, dtype=i32), f32(2)), ValueError,
         "output is torch.int32, but input is torch.float32"),
        ("gather without list", lambda g: g.gather(None, f32(2), root=g.rank()), ValueError,
         f"root and must give the output list, a tensor for each of {n} ranks"),
        ("gather size", lambda g: g.gather([f32(3)] * n, f32(2), root=g.rank()), ValueError,
         "entry 0 of the output list has 3 elements.*not 2"),
        ("scatter without list", lambda g: g.scatter(f32(2), None, root=g.rank()), ValueError,
         "root and must give the input list"),
        ("scatter size", lambda g: g.scatter(f32(2), [f32(2)] * (n - 1) + [f32(1)], root=g.rank()),
         ValueError, f"entry {n - 1} of the input list has 1 elements"),
        ("scatter length", lambda g: g.scatter(f32(2), [f32(2)] * (n + 2), root=g.rank()), ValueError,
         f"each of {n} ranks, but holds {n + 2}"),
        ("reduce_scatter size", lambda g: g.reduce_scatter(f32(1), many), ValueError, "1 elements.*not 2"),
        ("reduce_scatter list", lambda g: g.reduce_scatter(f32(2), [*many, f32(2)]), ValueError,
         f"but holds {n + 1}"),
        ("reduce_scatter single", lambda g: g.reduce_scatter_single(f32(2), f32(2 * n + 1)), ValueError,
         f"{2 * n + 1} elements.*not {2 * n}"),
        ("alltoall lengths", lambda g: g.alltoall(many, [*many, f32(2)]), ValueError, f"but holds {n + 1}"),
        ("alltoall own part", lambda g: g.alltoall([f32(3)] * n, many), ValueError, "not 2"),
        ("splits' sum", lambda g: g.alltoall_base(f32(n), f32(n), None, [1] * (n - 1) + [2]), ValueError,
         f"add up to {n + 1}.*dimension 0 is {n}"),
        ("splits' number", lambda g: g.alltoall_base(f32(n), f32(n), [1] * (n + 1), None), ValueError,
         f"one for each of {n} ranks, but are {n + 1}"),
        ("negative split", lambda g: g.alltoall_base(f32(n), f32(n), None, [-1, *[1] * (n - 1)]), ValueError,
         "must not be negative"),
        ("destination", lambda g: g.send(f32(2), n), ValueError, f"destination is {n}"),
        ("source", lambda g: g.recv(f32(2), -1), ValueError, "source is -1"),
        ("tag", lambda g: g.send(f32(2), 0, -1), ValueError, "tag is -1"),
        ("large tag", lambda g: g.recv(f32(2), 0, 2**31), ValueError, "tag is 2147483648"),
        ("tag's type", lambda g: g.recv_anysource(f32(2), 1.5), TypeError, "tag must be an int, but is 1.5"),
        ("coalesced lengths", lambda g: g.all_gather_single_coalesced([f32(n)], []), ValueError,
         "1 outputs were given for 0 inputs"),
        ("coalesced entry", lambda g: g.allreduce_coalesced([f32(2), None]), TypeError, "NoneType"),
        ("time limit", lambda g: g.allgather([many], [f32(2)], AllgatherOptions(timeout=timedelta(-1))),
         ValueError, "timeout must be positive"),
        ("zero time limit", lambda g: g.allreduce([f32(2)], AllreduceOptions(timeout=timedelta(0))),
         ValueError, "timeout must be positive"),
        ("time limit's type", lambda g: g.barrier(timeout=5), TypeError,
         "timeout must be a datetime.timedelta"),
    ]  # fmt: skip


def refused(group: ProcessGroup) -> None:
    failures = []
    cases = wrong_calls(group.size())
    if group.size() > 1:
        cases += [
            ("not the root", lambda g: g.gather([f32(2)] * g.size(), f32(2), root=(g.rank() + 1) % g.size()),
             ValueError, "the output list is for the root, rank .* of the group"),
            ("uneven", lambda g: g.alltoall_base(f32(g.size() + 1), f32(g.size()), None, None), ValueError,
             "not a multiple of"),
        ]  # fmt: skip
    for turn, (name, call, kind, text) in enumerate(cases):
        # Each mistake is made by one rank only; the others go straight to the collective.
        if turn % group.size() == group.rank():
            try:
                call(group)
            except kind as error:
                if not re.search(text, str(error), re.DOTALL):
                    failures.append(f"{name}: {error!s} does not match {text!r}")
                elif f"[rank {group.rank()}]" not in str(error) and name != "op":
                    failures.append(f"{name}: the rank is missing in: {error!s}")
            except Exception as error:  # noqa: BLE001 - reported with the others
                failures.append(f"{name}: {type(error).__name__} instead of {kind.__name__}: {error!s}")
            else:
                failures.append(f"{name}: nothing was raised")
        x = torch.full((3,), 1.0 + group.rank())
        group.allreduce(x).wait()
        if x.tolist() != [sum(range(1, group.size() + 1))] * 3:
            failures.append(f"{name}: the next operation gave {x.tolist()}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("rank", "size", "match"),
    [(2, 2, "rank is 2, but the ranks of a group of 2 are 0 to 1"),
     (0, 0, "at least one rank, but size is 0"), (-1, 2, "rank is -1")],
)  # fmt: skip
def test_wrong_rank_and_size(backend: str, rank: int, size: int, match: str) -> None:
    import torch.distributed as dist

    from collectives.registry.backends import GroupOptions, create_group

    with pytest.raises(ValueError, match=match):
        create_group(backend, GroupOptions(dist.HashStore(), rank, size, timedelta(seconds=1)))


def expanded(group: ProcessGroup) -> None:
    """One element that stands for many is only read: by the root of a broadcast, and as an input."""
    me, size = group.rank(), group.size()
    whole = torch.arange(6.0) + 10 * me
    one = whole[:1].expand(4)
    written = [
        lambda: group.allreduce(one),
        lambda: group.reduce(one, root=me),
        lambda: group.allreduce_coalesced([torch.ones(2), one]),
        lambda: group.scatter(one, [torch.ones(4)] * size if me == 0 else None),
        lambda: group.all_gather_single(whole[:1].expand(4 * size), torch.ones(4)),
    ]
    if size > 1:
        written.append(lambda: group.broadcast(one, root=(me + 1) % size))
    for call in written:
        with pytest.raises(ValueError, match="share their memory"):
            call()
    assert whole.tolist() == [10.0 * me + n for n in range(6)]
    got = one if me == 0 else torch.zeros(4)
    group.broadcast(got, root=0).wait()
    assert got.tolist() == [0.0] * 4
    parts = [torch.empty(4) for _ in range(size)]
    group.allgather(parts, one).wait()
    assert [part.unique().tolist() for part in parts] == [[10.0 * rank] for rank in range(size)]


def shared_bytes(group: ProcessGroup) -> None:
    """Elements that share bytes are cut at bytes only."""
    size = group.size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd, many = (
            torch.quantize_per_tensor(torch.zeros(count), 1.0, 0, torch.quint4x2) for count in (3, 3 * size)
        )
    text = r"parts of torch.quint4x2 must have a multiple of 2 elements, which share a byte, but have \[3"
    for call in (lambda: group.all_gather_single(many, odd), lambda: group.alltoall_base(many, many)):
        with pytest.raises(ValueError, match=text):
            call()
    group.barrier().wait()


@pytest.mark.parametrize("body", [refused, expanded, shared_bytes])
def test_wrong_arguments(backend: str, world_size: int, body: Callable[[ProcessGroup], None]) -> None:
    run_ranks(body, world_size, backend=backend)
