"""What the command lines of the programs refuse before anything is measured, and by which words."""

from __future__ import annotations

import pytest
import torch

from collectives.cli import main


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("allreduce", "--backends host:rings", "unknown algorithm 'rings' in 'host:rings'; known are naive"),
        ("allreduce", "--threads 1,33", "a rank has at most 32 threads, not 33"),
        ("allreduce", "--backends host:33", "unknown algorithm '33' in 'host:33'"),
        ("allreduce", "--backends gloo:4", "unknown algorithm '4' in 'gloo:4'"),
        ("allreduce", "--backends glo:ring", "unknown backend 'glo'; known are"),
        ("allreduce", "--backends glo", "unknown backend 'glo'; known are"),
        ("allreduce", "--backends ,", "names nothing"),
        ("allreduce", "--sizes 8000G", "2 ranks with tensors of 8000 GiB need 80000.0 GiB of memory, but"),
        ("allreduce", "--sizes 8:4", "must ascend"),
        (
            "allreduce",
            "--dtype complex128 --sizes 8",
            "size 8 is no multiple of the 16 bytes of a complex128",
        ),
        ("allreduce", "--dtype float", "invalid choice"),
        ("allreduce", "--op mean", "invalid choice"),
        ("allreduce", "--ops scan", "unknown operation 'scan'; known are all_reduce"),
        ("allreduce", "--nproc 0", "must be 1 or more"),
        ("allreduce", "--nproc 1000 --bind", "1000 ranks cannot have a core each"),
        ("allreduce", "--warmup 1", "must be 2 or more"),
        ("allreduce", "--budget 0", "must be finite and more than 0, but is 0"),
        ("allreduce", "--machines 0", "must be 1 or more"),
        ("allreduce", "--machines 2 --nproc 3", "3 ranks cannot be shared equally among 2 machines"),
        ("allreduce", "--machines 2 --link fast", "'fast' is no rate of a link"),
        ("allreduce", "--link 1gbit", "a link joins machines"),
        ("allreduce", "--mpi other", "is not NAME=FOLDER,..."),
        ("allreduce", "--mpi =/opt/mpi", "is not NAME=FOLDER,..."),
        ("allreduce", "--mpi other=", "is not NAME=FOLDER,..."),
        ("allreduce", "--backends mpi4py:other --sizes 8", "mpi4py:other names an MPI without a folder"),
        ("ddp", "--peers ours", "must be alone, ours:BACKEND or torch:BACKEND"),
        ("ddp", "--peers alone:host", "must be alone"),
        ("ddp", "--peers ours:host+zip", "has no known hook or option; ours knows +noop, +allreduce"),
        ("ddp", "--peers torch:gloo+one-bit", "has no known hook or option; torch knows +noop"),
        ("ddp", "--peers alone+noop", "has no known hook or option; alone knows none"),
        ("ddp", "--peers ours:host+noop+fp16", "has an option twice, or two hooks"),
        ("ddp", "--peers ours:hots", "unknown backend 'hots'"),
        ("ddp", "--peers ours:host:2", "round_robin:LANES"),
        ("ddp", "--hooks zip", "peer 'ours:host+zip' has no known hook"),
        ("ddp", "--machines 3 --peers alone", "2 ranks cannot be shared equally among 3 machines"),
        ("ddp", "--machines 2", "ours:mpi is started by mpirun"),
        ("ddp", "--budget nan", "must be finite and more than 0, but is nan"),
        ("ddp", "--link 1gbit --peers alone", "a link joins machines"),
        ("ddp", "--models gpt", "unknown model 'gpt'; known are resnet50"),
        ("paper", "fig6 --models tiny", "unknown model 'tiny'"),
        ("paper", "fig6 --backends round_robin:0", "round_robin:LANES"),
        ("paper", "fig6 --backends torch:absent", "has no backend 'absent' here"),
        ("paper", "fig6 --budget inf", "must be finite and more than 0, but is inf"),
        ("paper", "fig6 --page report.md", "--page is for the report"),
        ("paper", "fig6 --lengths tiny=3", "must be MODEL=N"),
        ("paper", "fig6 --lengths small", "must be MODEL=N"),
        ("paper", "fig6 --lengths small=0", "must be MODEL=N"),
        ("paper", "fig9 --machines 3", "cannot be shared equally among 3 machines"),
        ("paper", "fig11 --images absent.npz", "absent.npz"),
        ("paper", "report", "--json DIR"),
        ("store", "--operations set,put", "unknown operation 'put'; known are set, get"),
        ("store", "--servers there", "unknown place of a server 'there'; known are here, process"),
        ("store", "--seconds 0", "seconds must be more than 0"),
    ],
)
def test_what_does_not_fit_is_refused(program, words, message, capsys):
    try:
        status = main(["bench", program, *words.split()])
    except SystemExit as error:  # by argparse
        status = error.code
    assert status in {1, 2}
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("program", ["allreduce", "ddp", "paper"])
def test_without_a_gpu_there_is_nothing_to_measure_on_it(program, capsys):
    words = ["fig6"] if program == "paper" else []
    assert main(["bench", program, *words, "--device", "cuda"]) == 1
    assert "tensors on cuda cannot be measured here: torch" in capsys.readouterr().err
