"""What guessing ahead saves where a text is copied or edited, what it costs where every guess is
wrong, and that answers stay equal.

    python benchmarks/drafts.py --drafts 0 4 8 --rounds 3
    python benchmarks/drafts.py --drafts 0 8 --rounds 9 --wrong
    python benchmarks/drafts.py --model LARGE --draft-model SMALL

The numbers of drafts take turns. Processor time counts the threads of the kernels, and changes less
with what else the machine does than the time on the clock.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict

from octavo import LLM, SamplingParams
from octavo.engine.answer import Answer
from octavo.runtime.lookup import PromptLookup

TEXT = (
    "The harbour master kept a ledger of every ship that came into the bay. On Monday the Albatross"
    " arrived from Lisbon with salt, cork and forty barrels of oil. On Tuesday the Heron arrived"
    " from Bergen with timber and dried fish. On Wednesday no ship arrived because of the storm. On"
    " Thursday the Albatross left for Genoa with wool and tin."
)
TASKS = (
    "Copy this text word for word, but replace Monday by Sunday:",
    "Repeat the following text exactly:",
    "Summarise:",
)
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=160),
    "drawn": SamplingParams(temperature=0.7, seed=3, max_tokens=160),
    "penalised": SamplingParams(
        temperature=0, max_tokens=160, presence_penalty=0.5, repetition_penalty=1.1
    ),
}


def run(llm: LLM, drafts: int, params: SamplingParams) -> tuple[float, float, list[Answer]]:
    """Seconds on the clock and of the processor, and the answers one after the other."""
    llm.flush()
    llm.set_limits(max_draft_tokens=drafts)
    clock, processor = time.perf_counter(), time.process_time()
    answers = [
        llm.chat([{"role": "user", "content": f"{task}\n\n{TEXT}"}], params, progress=False)[0]
        for task in TASKS
    ]
    return time.perf_counter() - clock, time.process_time() - processor, answers


def never_right(lookup: PromptLookup, count: int) -> tuple[int, ...]:
    """Guesses from one end of the vocabulary to the other."""
    last = lookup._tokens[-1]
    return tuple((last + 7919 * number) % 40_000 + 100 for number in range(1, count + 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-model")
    parser.add_argument("--wrong", action="store_true", help="let every guess be wrong")
    arguments = parser.parse_args()
    if arguments.wrong:
        PromptLookup.guess = never_right  # type: ignore[method-assign]
    llm = LLM(
        arguments.model,
        draft_model=arguments.draft_model,
        kv_cache_memory="512MiB",
        log_level="error",
    )
    differ = 0
    for kind, params in KINDS.items():
        spent = defaultdict(list)
        for _ in range(arguments.rounds):
            told = {}
            for drafts in arguments.drafts:
                clock_s, processor_s, answers = run(llm, drafts, params)
                spent[drafts].append((clock_s, processor_s))
                told[drafts] = [(one.token_ids, one.logprobs) for one in answers]
                costs = [one.receipt for one in answers]
            differ += any(one != told[arguments.drafts[0]] for one in told.values())
        for drafts, times in spent.items():
            clock_s, processor_s = (statistics.median(each) for each in zip(*times, strict=True))
            print(f"{kind:10} drafts {drafts}: {clock_s:5.2f} s, processor {processor_s:5.2f} s")
        drafted = sum(one.drafted_tokens for one in costs)
        accepted = sum(one.accepted_tokens for one in costs)
        print(f"{kind:10} {accepted} of {drafted} drafts were right with {arguments.drafts[-1]}")
    print("answers and log-probabilities are equal" if not differ else f"{differ} rounds DIFFER")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
