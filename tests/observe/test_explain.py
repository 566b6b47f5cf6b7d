"""Lives in words: why a request waited, who took its blocks, what that cost."""

import json
from dataclasses import replace
from random import Random
from typing import get_args, get_type_hints

import msgspec
from tests.core.serving import Serving, Setup, prompt
from tests.observe.recording import Kept, random_run, small_setup, watched

from octavo.core.calls import Plan
from octavo.core.events import (
    Deferred,
    Difference,
    Explanation,
    Fares,
    Finished,
    Pinned,
    Preempted,
    Stretch,
)
from octavo.core.plan import StepPlan
from octavo.core.request import Pin, Request
from octavo.observe.explain import _SHORT_OF, Account, account, cache_summary, fares, page, table
from octavo.observe.lives import Lives


def told_by(lives: Lives, name: str) -> Account:
    life = lives.named(name)
    assert life is not None
    return account(life, lives.started_s or 0.0)


def texts(told: Account) -> list[str]:
    return [sentence.text for sentence in told.story]


def request(random: Random, name: str, length: int, answer: int, **fields: int) -> Request:
    return Request(id=name, prompt=prompt(random, length), max_tokens=answer, **fields)


def crowd(seed: int) -> tuple[Lives, Serving]:
    """Two requests that outgrow the pool, and one that waits for a row."""
    lives = Lives()
    serving = watched(Setup(blocks=6, block_size=4, sequences=2, tokens=8), lives)
    random = Random(seed)
    serving.submit(request(random, "elder", 10, 12))
    serving.submit(request(random, "younger", 5, 12))
    serving.submit(request(random, "third", 3, 2))
    serving.finish()
    return lives, serving


def test_a_life_without_trouble() -> None:
    lives = Lives()
    serving = watched(Setup(), lives)
    serving.submit(Request(id="a", prompt=(1, 2, 3, 4, 5), max_tokens=3))
    serving.finish()
    told = told_by(lives, "a")
    assert texts(told) == [
        "arrived; 0 were running, 0 waiting",
        "admitted in row 0: 5 tokens, none cached; 0 blocks found, 2 allocated",
        "5 tokens to compute",
        "first token",
        "finished: the answer has its full length",
    ]
    assert [phase for _, phase in told.phases] == ["waiting", "prefill", "decode", "ended"]
    assert [blocks for _, blocks in told.blocks] == [2, 0]
    assert (told.state, told.answer_tokens, told.peak_blocks) == ("length", 3, 2)


def test_chunks_preemption_and_return(seed: int) -> None:
    lives, serving = crowd(seed)
    told, elder = told_by(lives, "younger"), told_by(lives, "elder")
    assert "10 tokens to compute in 2 chunks" in texts(elder)
    story = " | ".join(texts(told))
    assert "preempted (recompute) for elder: " in story
    assert "waited" in story
    assert "resumed in row" in story
    assert "next token: it goes on where it was" in story
    assert any(text.startswith("needed room: younger yielded") for text in texts(elder))
    receipt = serving.endings["younger"].receipt  # type: ignore[union-attr]
    assert told.receipt == receipt
    assert told.preemptions == receipt.preemptions > 0
    assert told.recomputed_tokens == receipt.recomputed_tokens


def test_a_swap_is_told_with_what_either_way_would_have_cost() -> None:
    lives = Lives(ended=None)
    setup = Setup(blocks=6, block_size=4, watermark_blocks=0, cached=False, host_blocks=6)
    serving = watched(setup, lives)
    for name, max_tokens in (("elder", 17), ("younger", 10)):
        serving.submit(Request(id=name, prompt=(1, 2, 3, 4, 5, 6, 7), max_tokens=max_tokens))
    serving.finish()
    told = told_by(lives, "younger")
    story = " | ".join(texts(told))
    assert (
        "preempted (swap) for elder: 3 blocks released, 3 moved to the swap space;"
        " estimated 60.0 ms to move there and back, 120.0 ms to recompute"
    ) in story
    assert ", 12 moved back from the swap space; 0 blocks found, 4 allocated" in story
    assert "KV blocks still on their way to the swap space (1)" in " | ".join(
        texts(told_by(lives, "elder"))
    )
    assert (told.preemptions, told.swaps, told.recomputed_tokens) == (1, 1, 0)
    assert "preempted 1 time (1 by swap), 0 tokens recomputed" in page(told)


