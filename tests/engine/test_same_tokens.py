"""Contract C8, end to end: forty mixed requests, and every way to serve them.

Alone, together, in any order of arrival, in steps of 16, 64 or 2,048 tokens, with one thread or
two, from a warm prefix cache, or in a pool so small that requests are preempted again and again:
the tokens and log-probabilities of a request, those of the likeliest too, are equal, by ==. For
each instruction set here on a small random network, whose near ties would show a change of one
bit, and, twenty requests, on the demo model; with weights in bfloat16, and in eight and four bits;
with keys and values in bfloat16, and in eight bits; with layers that see all, and with some that
see a window.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.config import Quantization
from octavo.core.acceptance import Acceptance
from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits, Preemption
from octavo.core.events import Finished, Likeliest, Token
from octavo.core.invariants import check
from octavo.core.prefix_cache import HashFunction, PrefixCache, sha256
from octavo.core.request import Dry, Penalty, Request, Sampling
from octavo.core.scheduler import Scheduler
from octavo.core.swap import HostArena, SwapSetup
from octavo.core.windows import blocks_for
from octavo.engine.engine import Engine
from octavo.models.decoder import Decoder
from octavo.models.loader import Model, load_model
from octavo.models.spec import layer_groups
from octavo.ops.api import KVType
from octavo.ops.native import NativeOps, available_sets
from octavo.runtime.draft_model import DraftModel
from octavo.runtime.drafting import Guesser
from octavo.runtime.lookup import Drafters
from octavo.runtime.movers import Mover
from octavo.runtime.runner import ModelRunner
from octavo.runtime.storage import KVStorage

REQUESTS = 40
DEMO_REQUESTS = 20
"""A step of the demo model costs thirty of the small network."""
MAX_CONTEXT = 256
SEQUENCES = 40
END = 2

Answers = dict[str, tuple[tuple[int, float, Likeliest], ...]]


def mixed_requests(seed: int, vocabulary: int, count: int) -> list[Request]:
    """Greedy and seeded, short and long, some that share a beginning, some that may end early."""
    draw = random.Random(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(count))

    preamble = words(50)
    requests = []
    for number in range(count):
        own = words((1, 3, 15, 16, 17, 40, 90)[number % 7])
        sampling = draw.choice(
            (
                Sampling(),
                Sampling(temperature=0.8, seed=number),
                Sampling(temperature=1.2, seed=number, top_k=40, top_p=0.9),
                Sampling(temperature=1.0, seed=number, min_p=0.05),
                Sampling(penalty=Penalty(repetition=1.3, frequency=0.2)),
                Sampling(
                    temperature=1.0,
                    seed=number,
                    penalty=Penalty(presence=1.5),
                    logit_bias=tuple((token, 2.0) for token in words(5)),
                ),
                Sampling(temperature=1.0, seed=number, typical_p=0.9, top_n_sigma=2.0),
                Sampling(
                    temperature=1.0,
                    seed=number,
                    xtc_probability=0.5,
                    dry=Dry(multiplier=1.0, allowed_length=1, window=40, breakers=((7,), (5, 6))),
                ),
                Sampling(
                    temperature=0.8,
                    seed=number,
                    allowed_token_ids=tuple(range(0, vocabulary, 9)),
                    bad_words=tuple((9 * a, 9 * b) for a in range(30) for b in range(30)),
                ),
            )
        )
        requests.append(
            Request(
                id=f"r{number}",
                prompt=preamble + own if draw.random() < 0.5 else own,
                max_tokens=50 if number % 3 == 0 else draw.choice((1, 4, 17, 50)),
                min_tokens=draw.choice((0, 0, 1)),
                stop_token_ids=frozenset({END}),
                sampling=sampling,
                top_logprobs=draw.choice((0, 0, 3, 5)),
            )
        )
    return requests


def write_network(folder: Path, seed: int) -> Path:
    """A random Llama whose sizes are multiples of nothing that a kernel would like."""
    hidden, heads, kv_heads, head, ffn, vocabulary, layers = 104, 6, 2, 20, 184, 500, 3
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": END,
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{layer}.mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}.mlp.up_proj.weight": (ffn, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, ffn),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.standard_normal(shape) * 0.15 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Served:
    """One model on one instruction set; an engine of any size over it."""

    path: Path
    isa: str
    quantization: Quantization = "none"
    kv: KVType = "bfloat16"
    windows: tuple[int | None, ...] | None = None
    """What each layer sees instead of all; None leaves the model as it is."""
    models: dict[int, tuple[NativeOps, Model]] = field(default_factory=dict)

    def model(self, threads: int) -> tuple[NativeOps, Model]:
        if threads not in self.models:
            ops = NativeOps(threads=threads, isa=self.isa)
            model = load_model(
                self.path,
                ops,
                2048,
                quantization=self.quantization,
                max_rows=SEQUENCES,
                max_context=MAX_CONTEXT,
            )
            self.models[threads] = ops, model if self.windows is None else self.sliding(model, ops)
        return self.models[threads]

    def sliding(self, model: Model, ops: NativeOps) -> Model:
        """The same weights with other layer groups."""
        assert self.windows is not None
        spec = replace(model.spec, groups=layer_groups(self.windows))
        sizes = {"max_tokens": 2048, "max_rows": SEQUENCES, "max_context": MAX_CONTEXT}
        return Model(spec, Decoder(spec, model.decoder.weights, ops, **sizes))

    def engine(
        self,
        *,
        tokens: int = 512,
        threads: int = 2,
        blocks: int = 800,
        sequences: int = SEQUENCES,
        preemption: Preemption = "auto",
        host_blocks: int = 0,
        hash_function: HashFunction = sha256,
        drafts: int = 0,
        guesser: Guesser | None = None,
        draft: Model | None = None,
    ) -> Engine:
        """A pool that holds `blocks` blocks of one sequence, or many of several; with a `draft`
        model whose KV lies in the same blocks."""
        ops, model = self.model(threads)
        layout = model.spec.kv_layout(16, self.kv)
        windows = tuple(group.window for group in model.spec.groups)
        blocks = blocks_for(windows, 16 * blocks, 16)
        storage, host = KVStorage(layout, blocks), KVStorage(layout, host_blocks)
        storage.poison()
        host.poison()
        swap = SwapSetup(
            host_blocks=host_blocks,
            block_bytes=layout.block_bytes,
            bytes_per_s=1e9,
            tokens_per_s=100.0,
        )
        if draft is not None:
            guesser = draft_model(draft, ops, self.kv, blocks, host_blocks, sequences)
        runner = ModelRunner(
            model.decoder,
            ops,
            storage,
            rows=sequences,
            draws=max(sequences, 16),
            guesser=guesser,
            max_context=MAX_CONTEXT,
            groups=len(windows),
            mover=Mover(storage, host),
        )
        manager = BlockManager(
            blocks=blocks,
            block_size=16,
            windows=windows,
            cache=PrefixCache(block_size=16, windows=windows, hash_function=hash_function),
            arena=HostArena(swap),
        )
        limits = Limits(
            sequences=sequences,
            tokens=tokens,
            watermark_blocks=0,
            preemption=preemption,
            drafts=drafts,
        )
        return Engine(Scheduler(manager, limits), runner)


def draft_model(
    model: Model, ops: NativeOps, kv: KVType, blocks: int, slots: int, rows: int
) -> DraftModel:
    layout = model.spec.kv_layout(16, kv)
    storage, arena = KVStorage(layout, blocks), KVStorage(layout, slots)
    storage.poison()
    arena.poison()
    return DraftModel(
        model.decoder,
        ops,
        storage,
        arena,
        rows=rows,
        max_tokens=2048,
        max_context=MAX_CONTEXT,
    )


def name_of(request_id: str, branch: int) -> str:
    return f"{request_id}#{branch}" if branch else request_id


def serve(engine: Engine, requests: Sequence[Request], *, each_step: int | None = None) -> Answers:
    """Submit all at once, or `each_step` before each step; return what each branch got."""
    waiting = list(requests)
    answers = {
        name_of(request.id, own.sampling.branch): []
        for request in requests
        for own in request.split()
    }
    ended: set[str] = set()
    while len(ended) < len(answers):
        arriving = len(waiting) if each_step is None else each_step
        for request in waiting[:arriving]:
            assert engine.submit(request) == ()
        del waiting[:arriving]
        for event in engine.step():
            if isinstance(event, Token):
                name = name_of(event.request_id, event.branch)
                answers[name].append((event.token, event.logprob, event.top))
            elif isinstance(event, Finished):
                assert event.reason in ("stop", "length"), event
                ended.add(name_of(event.request_id, event.branch))
        check(engine.scheduler)
    return {name: tuple(tokens) for name, tokens in answers.items()}


BEST = available_sets()[0]


@pytest.fixture(
    scope="module",
    params=[
        *((isa, "none") for isa in available_sets()),
        (BEST, "int8"),
        (BEST, "int4"),
        (BEST, "int8-kv"),
        (BEST, "windows"),
        ("demo", "none"),
        ("demo", "stored"),
    ],
    ids="-".join,
)
def served(
    request: pytest.FixtureRequest,
    demo_model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run_seed: int,
) -> Served:
    where, quantization = request.param
    if where == "demo":
        return Served(demo_model_path, BEST, quantization)
    folder = tmp_path_factory.mktemp("network") / where
    path = write_network(folder, run_seed)
    if quantization == "int8-kv":
        return Served(path, where, kv="int8")
    if quantization == "windows":
        return Served(path, where, windows=(20, None, 20))
    return Served(path, where, quantization)


@pytest.fixture(scope="module")
def requests(served: Served, demo_model_path: Path, run_seed: int) -> list[Request]:
    count = DEMO_REQUESTS if served.path == demo_model_path else REQUESTS
    return mixed_requests(run_seed, served.model(2)[1].spec.vocab_size, count)


@pytest.fixture(scope="module")
def together(served: Served, requests: list[Request]) -> Answers:
    return serve(served.engine(), requests)


def test_alone(served: Served, requests: list[Request], together: Answers) -> None:
    for request in requests:
        engine = served.engine(blocks=16, sequences=1)
        assert serve(engine, [request]) == {request.id: together[request.id]}


def test_in_any_order_of_arrival(
    served: Served, requests: list[Request], together: Answers
) -> None:
    shuffled = random.Random(1).sample(requests, len(requests))
    assert serve(served.engine(), shuffled, each_step=2) == together


@pytest.mark.parametrize("tokens", [16, 64, 2048])
def test_in_steps_of_any_size(
    served: Served, requests: list[Request], together: Answers, tokens: int
) -> None:
    assert (
        serve(served.engine(tokens=tokens, sequences=min(tokens, SEQUENCES)), requests) == together
    )


class Prophet:
    """Guesses what the answer will be, and in one place of three something else."""

    def __init__(self, tokens: Iterable[int], answers: dict[tuple[int, ...], list[int]]) -> None:
        self._tokens = list(tokens)
        self._answers = answers

    def append(self, token: int) -> None:
        self._tokens.append(token)

    def guess(self, count: int) -> tuple[int, ...]:
        for length in range(len(self._tokens), 0, -1):
            known = self._answers.get(tuple(self._tokens[:length]))
            if known is not None:
                coming = known[len(self._tokens) - length :][:count]
                draw = random.Random(hash(tuple(self._tokens)))
                return tuple(token if draw.random() < 0.7 else END + 1 for token in coming)
        return ()


@pytest.mark.parametrize("size", ["wide", "narrow", "alone"])
def test_with_guesses_right_and_wrong(
    served: Served,
    requests: list[Request],
    together: Answers,
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    """Greedy and drawn, with penalties and without, beside others that have none, through
    preemptions and block borders, by whatever the guesses cost."""
    monkeypatch.setattr(Acceptance, "worth", lambda self, price, debt: 5)
    answers = {one.prompt: [token for token, _, _ in together[one.id]] for one in requests}

    def prophet(tokens: Iterable[int]) -> Prophet:
        return Prophet(tokens, answers)

    sizes: dict[str, dict[str, int]] = {
        "wide": {"sequences": 12, "tokens": 64},
        "narrow": {"sequences": 6, "tokens": 20, "blocks": 22},
        "alone": {"sequences": 1, "blocks": 16},
    }
    engine = served.engine(drafts=5, guesser=Drafters(prophet), **sizes[size])
    assert serve(engine, requests) == together
    counters = engine.scheduler.counters
    assert 0 < counters.tokens_accepted < counters.tokens_drafted


def test_with_one_thread(served: Served, requests: list[Request], together: Answers) -> None:
    assert serve(served.engine(threads=1), requests) == together


def test_from_a_warm_prefix_cache(
    served: Served, requests: list[Request], together: Answers
) -> None:
    engine = served.engine()
    assert serve(engine, requests) == together
    again = [replace(request, id=f"again-{request.id}") for request in requests]
    hits_before = engine.status().prefix_tokens_hit
    warm = serve(engine, again)
    assert {name.removeprefix("again-"): answer for name, answer in warm.items()} == together
    assert engine.status().prefix_tokens_hit > hits_before


def test_with_one_hash_for_all_blocks(
    served: Served, requests: list[Request], together: Answers
) -> None:
    """Every key is the same: less is found than could be, and never something wrong."""
    engine, chosen = served.engine(hash_function=lambda content: b"same"), requests[::3]
    expected = {request.id: together[request.id] for request in chosen}
    assert serve(engine, chosen) == expected
    again = [replace(request, id=f"again-{request.id}") for request in chosen]
    warm = serve(engine, again)
    assert {name.removeprefix("again-"): answer for name, answer in warm.items()} == expected


@pytest.mark.parametrize(
    ("preemption", "host_blocks", "swapped"),
    [("recompute", 60, "none"), ("swap", 60, "all"), ("swap", 6, "some"), ("auto", 60, "auto")],
)
def test_in_a_pool_that_preempts(
    served: Served,
    requests: list[Request],
    together: Answers,
    preemption: Preemption,
    host_blocks: int,
    swapped: str,
) -> None:
    """The longest request alone fills the pool. Those that grow most arrive first. Those that yield
    are swapped, computed again, or both in turn."""
    engine = served.engine(blocks=12, preemption=preemption, host_blocks=host_blocks)
    growing = sorted(requests, key=lambda request: (-request.max_tokens, len(request.prompt)))
    assert serve(engine, growing) == together
    status = engine.status()
    assert status.preemptions >= 3
    assert (status.swaps == 0) == (swapped == "none") or swapped == "auto"
    assert (status.swaps == status.preemptions) == (swapped == "all") or swapped == "auto"
    assert status.tokens_swapped_in <= status.tokens_swapped_out
    assert status.swap_blocks_used == status.blocks_fenced == 0


@pytest.mark.parametrize("sent", [1, 7])
def test_from_what_an_earlier_engine_has_sent(
    served: Served, requests: list[Request], together: Answers, sent: int
) -> None:
    """Contract C11: prompt and emitted tokens go on as the answer would have."""
    resumed = [
        replace(request, emitted=tuple(token for token, *_ in together[request.id][:sent]))
        for request in requests
        if len(together[request.id]) > sent
    ]
    assert any(request.sampling.looks_back for request in resumed)
    rest = serve(served.engine(), resumed)
    assert rest == {request.id: together[request.id][sent:] for request in resumed}


@pytest.mark.parametrize("blocks", [800, 14])
def test_in_branches_of_one_request(
    served: Served, requests: list[Request], together: Answers, blocks: int
) -> None:
    """Branch b is what a request of one branch gets whose draws are keyed by b."""
    chosen = requests[::6]
    singles = [
        replace(
            request,
            id=f"{request.id} of {branch}",
            sampling=replace(request.sampling, branch=branch),
        )
        for request in chosen
        for branch in range(3)
    ]
    answers = serve(served.engine(), singles)
    expected = {
        name_of(request.id, branch): answers[name_of(f"{request.id} of {branch}", branch)]
        for request in chosen
        for branch in range(3)
    }
    engine = served.engine(blocks=blocks)
    branched = serve(engine, [replace(request, branches=3) for request in chosen])
    assert branched.keys() == expected.keys()
    for name, answer in branched.items():
        assert answer == expected[name] == together.get(name, answer), name
    greedy = [request.id for request in chosen if request.sampling.greedy]
    assert all(branched[name] == branched[f"{name}#1"] for name in greedy)
    assert len(set(branched.values())) > len(chosen) or len(greedy) == len(chosen)
    assert (engine.status().preemptions > 0) == (blocks == 14)


def test_branches_hold_the_blocks_of_their_prompt_once(served: Served) -> None:
    vocabulary = served.model(2)[1].spec.vocab_size
    prompt = tuple(random.Random(7).randrange(3, vocabulary) for _ in range(90))
    engine = served.engine()
    engine.submit(
        Request(
            id="a", prompt=prompt, max_tokens=30, branches=8, sampling=Sampling(temperature=1.0)
        )
    )
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.status().blocks_owned)
    whole = 90 // 16 + 8 * (-(-119 // 16) - 90 // 16)
    windows = [group.window for group in served.model(2)[1].spec.groups]
    assert most <= sum(
        whole if window is None else 8 * (-(-window // 16) + 1) for window in windows
    )
    assert engine.status().tokens_computed == 90 + 7 + 8 * 29
