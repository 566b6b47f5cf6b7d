"""SamplingParams: what a caller may ask of an answer, under the names vLLM users know."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from octavo.core.request import Beams, Dry, Grammar, Penalty, Sampling
from octavo.errors import InvalidRequest
from octavo.text.breakpoints import ttl_s_of
from octavo.text.structured import Structured

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ANSWERS = 128
MAX_BIASED_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_BREAKERS = 16
MAX_BREAKER_CHARACTERS = 40
REPETITION = (0.01, 100.0)
"""The least and the most that a repetition penalty may be; 1 is off."""
MAX_TENANT_CHARACTERS = 256
TARGET_S = (1e-3, 1e6)
"""The least and the most that a latency target may be, in seconds."""
MAX_SALT_CHARACTERS = 1024


LENGTH_PENALTY = (-10.0, 10.0)
"""The least and the most that the length penalty of a beam search may be."""
FOR_BEAMS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
FOR_DRAWS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "top_n_sigma",
    "typical_p",
    "xtc_probability",
    "structured",
    "stop",
)
NEUTRAL_FOR_BEAMS: Mapping[str, tuple[object, ...]] = {"temperature": (0.0,), "top_k": (-1,)}
"""What of these asks for nothing, besides the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to answer one prompt.

    `temperature` 0 takes the likeliest token. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. The
    same `seed` gives the same answer whoever else is served; None draws one. `max_tokens` None is
    the rest of the context. Before `min_tokens` tokens no end token and no stop string ends the
    answer. `ignore_eos` goes on past the model's own end. A lower `priority` goes first. `stop` may
    also be one text, and lists are taken for tuples. `n` answers are given to one prompt, each with
    draws of its own (greedy ones are equal); the prompt is computed once. `tenant` is on whose
    behalf it is asked; the policy fair is fair between tenants. The policy slo aims at the first
    token within `ttft_target_s` and the others within `tpot_target_s` each on average; None takes
    the targets of the engine. A request that has not ended `timeout_s` after its arrival is given
    up, wherever it is.

    `repetition_penalty` divides the logits above 0 of tokens that prompt or answer have, and
    multiplies the others; 1 is off. `presence_penalty` and `frequency_penalty` are taken from those
    that the answer has, once or each time. `logit_bias` is added to the logits of single token ids.
    `dry_multiplier` above 0 makes tokens less likely that would go on a sequence of at least
    `dry_allowed_length` tokens which stands in the last `dry_penalty_last_n` already (-1: in all),
    by `dry_multiplier` · `dry_base` ^ what is beyond that length; a sequence ends at
    `dry_sequence_breakers`. `top_n_sigma` keeps what is within so many standard deviations of the
    greatest logit, `typical_p` what is about as surprising as the mean. With `xtc_probability` all
    but the least of those that have `xtc_threshold` are left out.
    Only `allowed_token_ids` are drawn, if they are given: an end token must be among them to end
    the answer. None of the `bad_words` appears in it, neither at its start nor after a space.

    With `use_beam_search` the answers are the `n` best that a search of so many beams finds, see
    `core.request.Beams`; nothing is drawn, so that `temperature` and the filters have no place in
    it. `stop_token_ids` and the model's end tokens end an answer, `stop` strings cannot. Beams in
    `num_beam_groups` differ the more, the greater the `diversity_penalty` is.

    With `structured` the answer is JSON of a schema, matches a regular expression, or follows a
    grammar; it ends where that allows nothing more, even before `min_tokens`. See `Structured`.

    With `logprobs` each token of the answer comes with the log-probabilities of so many likeliest
    ones, -1 for all, at most as many as the setting `max_logprobs` allows; with `prompt_logprobs`
    each token of the prompt but the first does, and then nothing of it is taken from the cache.
    They are the model's, before anything above.

    With `cache` off the prompt is computed whole, and nothing of it is cached. Prompts of one
    `cache_salt` share their beginnings with each other only. `cache_control`, as
    `{"type": "ephemeral", "ttl": "5m"}` (or 1h), asks that the prompt stays cached for so long
    after its last use.

    Raises   InvalidRequest naming the field that is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured: Structured | None = field(default=None, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    n: int = 1
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    tenant: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    timeout_s: float | None = None
    cache: Literal["on", "off"] = "on"
    cache_salt: str | None = None
    cache_control: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _listed("stop", self.stop))
        object.__setattr__(
            self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids, text=False)
        )
        object.__setattr__(self, "bad_words", _listed("bad_words", self.bad_words))
        self._check_allowed()
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, *REPETITION)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_bias()
        self._check_dry()
        _in_range("top_n_sigma", self.top_n_sigma, -1.0, 1000.0)
        _in_range("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _in_range("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _in_range("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0)
        _integer("n", self.n, 1, MAX_ANSWERS)
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}",
                    param="min_tokens",
                )
        switches = "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"
        for name in (*switches, "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(
                    f"{name} must be true or false, not {getattr(self, name)!r}", param=name
                )
        for name in ("ttft_target_s", "tpot_target_s", "timeout_s"):
            if getattr(self, name) is not None:
                _in_range(name, getattr(self, name), *TARGET_S)
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_TENANT_CHARACTERS:
            raise InvalidRequest(
                f"tenant must be text of at most {MAX_TENANT_CHARACTERS} characters", param="tenant"
            )
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise InvalidRequest(
                f"structured must be a Structured, not {self.structured!r}", param="structured"
            )
        self._check_stops()
        self._check_cache()
        self._check_beams()

    def _check_beams(self) -> None:
        _in_range("length_penalty", self.length_penalty, *LENGTH_PENALTY)
        _integer("num_beam_groups", self.num_beam_groups, 1, MAX_ANSWERS)
        _in_range("diversity_penalty", self.diversity_penalty, 0.0, 100.0)
        early = self.early_stopping
        if not isinstance(early, bool) and early != "never":
            raise InvalidRequest(
                f'early_stopping must be true, false or "never", not {early!r}',
                param="early_stopping",
            )
        foreign = FOR_DRAWS if self.use_beam_search else FOR_BEAMS
        for name in foreign:
            neutral = _USUAL[name], *NEUTRAL_FOR_BEAMS.get(name, ())
            if getattr(self, name) not in neutral:
                why = "has no meaning with" if self.use_beam_search else "needs"
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)!r}: it {why} use_beam_search; leave it out",
                    param=name,
                )
        if self.n % self.num_beam_groups:
            raise InvalidRequest(
                f"num_beam_groups is {self.num_beam_groups}, which does not divide n, {self.n}",
                param="num_beam_groups",
            )
        if (self.num_beam_groups > 1) != (self.diversity_penalty > 0):
            raise InvalidRequest(
                f"diversity_penalty is {self.diversity_penalty:g} and num_beam_groups"
                f" {self.num_beam_groups}: several groups need a penalty, and it needs several",
                param="diversity_penalty",
            )

    def without_draws(self) -> "SamplingParams":
        """The same with nothing in it that has no meaning in a search, for defaults that its
        caller did not ask for."""
        return replace(self, **{name: _USUAL[name] for name in FOR_DRAWS})

    def beams(self) -> Beams | None:
        """What the core is to search for, if anything."""
        if not self.use_beam_search:
            return None
        return Beams(
            width=self.n,
            length_penalty=float(self.length_penalty),
            early_stopping="never" if self.early_stopping == "never" else bool(self.early_stopping),
            groups=self.num_beam_groups,
            diversity_penalty=float(self.diversity_penalty),
        )

    def but(self, **changes: object) -> "SamplingParams":
        """The same with other values of these fields: itself if they are no others, since checking
        all again takes a tenth of a millisecond.

        Raises   InvalidRequest.
        """
        if all(getattr(self, name) == value for name, value in changes.items()):
            return self
        return replace(self, **changes)  # type: ignore[arg-type]

    def _check_dry(self) -> None:
        _in_range("dry_multiplier", self.dry_multiplier, 0.0, 100.0)
        _in_range("dry_base", self.dry_base, 1.0, 100.0)
        _integer("dry_allowed_length", self.dry_allowed_length, 1, 2**31 - 1)
        _integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, 2**31 - 1)
        name = "dry_sequence_breakers"
        breakers = _listed(name, self.dry_sequence_breakers)
        object.__setattr__(self, name, breakers)
        if len(breakers) > MAX_BREAKERS:
            raise InvalidRequest(
                f"{name} holds {len(breakers)} texts, at most {MAX_BREAKERS} are allowed",
                param=name,
            )
        for text in breakers:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_BREAKER_CHARACTERS:
                raise InvalidRequest(
                    f"{name} must hold texts of 1 to {MAX_BREAKER_CHARACTERS} characters, not"
                    f" {text!r}",
                    param=name,
                )

    @property
    def dry_is_on(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is not None:
            listed = _listed("allowed_token_ids", self.allowed_token_ids, text=False)
            if not listed:
                raise InvalidRequest(
                    "allowed_token_ids is empty: nothing could be drawn; leave it out",
                    param="allowed_token_ids",
                )
            object.__setattr__(self, "allowed_token_ids", listed)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words holds {len(self.bad_words)} words, at most {MAX_BAD_WORDS} are allowed",
                param="bad_words",
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS:
                raise InvalidRequest(
                    f"bad_words must hold texts of 1 to {MAX_BAD_WORD_CHARACTERS} characters, not"
                    f" {word!r}",
                    param="bad_words",
                )

    def _check_bias(self) -> None:
        """Of keys that are text, as JSON has them, ids are made."""
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias must map token ids to numbers, not {self.logit_bias!r}",
                param="logit_bias",
            )
        if len(self.logit_bias) > MAX_BIASED_IDS:
            raise InvalidRequest(
                f"logit_bias holds {len(self.logit_bias)} ids, at most {MAX_BIASED_IDS} are"
                " allowed",
                param="logit_bias",
            )
        by_id = {_token_id("logit_bias", key): bias for key, bias in self.logit_bias.items()}
        for bias in by_id.values():
            _in_range("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", by_id)

    def _check_cache(self) -> None:
        if self.cache not in ("on", "off"):
            raise InvalidRequest(f"cache must be on or off, not {self.cache!r}", param="cache")
        salt = self.cache_salt
        if salt is not None and not (
            isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_CHARACTERS
        ):
            raise InvalidRequest(
                f"cache_salt must be text of 1 to {MAX_SALT_CHARACTERS} characters",
                param="cache_salt",
            )
        if self.cache_control is not None:
            ttl_s_of(self.cache_control, "cache_control")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop holds {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids, at most"
                f" {MAX_STOP_TOKEN_IDS} are allowed",
                param="stop_token_ids",
            )
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    f"a stop string must be text of 1 to {MAX_STOP_CHARACTERS} characters",
                    param="stop",
                )

    def sampling(
        self,
        *,
        seed: int,
        bad_words: tuple[tuple[int, ...], ...] = (),
        dry_breakers: tuple[tuple[int, ...], ...] = (),
    ) -> Sampling:
        """What the core and the sampler need; `seed` stands in when none was asked for,
        `bad_words` and `dry_breakers` are ours as token ids."""
        chosen = seed if self.seed is None else self.seed
        penalty = Penalty(
            repetition=float(self.repetition_penalty),
            presence=float(self.presence_penalty),
            frequency=float(self.frequency_penalty),
        )
        return Sampling(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=chosen % 2**64,
            penalty=None if penalty == Penalty() else penalty,
            logit_bias=tuple((token, float(bias)) for token, bias in self.logit_bias.items()),
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids or ())),
            bad_words=bad_words,
            dry=self._dry(dry_breakers),
            top_n_sigma=max(float(self.top_n_sigma), 0.0),
            typical_p=float(self.typical_p),
            # Above a half at most one token has it, and nothing is left out.
            xtc_probability=float(self.xtc_probability) if self.xtc_threshold <= 0.5 else 0.0,
            xtc_threshold=float(self.xtc_threshold),
            grammar=self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        """Tokens are forced if nobody asks for their log-probabilities, or might forbid them."""
        if self.structured is None:
            return None
        looked_at = self.logprobs is not None or self.allowed_token_ids or self.bad_words
        return Grammar(*self.structured.definition, forced=not looked_at)

    def _dry(self, breakers: tuple[tuple[int, ...], ...]) -> Dry | None:
        if not self.dry_is_on:
            return None
        return Dry(
            multiplier=float(self.dry_multiplier),
            base=float(self.dry_base),
            allowed_length=self.dry_allowed_length,
            window=None if self.dry_penalty_last_n < 0 else self.dry_penalty_last_n,
            breakers=breakers,
        )


_USUAL: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}


def _listed(name: str, value: object, *, text: bool = True) -> tuple[Any, ...]:
    """The items of a list, or of nothing; one text counts as a list of it where `text` is meant."""
    if isinstance(value, str) and text:
        return (value,)
    if value is not None and not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} must be a list, not {value!r}", param=name)
    return tuple(value or ())


def _token_id(name: str, key: object) -> int:
    """A token id that may have come as the key of a JSON object."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 11:
        return int(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    raise InvalidRequest(f"{name} holds {key!r}; token ids are integers", param=name)


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not numeric
        or not math.isfinite(value)
        or not low <= value <= high
        or (open_low and value == low)
    ):
        bracket = "(" if open_low else "["
        raise InvalidRequest(
            f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}", param=name
        )


def _integer(name: str, value: int, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidRequest(
            f"{name} must be an integer of at least {low}, not {value!r}", param=name
        )
    if high is not None and value > high:
        raise InvalidRequest(f"{name} must be at most {high}, not {value!r}", param=name)
