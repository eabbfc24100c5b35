"""Thresholds of the host backend: their file, and that they change no bit of a result."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from harness import run_ranks

import collectives as dist
from collectives.backends.host import tuning_file


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(tuning_file.VARIABLE, str(path))
    return path


def test_a_group_takes_the_entry_of_the_largest_size_not_above_its_own(file):
    file.write_text(json.dumps({"2": {"one_shot_bytes": 4096}, "10": {"spin_us": 7}}))
    assert tuning_file.tuning_for(1) == tuning_file.defaults(1)
    assert tuning_file.tuning_for(2) == tuning_file.defaults(2) | {"one_shot_bytes": 4096}
    assert tuning_file.tuning_for(9) == tuning_file.defaults(9) | {"one_shot_bytes": 4096}
    assert tuning_file.tuning_for(11) == tuning_file.defaults(11) | {"spin_us": 7}


def test_an_empty_name_is_none(monkeypatch):
    monkeypatch.setenv(tuning_file.VARIABLE, "")
    assert tuning_file.tuning_for(2) == tuning_file.defaults(2)  # without a warning


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param("{", "Expecting", id="no JSON"),
        pytest.param("[]", "does not map sizes", id="a list"),
        pytest.param({"two": {}}, "does not map sizes", id="no size"),
        pytest.param({"2": 5}, "of 2 ranks are no table", id="no table of thresholds"),
        pytest.param({"2": {"luck": 1}}, "no threshold 'luck'", id="unknown"),
        pytest.param({"2": {"chunk_bytes": 17000}}, "multiple of 4096, not 17000", id="bounds"),
        pytest.param({"2": {"ring_bytes": 65536}}, "at least 4 times chunk_bytes", id="together"),
        pytest.param(
            {"2": {"ring_bytes": 262144, "unsplit_bytes": 270336}},
            r"at least unsplit_bytes (270336), not 262144",
            id="no room",
        ),
        pytest.param({"2": {"spin_us": "long"}}, "", id="no number"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_warning(file, content, reason):
    if isinstance(content, dict):
        content = json.dumps(content)
    file.write_text(str(content), encoding="utf-8")
    with pytest.warns(UserWarning, match="uses its default thresholds") as caught:
        assert tuning_file.tuning_for(2) == tuning_file.defaults(2)
    assert len(caught) == 1
    assert reason in str(caught[0].message)


def test_a_missing_file_that_the_environment_names_is_one_warning(file):
    with pytest.warns(UserWarning, match="No such file"):
        assert tuning_file.tuning_for(2) == tuning_file.defaults(2)


EXTREMES = [
    {},
    {"one_shot_bytes": 128, "staged_bytes": 128, "chunk_bytes": 16384, "shortest_chunk_bytes": 4096,
     "chunks_wanted": 64, "ring_bytes": 262144, "past_cache_bytes": 0, "spin_us": 0, "yields": 0,
     "unsplit_bytes": 0, "background_spin_us": 0},
    {"one_shot_bytes": 131072, "staged_bytes": 131072, "chunk_bytes": 262144, "shortest_chunk_bytes": 262144,
     "chunks_wanted": 1, "unsplit_bytes": 1 << 20, "past_cache_bytes": 1 << 60, "spin_us": 100},
]  # fmt: skip


def _digests(group):
    """Returns the thresholds in use, and the bits of results of all sizes."""
    rank, size = group.rank(), group.size()
    digests = []

    def note(*tensors):
        digests.extend(hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for t in tensors)

    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 31, 300, 5_000, 40_000, 70_001, 600_000):
            generator = torch.Generator().manual_seed(1000 * count + rank)
            mine = torch.randn(count, generator=generator).to(dtype)
            reduced = mine.clone()
            group.allreduce([reduced]).wait()
            rooted = mine.clone()
            group.reduce([rooted], root=size - 1).wait()
            parts = [mine[: count - r].contiguous() for r in range(size)] if count >= size else [mine] * size
            output = torch.empty_like(parts[rank])
            group.reduce_scatter(
                [output], [parts], dist.ReduceScatterOptions(reduceOp=dist.ReduceOp.AVG)
            ).wait()
            gathered = [torch.empty_like(mine) for _ in range(size)]
            group.allgather([gathered], [mine]).wait()
            received = [torch.empty_like(mine) for _ in range(size)]
            group.alltoall(received, [mine] * size).wait()
            note(reduced, rooted, output, *gathered, *received)
    return group._native.tuning, digests


@pytest.mark.parametrize("size", [2, 3])
def test_thresholds_change_no_bit(size, tmp_path):
    expected = None
    for number, values in enumerate(EXTREMES):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps({size: values}))
        answers = run_ranks(_digests, size, backend="host", env={tuning_file.VARIABLE: str(file)})
        for used, _ in answers:
            assert used == tuning_file.defaults(size) | values
        digests = [answer[1] for answer in answers]
        expected = expected or digests
        assert digests == expected