def test_who_waits_is_told_behind_whom_and_for_what(seed: int) -> None:
    lives, _ = crowd(seed)
    story = texts(told_by(lives, "third"))
    assert any(" behind younger: " in text for text in story) or any(
        "first in the queue: all rows were taken" in text for text in story
    ), story


def test_nobody_is_told_to_have_waited_behind_itself() -> None:
    lives = Lives()
    serving = watched(Setup(sequences=1), lives)
    serving.submit(*(Request(id=name, prompt=(1, 2), max_tokens=3) for name in ("a", "b", "c")))
    serving.finish()
    waits = {
        name: [text for text in texts(told_by(lives, name)) if text.startswith("waited")]
        for name in ("b", "c")
    }
    assert waits["b"] == ["waited 3.00 s first in the queue: all rows were taken"]
    assert waits["c"][0] == "waited 3.00 s behind b: all rows were taken"
    assert waits["c"][-1] == "waited 3.00 s first in the queue: all rows were taken"


def test_who_yields_in_a_step_of_nothing_else_is_told_too() -> None:
    """For two that must grow, and blocks still on their way: nobody could go on, so there was no
    plan, and nobody heard of the preemption. Such a step comes up in this run."""
    random, lives = Random("16223814694659157668 4"), Lives(ended=None)
    serving = watched(small_setup(random), lives)
    random_run(random, serving)
    (bare,) = (plan for plan in serving.plans if not plan.spans and not plan.moves)
    (preempted,) = (one for one in bare.decisions if isinstance(one, Preempted))
    receipt = serving.endings[preempted.request_id].receipt
    assert told_by(lives, preempted.request_id).preemptions == receipt.preemptions == 1


def test_accounts_agree_with_the_core(seed: int) -> None:
    """Over random runs: the figures are those of the receipts, and blocks those of the tables."""
    for number in range(20):
        random, lives = Random(f"{seed} {number}"), Lives(ended=None)
        serving = watched(small_setup(random), lives)
        random_run(random, serving)
        for name, ending in serving.endings.items():
            told = told_by(lives, name)
            page(told)
            if not isinstance(ending, Finished):
                assert told.state == "refused"
                continue
            receipt = ending.receipt
            assert told.state == ending.reason
            assert told.answer_tokens == receipt.completion_tokens
            assert told.preemptions == receipt.preemptions
            assert told.peak_blocks == receipt.peak_blocks
            assert all(blocks <= receipt.peak_blocks for _, blocks in told.blocks)
            since = [None if told.queued_s is None else told.queued_s + receipt.arrival_s]
            assert since == [receipt.admitted_s]
            assert told.blocks == () or told.blocks[-1][1] == 0


def test_blocks_over_time_are_those_of_the_tables(seed: int) -> None:
    """What a commit gives back is told by the next plan."""
    random, lives = Random(seed), Lives(ended=None)
    serving = watched(replace(small_setup(random), windows=(None, 3, 7), blocks=60), lives)
    for number in range(12):
        serving.submit(request(random, f"r{number}", random.randint(1, 8), random.randint(1, 8)))
        serving.launch()
        for sequence in serving.scheduler.running:
            life = lives.named(sequence.id)
            assert life is not None
            held = [len(list(table.live())) for table in sequence.tables]
            assert life.blocks[-1][1] == sum(held)
        serving.land()
    serving.finish()


def test_only_the_last_that_ended_are_kept(seed: int) -> None:
    random, lives = Random(seed), Lives(ended=2)
    serving = watched(Setup(), lives)
    for name in "abcd":
        serving.submit(request(random, name, 3, 2))
        serving.finish()
    serving.submit(request(random, "live", 3, 2))
    assert [life.id for life in lives.all()] == ["c", "d", "live"]
    assert lives.named("a") is None


def test_an_id_that_is_refused_as_a_double_changes_nothing(seed: int) -> None:
    random, lives = Random(seed), Lives()
    serving = watched(Setup(), lives)
    serving.submit(request(random, "a", 3, 2))
    serving.scheduler.submit(request(random, "a", 4, 2), 9.0)
    told = told_by(lives, "a")
    assert (told.state, told.prompt_tokens) == ("waiting", 3)
    serving.finish()
    assert told_by(lives, "a").state == "length"


