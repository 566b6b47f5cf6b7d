"""Sessions on the demo model: they compute nothing twice, and say what one prompt would get."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequest, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PLAN = "A plan for a day at the sea:\n1."


@pytest.fixture(scope="module")
def llm(demo_model_path: Path) -> LLM:
    """Without drafts: tests count what is computed."""
    return LLM(str(demo_model_path), max_model_len=512, threads=2, max_draft_tokens=0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    status = llm.status()
    assert (status.blocks_owned, status.blocks_held) == (0, 0)


def alone(llm: LLM, tokens: tuple[int, ...], **settings: Any) -> tuple[int, ...]:
    """What a prompt of these tokens gets when nothing is cached."""
    llm.flush()
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | settings))
    (answer,) = llm.generate([list(tokens)], params)
    return answer.token_ids


def computed(llm: LLM) -> int:
    return llm.status().tokens_computed


def test_turns_compute_nothing_twice_and_say_what_one_prompt_would(llm: LLM) -> None:
    with llm.session(PLAN) as session:
        first = session.generate(params=GREEDY)
        before, start = session.tokens, computed(llm)
        llm.flush()  # the session alone has its KV
        second = session.generate("\n2.", GREEDY)
        prompt = second.receipt.prompt_tokens
        assert second.receipt.cached_tokens == len(before) - 1
        assert computed(llm) - start == prompt - (len(before) - 1) + 19
        tokens = session.tokens
    assert tokens[: len(before)] == before
    assert tokens[prompt:] == second.token_ids
    assert alone(llm, tokens[:prompt]) == second.token_ids
    assert alone(llm, before[:-20]) == first.token_ids


def test_forks_share_blocks_and_go_their_own_ways(llm: LLM) -> None:
    root = llm.session(PLAN)
    root.generate(params=GREEDY)
    held = llm.status().blocks_held
    forks = [root.fork() for _ in range(4)]
    assert llm.status().blocks_held == held
    texts = ["\n2.", " Then", "!", " (or not)"]
    answers = [fork.generate(text, GREEDY) for fork, text in zip(forks, texts, strict=True)]
    assert llm.status().blocks_held <= held + 4 * 3
    assert len({fork.tokens for fork in forks}) == 4
    root.close()
    for fork, answer in zip(forks, answers, strict=True):
        again = fork.generate(params=GREEDY)
        prompt = fork.tokens[: -len(again.token_ids)]
        assert prompt[-len(answer.token_ids) :] == answer.token_ids
        fork.close()
        assert alone(llm, prompt) == again.token_ids


def test_sessions_go_on_together(llm: LLM) -> None:
    root = llm.session(PLAN)
    root.generate(params=GREEDY)
    forks = [root.fork() for _ in range(3)]
    drawn = [SamplingParams(seed=n, max_tokens=12) for n in range(3)]
    answers = llm.generate([*forks, "Once upon a time"], [*drawn, GREEDY], progress=False)
    assert len({answer.token_ids for answer in answers}) == 4
    for fork, answer in zip(forks, answers, strict=False):
        assert answer.receipt.cached_tokens == len(root.tokens) - 1
        assert fork.tokens == root.tokens + answer.token_ids
    (alone,) = llm.generate(root, GREEDY)
    assert root.tokens[-20:] == alone.token_ids
    with pytest.raises(RequestError, match="twice"):
        llm.generate([root, root])
    for session in (root, *forks):
        session.close()


def test_what_a_session_held_can_go_and_it_says_the_same(demo_model_path: Path) -> None:
    """A pool of 20 blocks: another needs all of them between the turns of the session."""
    small = LLM(str(demo_model_path), max_model_len=320, kv_cache_memory=20 * 16 * 23040, threads=2)
    flood = SamplingParams(max_tokens=2, ignore_eos=True)
    said = []
    for crowded in (False, True):
        with small.session(PLAN) as session:
            for text in ("", "\n2.", "\n3."):
                said.append(session.generate(text, GREEDY).token_ids)
                if crowded:
                    small.generate([[5] * 318], flood, progress=False)
                    assert small.status().blocks_held == 0
    assert said[:3] == said[3:]


def test_what_ended_an_answer_is_not_gone_on_from(llm: LLM) -> None:
    """The text that a session goes on from is the one it has shown."""
    params = SamplingParams(temperature=0.0, max_tokens=60, stop="\n")
    with llm.session("Three colours:\n- red\n-") as session:
        answer = session.generate(params=params)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "\n")
        shown = "Three colours:\n- red\n-" + answer.text
        assert llm._door.tokenizer.decode(session.tokens) == shown
        assert llm.status().blocks_held > 0
        session.generate("\n-", params)
        assert llm._door.tokenizer.decode(session.tokens).startswith(shown + "\n-")


def test_a_stop_inside_a_token_leaves_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(PLAN, GREEDY)
    middle = whole.text[len(whole.text) // 2 :][:3]
    with llm.session(PLAN) as session:
        answer = session.generate(params=SamplingParams(temperature=0.0, stop=middle))
        session.generate(" So", GREEDY)
        text = llm._door.tokenizer.decode(session.tokens)
    assert text.startswith(PLAN + answer.text + " So")


def test_a_chat_goes_on_from_its_own_tokens(llm: LLM) -> None:
    with llm.session(messages=[]) as chat:
        first = chat.ask("What is the capital of France?", GREEDY)
        assert "Paris" in first.text
        assert first.finish_reason == "stop"
        llm.flush()
        second = chat.ask("And of Italy?", GREEDY)
        assert second.receipt.cached_tokens > second.receipt.prompt_tokens // 2
        roles = [message["role"] for message in chat.messages]
        assert roles == ["user", "assistant", "user", "assistant"]
        messages = chat.messages[:-1]
    llm.flush()
    (stateless,) = llm.chat(messages, GREEDY)
    assert stateless.token_ids == second.token_ids


def test_what_cannot_be_honoured_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="not with both"):
        llm.session("a", messages=[])
    plain, chat = llm.session("a"), llm.session(messages=[])
    with pytest.raises(RequestError, match="use generate"):
        plain.ask("b")
    with pytest.raises(RequestError, match="use ask"):
        chat.generate("b")
    with pytest.raises(InvalidRequest, match="fork it instead"):
        plain.generate(params=SamplingParams(n=2))
    with pytest.raises(InvalidRequest):
        llm.session().generate()
    with pytest.raises(InvalidRequest):
        chat.ask()
    plain.close()
    for use in (plain.generate, plain.fork):
        with pytest.raises(RequestError, match="closed"):
            use()
    plain.close()


def test_token_ids_and_text_can_follow_each_other(llm: LLM) -> None:
    ids = llm._door.tokenizer.encode(PLAN, parse_special=True, add_special=True)
    sessions = [llm.session(PLAN), llm.session(ids), llm.session()]
    texts: list[Any] = ["", "", PLAN]
    answers = [s.generate(t, GREEDY) for s, t in zip(sessions, texts, strict=True)]
    assert len({answer.token_ids for answer in answers}) == 1
    assert len({session.tokens for session in sessions}) == 1
    answers = [
        session.generate(text, GREEDY)
        for session, text in zip(sessions, ["\n2.", "\n2.", ids], strict=True)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert sessions[2].tokens[-20 - len(ids) : -20] == tuple(ids)
    for session in sessions:
        session.close()


def test_an_answer_that_fails_leaves_the_session_as_it_was(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llm.session(PLAN) as session:
        session.generate(params=GREEDY)
        before = session.tokens
        execute = llm._engine._runner.execute

        def fails(plan: Any) -> Any:
            raise RuntimeError("broken")

        monkeypatch.setattr(llm._engine._runner, "execute", fails)
        assert session.generate("\n2.", GREEDY).finish_reason == "error"
        monkeypatch.setattr(llm._engine._runner, "execute", execute)
        assert session.tokens == before
        assert session.generate("\n2.", GREEDY).receipt.cached_tokens == len(before) - 1
