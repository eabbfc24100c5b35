"""What the paper says of its evaluation, and the rule by which each statement is judged."""

from __future__ import annotations

from dataclasses import dataclass

from collectives.bench.paper.report import all_reduces, bucket_sizes, scaling
from collectives.bench.paper.report.convergence import loss_at_the_end
from collectives.bench.paper.report.findings import Judge
from collectives.bench.paper.report.overlap import backward_largest, overlap_saves

__all__ = ["STATEMENTS", "Statement"]


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the paper.

    Attributes:
        section: where it stands.
        says: the statement.
        rule: when it holds; where nothing can be measured, why.
        figures: names of the figures that it needs; none where nothing can be measured.
        judges: return what was found, given those figures.
        needs: ranks that it must be tried on, where not any will do.
        command: what measures it there.
    """

    section: str
    says: str
    rule: str
    figures: tuple[str, ...] = ()
    judges: tuple[Judge, ...] = ()
    needs: str = "the paper's models and backends"
    command: str = "collectives bench paper all --json DIR"


def _on_gpus(number: int, figure: str, words: str = "") -> tuple[str, str]:
    """Returns what is needed, and the command, of a statement about so many GPUs."""
    return (
        f"{number} GPUs",
        f"srun -n {number} collectives bench paper {figure} --device cuda{words} --json DIR",
    )


STATEMENTS = (
    Statement(
        "abstract, 8",
        "Scaling to 256 GPUs is nearly linear.",
        "256 ranks are worth at least 128 single ones, as those of the paper. With fewer the worth is shown.",
        ("fig9",),
        (scaling.near_linear,),
        *_on_gpus(256, "fig9"),
    ),
    Statement(
        "1",
        "The size of buckets can more than double the speed.",
        "The best size is more than twice as fast as the worst.",
        ("fig7",),
        (bucket_sizes.twice,),
    ),
    Statement(
        "1",
        "More than 60 % of the hours of production GPUs at Facebook, for four weeks of 2020, used the "
        "wrapper.",
        "a fact about one company's machines, which no other can measure.",
    ),
    Statement(
        "3.2.2",
        "All-reduces of Gloo reach top speed near 500 K parameters; those of NCCL gain even at 20 M.",
        "Gloo: the smallest size within 10 % of the best total has 200 K to 1 M parameters. NCCL: the "
        "largest size has the best total. Other backends are not judged.",
        ("fig2",),
        (all_reduces.top_speed,),
    ),
    Statement(
        "3.2.2",
        "Backward of ResNet-152 takes as long as communication, in order of magnitude: 250 ms on a GPU.",
        "Neither takes 10 times the other.",
        ("fig2",),
        (all_reduces.same_order,),
    ),
    Statement(
        "4.2, 5.2",
        "25 MB is a reasonable default size of buckets.",
        "25 MB takes at most 10 % more time than the best size.",
        ("fig7",),
        (bucket_sizes.default_size,),
    ),
    Statement(
        "5.1",
        "With NCCL overlap saves 38.0 % (ResNet) and 35.2 % (BERT).",
        "Overlap saves more than noise. The paper's numbers are of 32 GPUs; ours stand beside.",
        ("fig6",),
        (overlap_saves("cuda"),),
        *_on_gpus(32, "fig6"),
    ),
    Statement(
        "5.1",
        "With Gloo overlap saves 26.8 % (ResNet) and 21.5 % (BERT).",
        "Overlap saves more than noise, with any backend of CPU tensors. The paper's numbers are of 32 "
        "ranks.",
        ("fig6",),
        (overlap_saves("cpu"),),
    ),
    Statement(
        "5.1",
        "Backward takes the most time, communication more than half of that, and more in larger models; "
        "overlap gains most where computation and communication take equally long.",
        "Largest step: backward with communication takes longer than forward, and than the optimizer's "
        "step. More than half: of backward without overlap. Grows: the largest model has the larger share."
        " Balanced: the model whose two times differ least gains most.",
        ("fig6",),
        (backward_largest,),
    ),
    Statement(
        "5.2",
        "Best buckets on 16 GPUs: 10 to 25 MB for ResNet-50 and 50 MB for BERT with NCCL, 5 MB for both "
        "with Gloo.",
        "That size is within 2 % of the best one, and some sizes from 5 MB on differ by more than 10 %. "
        "Other backends are not judged.",
        ("fig7",),
        (bucket_sizes.best_sizes,),
    ),
    Statement(
        "5.2",
        "Iterations over Gloo spread more than over NCCL, and Gloo's all-reduces beyond 512 KB take "
        "equally long.",
        "Spread: the median over bucket sizes of half of p10 to p90 is larger. Equally long: totals from "
        "512 KB on differ by at most 25 %. Other backends are not judged.",
        ("fig2", "fig7"),
        (all_reduces.flat_and_wide,),
    ),
    Statement(
        "5.2",
        "BERT has 15 times the parameters of ResNet-50.",
        "The counted ratio is 12 to 18.",
        ("fig6",),
        (bucket_sizes.times_parameters,),
    ),
    Statement(
        "5.2",
        "From 16 to 32 GPUs, 0 MB becomes visibly slower; above 5 MB nothing does.",
        "With more ranks 0 MB takes more than 10 % longer, and 25 MB does not. Not judged where forward, "
        "which sends nothing, takes half as long again: there ranks share cores.",
        ("fig7", "fig8"),
        (bucket_sizes.more_ranks,),
        "twice as many ranks, each with a core or a GPU of its own",
        "srun -n 32 collectives bench paper all --device cuda --nproc 16,32 --json DIR",
    ),
    Statement(
        "5.3",
        "With NCCL an iteration of ResNet-50 takes twice as long on 256 GPUs as on one: they are worth 128.",
        "1.5 to 2.5 times as long on 256 ranks.",
        ("fig9",),
        (scaling.slowdown("nccl"),),
        *_on_gpus(256, "fig9"),
    ),
    Statement(
        "5.3",
        "With Gloo 256 GPUs take 3 times (ResNet-50) and 6 times (BERT) as long: the network limits.",
        "2 to 4.5 times, and 4.5 to 9 times, on 256 ranks. With fewer the times are shown.",
        ("fig9",),
        (scaling.slowdown("gloo"),),
        *_on_gpus(256, "fig9", " --backends torch:gloo"),
    ),
    Statement(
        "5.3",
        "BERT over NCCL was slower on 16 GPUs than on 32, perhaps by a slow link.",
        "16 GPUs take more than 10 % longer. A link that is not slow refutes it.",
        ("fig9",),
        (scaling.dearer_link,),
        *_on_gpus(32, "fig9", " --nproc 16,32"),
    ),
    Statement(
        "5.3",
        "Synchronising every 8 iterations saves 38 % (NCCL) and 57 % (Gloo) for ResNet-50 on 256 GPUs.",
        "It saves more than 10 % of the mean iteration, on any ranks.",
        ("fig10",),
        (scaling.skipping_saves,),
    ),
    Statement(
        "5.3",
        "With NCCL iterations suddenly take longer from 128 to 256 GPUs, however often they synchronise.",
        "Mean iterations take more than 25 % longer with every interval.",
        ("fig10",),
        (scaling.jump,),
        *_on_gpus(256, "fig10", " --nproc 128,256"),
    ),
    Statement(
        "5.3",
        "Skipped synchronisations cost no loss at rate 0.02 with batches of 8, but do at 0.06 with 256.",
        "The mean loss of the last tenth, every 8 iterations against each: in (a) at most 10 % higher, in "
        "(b) more. The paper trains a ResNet on MNIST. For that stand in: a residual network of nine layers "
        "and 131 K parameters, and, without `--images`, scikit-learn's 1,797 digits of 8 x 8 pixels.",
        ("fig11",),
        (loss_at_the_end,),
    ),
    Statement(
        "5.4",
        "Three groups in turn: BERT over NCCL is 33 % faster on 16 GPUs, ResNet-50 over NCCL no different,"
        " ResNet-50 over Gloo faster.",
        "Faster: three save more than noise of one. No different: within 10 %. Others are not judged.",
        ("fig12",),
        (scaling.lanes_in_turn,),
    ),
    Statement(
        "6.1",
        "NCCL is considerably faster than Gloo, and the best bucket grows with the model, but by less.",
        "NCCL takes 10 % less time than Gloo with the same model and ranks. The best bucket of the largest"
        " model is no smaller than the smallest model's, and grows by no more than the parameters. Not "
        "judged where sizes from 5 MB on do not differ by 10 % with either.",
        ("fig7", "fig9"),
        (scaling.nccl_or_gloo, bucket_sizes.sublinear),
        "GPUs",
        "torchrun --nproc-per-node 8 --no-python collectives bench paper all --device cuda --backends "
        "nccl,torch:gloo --json DIR",
    ),
    Statement(
        "1, 7",
        "The techniques came with PyTorch 1.1; the paper describes 1.5.",
        "history, which no measurement shows. [Ideas of the paper](internals/paper-ideas.md) has what is "
        "here.",
    ),
)
"""All statements with a number, in the paper's order."""