def test_a_request_that_is_refused_says_why(seed: int) -> None:
    random, lives = Random(seed), Lives()
    serving = watched(Setup(blocks=4), lives)
    serving.submit(request(random, "giant", 100, 2))
    told = told_by(lives, "giant")
    assert told.state == "refused"
    assert "refused (blocks): prompt and answer need 26 KV blocks" in texts(told)[-1]


def test_no_token_is_in_an_account() -> None:
    lives = Lives()
    serving = watched(Setup(vocabulary=987_654_321), lives)
    serving.submit(Request(id="a", prompt=(987_654_321,) * 5, max_tokens=3))
    serving.finish()
    text = msgspec.json.encode(told_by(lives, "a")).decode()
    assert "987654321" not in text
    assert json.loads(text)["prompt_tokens"] == 5


def test_the_page_and_the_table(seed: int) -> None:
    lives, _ = crowd(seed)
    text = page(told_by(lives, "younger"))
    assert text.startswith("request younger: length\n")
    for part in ("  phase  ", "  blocks ", "░", "peak ", "preempted 1 time"):
        assert part in text, text
    accounts = [account(life, 0.0) for life in lives.all()]
    lines = table(accounts).splitlines()
    assert lines[0].split()[:3] == ["request", "arrived", "queued"]
    assert {line.split()[0] for line in lines[1:]} == {"elder", "younger", "third"}


def test_a_request_at_work_can_be_told(seed: int) -> None:
    random, lives = Random(seed), Lives()
    serving = watched(Setup(), lives)
    serving.submit(request(random, "a", 3, 9))
    assert told_by(lives, "a").state == "waiting"
    serving.step()
    told = told_by(lives, "a")
    assert (told.state, told.ended_s, told.receipt) == ("decode", None, None)
    assert "ended after -" in page(told)


def test_observing_does_not_keep_plans(seed: int) -> None:
    """A decode adds nothing to a life but a count."""
    random, lives, kept = Random(seed), Lives(), Kept()
    serving = watched(Setup(block_size=4, blocks=64), lives, kept)
    serving.submit(request(random, "a", 4, 100))
    serving.finish()
    steps = sum(isinstance(c, Plan) and isinstance(a, StepPlan) for c, a in kept.told)
    life = lives.named("a")
    assert life is not None
    assert steps == 100
    assert len(life.moments) < 10
    assert len(life.blocks) < 30


def test_who_waits_for_another_to_compute_its_beginning_is_told_so() -> None:
    lives = Lives()
    serving = watched(Setup(block_size=4, depth=2), lives)
    for name in "ab":
        serving.submit(Request(id=name, prompt=tuple(range(1, 14)), max_tokens=3))
    serving.launch()
    serving.launch()
    waits = "waited 1.00 s for a, which computed 12 tokens that both begin with"
    assert texts(told_by(lives, "b"))[1:] == [waits]
    serving.land()
    serving.launch()
    found = "admitted in row 1: 13 tokens, 12 of them cached; 3 blocks found, 1 allocated"
    assert texts(told_by(lives, "b"))[1:3] == [waits.replace("1.00", "2.00"), found]
    serving.finish()


def test_holds_that_go_and_pins_that_come_are_told() -> None:
    lives = Lives()
    serving = watched(Setup(blocks=4, block_size=4, watermark_blocks=0, pinned_blocks=1), lives)
    for name, tokens in (("a", 1), ("b", 5), ("c", 9)):
        prompt = tuple(range(tokens, tokens + (14 if name == "c" else 4)))
        pin = Pin(3 if name == "c" else 4, 9.0)
        serving.submit(Request(id=name, prompt=prompt, max_tokens=1, pins=(pin,)))
        serving.finish()
    (hold,) = [d.name for d in serving.decisions if isinstance(d, Pinned)]
    assert f"its beginning stays cached: 1 block pinned as {hold}" in texts(told_by(lives, "a"))
    refused = "its beginning was not pinned: with it 1 block too many would be pinned"
    assert refused in texts(told_by(lives, "b"))
    told = texts(told_by(lives, "c"))
    assert f"needed room: the hold {hold} gave up 1 block" in told
    assert "its beginning was not pinned: 1 token short of a block" in told


