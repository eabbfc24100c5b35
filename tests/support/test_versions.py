"""What the script for other versions makes of the files of the project and of the report of pytest."""

from __future__ import annotations

from pathlib import Path

import pytest
import versions


def test_other_versions_take_the_place_of_those_of_the_constraints() -> None:
    text = 'numpy==2.2.6 ; python_version < "3.11"\nnumpy==2.4.6\ntorch==2.13.0\ntorchmetrics==1.9.0\n'
    assert versions.pinned(text, {"torch": "2.12.0"}).splitlines() == [
        'numpy==2.2.6 ; python_version < "3.11"', "numpy==2.4.6", "torchmetrics==1.9.0", "torch==2.12.0",
    ]  # fmt: skip
    assert versions.pinned(text, {"numpy": "1.26.4"}).splitlines() == [
        "torch==2.13.0", "torchmetrics==1.9.0", "numpy==1.26.4",
    ]  # fmt: skip


def test_packages_can_be_left_out_of_the_extras() -> None:
    text = (
        'bench = [\n  "plotly>=6.0",\n  "plotly-more",\n]\ndev = [\n  "cupy-cuda13x>=14",\n  "torch>=2",\n]\n'
    )
    without = versions.left_out(text, ["cupy-cuda13x", "plotly"])
    assert without == 'bench = [\n  "plotly-more",\n]\ndev = [\n  "torch>=2",\n]\n'
    with pytest.raises(SystemExit, match="asks for tor alone"):
        versions.left_out(text, ["tor"])


def test_outcomes_of_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='a' name='fine'/>"
        "<testcase classname='a' name='wrong'><failure/></testcase>"
        "<testcase classname='a' name='wrong'><error/></testcase>"
        "<testcase classname='b' name='broken'><error/></testcase>"
        "<testcase classname='b' name='left'><skipped/></testcase></testsuite></testsuites>"
    )
    counts, failed = versions.outcomes(report)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert failed == ["a::wrong", "b::broken"]
