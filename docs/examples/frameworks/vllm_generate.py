"""vLLM's tensor parallel inference on CPUs over this package, with a Llama of random weights.

Run with: python vllm_generate.py
"""

import os
import tempfile

import tiny

if __name__ == "__main__":  # vLLM's processes import this file
    parser = tiny.inference_parser()
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline, each with two ranks")
    given = parser.parse_args()

    # Before vLLM is imported. Without it, ranks of a machine communicate by vLLM's shared-memory kernel.
    os.environ["VLLM_PLUGINS"] = "collectives" if given.backend == "collectives" else ""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM would want a core for itself

    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    assert current_platform.dist_backend == given.backend
    with tempfile.TemporaryDirectory() as folder:
        tiny.llama().save_pretrained(folder)
        llm = LLM(
            folder,
            tensor_parallel_size=2,
            pipeline_parallel_size=given.stages,
            dtype="bfloat16",
            max_model_len=512,
            enforce_eager=True,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=1 << 28,
        )

    def tokens_after(prompt, count):
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        (whole,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(whole.outputs[0].token_ids)

    tiny.generate(given, tokens_after)
