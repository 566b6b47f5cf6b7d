"""vLLM's CPU build on the workload files, through its `LLM` class.

    python benchmarks/peers/vllm_offline.py --model FOLDER --workload benchmarks/workloads/W1.json

`--eager` leaves compilation out. Only the end of all requests is known: its rows have no TTFT and
no TPOT.
"""

import os
from collections.abc import Sequence

from record import arguments, measure, stopwatch, together

from octavo.bench.load import Timing
from octavo.simulate.workload import WorkItem


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    chosen = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(chosen.kv_gib))
    cores = sorted(os.sched_getaffinity(0))[: chosen.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    import vllm

    llm = vllm.LLM(
        chosen.model,
        dtype=chosen.dtype,
        enforce_eager=chosen.eager,
        max_model_len=chosen.max_model_len,
        max_num_seqs=chosen.max_num_seqs,
    )

    def run(items: Sequence[WorkItem]) -> list[Timing]:
        prompts = [{"prompt_token_ids": list(item.prompt_token_ids)} for item in items]
        params = [
            vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=item.output_len)
            for item in items
        ]
        seconds = stopwatch()
        answers = llm.generate(prompts, params, use_tqdm=False)
        return together(items, [len(one.outputs[0].token_ids) for one in answers], seconds())

    settings = {"eager": chosen.eager, "dtype": chosen.dtype}
    measure(chosen, f"vllm {vllm.__version__}", settings, run, tells_first_token=False)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
