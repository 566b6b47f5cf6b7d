"""Beam search as transformers documents it, in plain Python: every prefix is computed anew.

It keeps no state but lists of (score, tokens), and asks for the log-probabilities of all tokens
after a prefix. Groups search one after the other at each position, as in Vijayakumar et al. 2016.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product

from octavo.core.request import Beams, Request
from octavo.simulate.oracle import ROOT, digest, offered

Prefix = tuple[int, ...]
Scores = Mapping[int, float]
"""The log-probability of each token that may follow a prefix."""
Scored = tuple[float, Prefix]


def search(
    beams: Beams, scores_of: Callable[[Prefix], Scores], *, ends: frozenset[int], max_tokens: int
) -> list[Scored]:
    """The answers with their scores, the best first."""
    width = beams.width // beams.groups
    running: list[list[Scored]] = [[(0.0, ())] for _ in range(beams.groups)]
    finished: list[list[Scored]] = [[] for _ in range(beams.groups)]
    for length in range(1, max_tokens + 1):
        taken: Counter[int] = Counter()
        for group in range(beams.groups):
            if not running[group]:
                continue
            flat = [
                (before + score - beams.diversity_penalty * taken[token], (*tokens, token))
                for before, tokens in running[group]
                for token, score in scores_of(tokens).items()
            ]
            flat.sort(key=lambda one: -one[0])
            keep = flat[: max(2, 1 + len(ends)) * width]
            over = [tokens[-1] in ends or length == max_tokens for _, tokens in keep]
            for (score, tokens), stops in list(zip(keep, over, strict=True))[:width]:
                if stops:
                    finished[group].append((score / length**beams.length_penalty, tokens))
            finished[group] = sorted(finished[group], key=lambda one: -one[0])[:width]
            going = [one for one, stops in zip(keep, over, strict=True) if not stops][:width]
            full = len(finished[group]) == width
            if full and going:
                best_length = length
                if beams.early_stopping == "never" and beams.length_penalty > 0:
                    best_length = max_tokens
                best = going[0][0] / best_length**beams.length_penalty
                if beams.early_stopping is True or best <= finished[group][-1][0]:
                    going = []
            running[group] = going
            taken.update(tokens[-1] for _, tokens in going)
    return sorted((one for group in finished for one in group), key=lambda one: -one[0])


def enumerated(
    beams: Beams, scores_of: Callable[[Prefix], Scores], *, ends: frozenset[int], max_tokens: int
) -> list[Scored]:
    """Every answer there is with its score, the best first."""
    vocabulary = sorted(scores_of(()))
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in product(vocabulary, repeat=length):
            if any(token in ends for token in tokens[:-1]):
                continue
            if tokens[-1] in ends or length == max_tokens:
                total = sum(scores_of(tokens[:at])[tokens[at]] for at in range(length))
                found.append((total / length**beams.length_penalty, tokens))
    return sorted(found, key=lambda one: -one[0])


def oracle_scores(request: Request, vocabulary: int) -> Callable[[Prefix], Scores]:
    """What the oracle says of the tokens that may follow the prompt and a prefix of the answer."""

    def scores_of(answer: Prefix) -> Scores:
        told = ROOT
        for token in (*request.prompt, *answer):
            told = digest(told, token)
        length = len(request.prompt) + len(answer)
        return {one.token: one.score for one in offered(request, told, length, vocabulary, None)}

    return scores_of


def beams_alone(request: Request, vocabulary: int) -> list[Scored]:
    """The answers that `request` must get, whoever else is served."""
    assert request.beams is not None
    return search(
        request.beams,
        oracle_scores(request, vocabulary),
        ends=request.stop_token_ids,
        max_tokens=request.max_tokens,
    )