def test_limits_that_change_are_told_to_whoever_is_there() -> None:
    lives = Lives()
    serving = watched(Setup(waiting=2), lives)
    serving.submit(Request(id="a", prompt=(1, 2, 3), max_tokens=3))
    serving.step()
    serving.set_limits(tokens=16, waiting=None)
    serving.set_limits(tokens=16)
    serving.finish()
    (told,) = [text for text in texts(told_by(lives, "a")) if "limits" in text]
    assert told == "limits changed: tokens 64 → 16, waiting 2 → none"


def test_who_is_admitted_before_others_is_told_so() -> None:
    lives = Lives()
    serving = watched(Setup(sequences=1), lives)
    for name, priority in (("first", 0), ("low", 2), ("lower", 3), ("high", 1)):
        serving.submit(Request(id=name, prompt=(1, 2), max_tokens=9, priority=priority))
        serving.step()
    serving.finish()
    (admitted,) = (text for text in texts(told_by(lives, "high")) if text.startswith("admitted"))
    assert admitted.startswith("admitted in row 0 before 2 that came earlier: 2 tokens")


def test_a_chunk_says_whether_the_targets_of_others_cut_it() -> None:
    """A token takes an eighth of a second; the one that answers wants one every two."""
    lives = Lives()
    setup = Setup(blocks=40, policy="slo", tpot_target_s=2.0, token_s=0.125)
    serving = watched(setup, lives)
    serving.submit(Request(id="answers", prompt=(1, 2, 3), max_tokens=40))
    for _ in range(3):
        serving.step()
    serving.submit(Request(id="long", prompt=tuple(range(5, 65)), max_tokens=2))
    serving.finish()
    (filled,) = (text for text in texts(told_by(lives, "long")) if "to compute" in text)
    assert filled == (
        "60 tokens to compute in 4 chunks, 3 of them shortened to keep the TPOT target of others"
    )


def test_every_limit_that_one_waits_for_has_words() -> None:
    """But `prefix`, for which nobody stands first in the queue."""
    limits = set(get_args(get_type_hints(Deferred)["limit"]))
    assert limits - {"prefix"} <= _SHORT_OF.keys()


def test_why_the_hits_of_an_admission_end_is_told() -> None:
    lives = Lives()
    serving = watched(Setup(blocks=8, block_size=4, watermark_blocks=0), lives)
    prompt = tuple(range(1, 14))
    for name, tokens in (("a", prompt), ("flood", tuple(range(30, 60))), ("again", prompt)):
        serving.submit(Request(id=name, prompt=tokens, max_tokens=1))
        serving.finish()
    serving.flush()
    serving.submit(Request(id="later", prompt=prompt, max_tokens=1))
    serving.finish()
    (again,) = [text for text in texts(told_by(lives, "again")) if text.startswith("admitted")]
    assert again.endswith("; block 0 evicted for flood at step 1, 1.00 s before")
    (later,) = [text for text in texts(told_by(lives, "later")) if text.startswith("admitted")]
    assert "; block 0 gone with all the cache, which was emptied on demand at step" in later
    assert later.endswith(", 1.00 s before")


def test_every_way_a_block_can_fare_has_words() -> None:
    for why in get_args(Fares):
        said = fares(Stretch(2, 5, why, 3, Difference(35, 7, 8), "x", 1.0, 9), 1.25)
        assert said.startswith("blocks 2-4 ")
        assert "x at step 9, 250 ms before; " in said
        assert "token 35 is 7" in said
    told = Explanation(20, 16, 16, (Stretch(0, 1, "hit"), Stretch(1, 2, "not_full")), 0.0)
    assert cache_summary(told) == (
        "16 of 20 prompt tokens cached: all that can be; 4 tokens must be computed in any case"
    )
    told = Explanation(40, 16, 16, (Stretch(0, 1, "hit"), Stretch(1, 3, "other_salt")), 0.0)
    assert cache_summary(told).endswith("; blocks 1-2 cached under another salt only")
