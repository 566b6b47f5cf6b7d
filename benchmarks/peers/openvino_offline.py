"""OpenVINO GenAI on the workload files, through its `ContinuousBatchingPipeline`.

    python benchmarks/peers/openvino_offline.py --model FOLDER \\
        --workload benchmarks/workloads/W1.json

FOLDER holds the model in OpenVINO's own format (`optimum-cli export openvino`). Only the end of all
requests is known: its rows have no TTFT and no TPOT.
"""

from collections.abc import Sequence

from record import arguments, measure, stopwatch, together

from octavo.bench.load import Timing
from octavo.simulate.workload import WorkItem


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--precision", default="bf16", help="INFERENCE_PRECISION_HINT")
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    chosen = parser.parse_args()
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = chosen.kv_gib
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = chosen.max_num_seqs
    scheduler.max_num_batched_tokens = chosen.max_num_batched_tokens
    properties = {
        "INFERENCE_PRECISION_HINT": chosen.precision,
        "INFERENCE_NUM_THREADS": chosen.threads,
        "NUM_STREAMS": 1,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        chosen.model, scheduler_config=scheduler, device="CPU", properties=properties
    )

    def run(items: Sequence[WorkItem]) -> list[Timing]:
        prompts, configs = [], []
        for item in items:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = item.output_len, True
            config.do_sample = False
            configs.append(config)
            prompts.append(openvino.Tensor(np.array([item.prompt_token_ids], np.int64)))
        seconds = stopwatch()
        answers = pipeline.generate(prompts, configs)
        return together(items, [len(one.m_generation_ids[0]) for one in answers], seconds())

    measure(
        chosen,
        f"openvino-genai {openvino_genai.__version__}",
        properties,
        run,
        tells_first_token=False,
    )


if __name__ == "__main__":
    main()
