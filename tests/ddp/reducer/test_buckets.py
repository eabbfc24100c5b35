"""Which gradients travel together, and how they lie in their bucket; no communication."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from collectives.ddp import GradBucket
from collectives.ddp.module.arguments import bucket_limits
from collectives.ddp.reducer.buckets import Bucket, Gradient, assign_buckets

MIB = 1024 * 1024


def assign(sizes, limits, kinds=None, order=None):
    order = range(len(sizes) - 1, -1, -1) if order is None else order
    return assign_buckets(sizes, kinds or [0] * len(sizes), limits, order)


def test_worked_example_of_the_design_note() -> None:
    """Four gradients: grad0 and grad1 lie in bucket 1, the other two in bucket 0."""
    assert assign([4, 4, 4, 4], [8]) == [[3, 2], [1, 0]]


def test_first_bucket_is_small() -> None:
    assert bucket_limits() == [MIB, 25 * MIB]
    sizes = [MIB // 4] * 120
    buckets = assign(sizes, bucket_limits())
    assert [len(bucket) for bucket in buckets] == [4, 100, 16]
    assert [index for bucket in buckets for index in bucket] == list(range(119, -1, -1))


@pytest.mark.parametrize("cap", [0, 0.0])
def test_cap_zero_puts_every_gradient_alone(cap) -> None:
    assert assign([1, 2 * MIB, 0, 7], bucket_limits(cap)) == [[3], [2], [1], [0]]


def test_caps_below_a_mebibyte_hold_for_the_first_bucket_too() -> None:
    assert bucket_limits(0.5) == [MIB // 2, MIB // 2]
    assert bucket_limits(4) == [MIB, 4 * MIB]


def test_list_of_caps_is_taken_as_it_is() -> None:
    assert bucket_limits(None, [3, 1]) == [3 * MIB, MIB]
    assert assign([MIB] * 6, bucket_limits(None, [3, 1])) == [[5, 4, 3], [2], [1], [0]]


def test_a_bucket_passes_its_cap_by_less_than_its_last_gradient() -> None:
    assert assign([5, 3, 4, 9, 1], [8]) == [[4, 3], [2, 1, 0]]
    assert assign([5, 9, 4], [8]) == [[2, 1], [0]]


def test_kinds_never_share_a_bucket_and_the_last_gradient_decides_the_order() -> None:
    kinds = ["half", "float", "half", "float", "half"]
    assert assign([4] * 5, [8], kinds) == [[4, 2], [3, 1], [0]]
    assert assign([4, 4, 4], [100], ["float", "half", "float"]) == [[1], [2, 0]]


def test_every_gradient_has_one_place_in_any_order() -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (1, 2, 7, 50):
        order = torch.randperm(count, generator=generator).tolist()
        sizes = torch.randint(0, 20, (count,), generator=generator).tolist()
        kinds = torch.randint(0, 3, (count,), generator=generator).tolist()
        buckets = assign(sizes, [4, 16], kinds, order)
        assert sorted(index for bucket in buckets for index in bucket) == list(range(count))
        for bucket in buckets:
            assert len({kinds[index] for index in bucket}) == 1
            assert [order.index(index) for index in bucket] == sorted(order.index(index) for index in bucket)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((-1,), ValueError, "-1"),
        ((float("nan"),), ValueError, "nan"),
        (("25",), TypeError, "'25'"),
        ((True,), TypeError, "True"),
        ((None, []), ValueError, "empty"),
        ((None, [1, -2]), ValueError, "-2"),
        ((5, [1]), ValueError, "both"),
    ],
)
def test_bad_caps_are_named(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        bucket_limits(*arguments)


def parameters():
    return [
        nn.Parameter(torch.randn(2, 3)),
        nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.tensor(1.0)),
        nn.Parameter(torch.randn(0, 4)),
        nn.Parameter(torch.randn(4, 6)[:, ::2]),
    ]


def bucket_of(index, parameters, **options):
    gradients = [
        Gradient(place, "abcde"[place], parameter, set()) for place, parameter in enumerate(parameters)
    ]
    return Bucket(index, gradients, dtype=parameters[0].dtype, device=torch.device("cpu"), **options)


def views_of(bucket):
    return [gradient.view for gradient in bucket.gradients]


def test_views_have_shapes_and_strides_and_do_not_overlap() -> None:
    bucket = bucket_of(0, parameters(), tail=1)
    assert bucket.buffer.numel() == 6 + 120 + 1 + 0 + 12
    assert bucket.flat.numel() == bucket.buffer.numel() + 1
    assert [view.shape for view in views_of(bucket)] == [p.shape for p in bucket.parameters]
    assert [view.stride() for view in views_of(bucket)[:3]] == [p.stride() for p in bucket.parameters[:3]]
    assert views_of(bucket)[4].stride() == (3, 1)
    for number, view in enumerate(views_of(bucket), 1):
        view.add_(number)
    assert sorted(bucket.buffer.tolist()) == [1.0] * 6 + [2.0] * 120 + [3.0] + [5.0] * 12
    assert bucket.tail.tolist() == [0.0]


def test_gradients_in_place_have_no_room_in_the_bucket() -> None:
    bucket = bucket_of(0, parameters(), in_place={1}, tail=3)
    assert bucket.buffer.numel() == 6 + 1 + 0 + 12
    assert bucket.flat.numel() == bucket.buffer.numel() + 3
    assert views_of(bucket)[1] is None
    assert bucket.nbytes == 139 * 4
    assert bucket.tensors() == [bucket.flat]
    alone = bucket_of(0, parameters()[:1], in_place={0})
    alone.in_place = [torch.ones(6)]
    assert len(alone.tensors()) == 1


def test_complex_gradients_travel_as_pairs() -> None:
    bucket = bucket_of(0, [nn.Parameter(torch.ones(3, dtype=torch.complex128))], tail=1)
    views_of(bucket)[0].fill_(2 + 3j)
    assert bucket.buffer.dtype is torch.complex128
    assert bucket.flat.tolist() == [2.0, 3.0] * 3 + [0.0]


def test_a_bucket_is_full_once_and_waited_for_once() -> None:
    bucket = bucket_of(0, parameters())
    assert [bucket.mark_ready() for _ in range(5)] == [False] * 4 + [True]
    bucket.future = torch.futures.Future()
    bucket.future.set_result([torch.full_like(bucket.buffer, 2)])
    bucket.wait()
    assert views_of(bucket)[0].unique().tolist() == [2.0]
    bucket.buffer.zero_()
    bucket.wait()
    assert not bucket.buffer.any()
    bucket.reset()
    assert (bucket.done, bucket.pending) == (False, 5)


@pytest.mark.parametrize(
    ("unused", "least_bytes", "left_out", "sent"),
    [
        ({1}, 16, {1}, [(0, 6), (10, 17)]),
        ({1}, 17, set(), [(0, 17)]),
        ({1, 2}, 17, {1, 2}, [(0, 6), (16, 17)]),  # together the gap is large enough
        ({0, 2}, 0, {0, 2}, [(6, 10), (16, 17)]),
        ({3}, 10**9, {3}, [(0, 17)]),  # a message of its own
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gaps_that_pay_for_a_message_are_left_out(unused, least_bytes, left_out, sent, dtype) -> None:
    """Gradients of 6, 4 and 6 elements, then a tail of one; another one is reduced in place."""
    width = 2 if dtype.is_complex else 1
    given = [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in (6, 4, 6, 100)]
    bucket = bucket_of(0, given, in_place={3}, tail=1)
    bucket.flat.copy_(torch.arange(bucket.flat.numel()))
    bucket.leave_out(unused, least_bytes * width)
    assert (bucket.left_out, bucket.pending) == (left_out, 4 - len(left_out))
    places = [[min(end, 16) * width + (end == 17) for end in span] for span in sent]  # of real numbers
    assert [[part[0].item(), part[-1].item() + 1] for part in bucket.tensors()] == places
    bucket.reset()
    assert bucket.pending == 4
    assert [tensor.numel() for tensor in bucket.tensors()] == [16 * width + 1]


def test_what_a_hook_sees() -> None:
    bucket = bucket_of(3, parameters(), tail=1)
    seen = GradBucket(bucket, last=True)
    assert (seen.index(), seen.is_last(), seen.names()) == (3, True, ["a", "b", "c", "d", "e"])
    assert all(p is q for p, q in zip(seen.parameters(), bucket.parameters, strict=True))
    assert seen.buffer().shape == (139,)
    assert [g.data_ptr() for g in seen.gradients()] == [v.data_ptr() for v in views_of(bucket)]
    half = torch.arange(139, dtype=torch.float16)
    seen.set_buffer(half)
    assert seen.buffer().dtype is torch.float16
    assert [g.shape for g in seen.gradients()] == [p.shape for p in bucket.parameters]
    assert seen.gradients()[2].item() == 126.0
    with pytest.raises(ValueError, match="138 elements, but bucket 3 has 139"):
        seen.set_buffer(half[1:])
    with pytest.raises(TypeError, match="list"):
        seen.set_buffer([1.0])
