"""Tokenizers as their tokenizer.json says, and their identity."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packing.errors import InputError, TemplateError, one_line
from packing.hub import local_only

_NO_TOKENIZER = "the folder {} holds no tokenizer (no tokenizer.json, and no vocabulary to make one of)"

# Text on which two tokenizers of one name differ if they differ at all: spaces, newlines, digits, case,
# contractions, punctuation, accents composed and not, scripts, emoji, code.
PROBES = (
    "Hello world, it's 12345 o'clock - isn't it?  Two  spaces,\ttabs\nand\n\nlines \n",
    "def f(x):\n    return {'a': [1, 2.50], \"b\": x**2 != 3}  # ok\r\n",
    "naïve nai\u0308ve Ünïcode ﬁ ½ № ＡＢＣ１２ İstanbul straße ΑΒΓ абв",
    "中文字符，测试。日本語のテスト 한국어 עברית العربية हिन्दी ไทย",
    "👩‍👩‍👧 🏳️‍🌈 é́ \u200b\u00a0\u3000 ∑∫√ <b>&amp;</b> http://a.b/c?d=e_f#g",
)


def load_tokenizer(name_or_path: str, *, revision: str | None = None) -> Any:
    """A fast tokenizer whose ids are those of its tokenizer.json.

    Args:
        name_or_path: A folder, or a name on the hub.
        revision: A commit, branch or tag of the hub's repository.

    Raises:
        InputError: not found, not readable, or without a fast implementation.
        TemplateError: what loads gives other ids than the tokenizer.json beside it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    if os.path.isfile(name_or_path):
        raise InputError(f"the tokenizer {name_or_path} is a file: give the folder that holds it")
    local = local_only(
        name_or_path,
        *("tokenizer.json", "tokenizer_config.json", "config.json"),
        called="the tokenizer ",
        kind="folder",
        revision=revision,
    )
    unmade = os.path.isdir(name_or_path) and not Path(name_or_path, "tokenizer.json").exists()

    def load(kind: Any) -> Any:
        try:
            return kind.from_pretrained(name_or_path, revision=revision, local_files_only=local)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            if unmade:
                raise InputError(_NO_TOKENIZER.format(name_or_path)) from error
            where = "in tokenizer.json or another file " if isinstance(error, KeyError) else ""
            raise InputError(
                f"the tokenizer {name_or_path} can't be loaded: {where}{one_line(error)}"
            ) from error

    reference = None  # where it is made from another format, there is none to compare with
    with contextlib.suppress(OSError):
        file = cached_file(name_or_path, "tokenizer.json", revision=revision, local_files_only=local)
        reference = _read(str(file))
    tokenizer = load(AutoTokenizer)
    if unmade and not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise InputError(_NO_TOKENIZER.format(name_or_path))  # made of a model's config.json alone
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer {name_or_path} has no fast implementation (no tokenizer.json): "
            "convert it with transformers' convert_slow_tokenizer, or choose another"
        )
    if reference is not None and difference(tokenizer, reference):
        # Some classes are built anew from the vocabulary, with a pattern of their own: Qwen2Tokenizer knows
        # one alone, and transformers 5.17 takes deepseek_v3 for a Llama and loses every space.
        tokenizer = load(PreTrainedTokenizerFast)
        if odd := difference(tokenizer, reference):
            raise TemplateError(
                f"the tokenizer {name_or_path} loads with other ids than its tokenizer.json gives ({odd}): "
                "make the files beside it agree with it; another transformers may read it as the file says"
            )
    if lost := _lost(tokenizer):
        raise TemplateError(
            f"the tokenizer {name_or_path} gives no token for {lost!r}: its tokenizer.json lacks what makes "
            "every text tokens (a byte-level pre-tokenizer, byte fallback or an unknown token); get it again"
        )
    return tokenizer


def _lost(tokenizer: Any) -> str:
    """The letters of a few scripts that no token covers, which leave a text without a trace."""
    text = "Hello wörld, Ελλάδα, 你好 🙂"
    covered: set[int] = set()
    for start, end in plain_backend(tokenizer).encode(text, add_special_tokens=False).offsets:
        covered.update(range(start, end))
    return "".join(letter for n, letter in enumerate(text) if n not in covered and not letter.isspace())


def _read(file: str) -> Any:
    """A tokenizer.json as `tokenizers` itself reads it.

    Raises:
        InputError: damaged, or without a part that it needs.
    """
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the library raises no other type
        raise InputError(f"{file} is no whole tokenizer: {one_line(error)}; get it again") from error


def difference(tokenizer: Any, reference: Any) -> str:
    """What gives other ids than the reference does, without special tokens around a text; "" if nothing.

    Parts are compared as they are written, since no text shows every difference of two patterns. Tokens that
    tokenizer_config.json adds are none: the file can't know of them.
    """
    backend = plain_backend(tokenizer)
    for part in ("normalizer", "pre_tokenizer"):
        if _steps(getattr(backend, part)) != _steps(getattr(reference, part)):
            return f"its {part}"
    added = backend.get_added_tokens_decoder()
    for n, token in reference.get_added_tokens_decoder().items():
        if n not in added or _flags(added[n]) != _flags(token):
            return f"its added token {token.content!r}"
    if not _same_model(tokenizer, reference.model):
        return "its model"
    reference.no_padding()
    reference.no_truncation()
    for text in PROBES:
        ids = (side.encode(text, add_special_tokens=False).ids for side in (backend, reference))
        if next(ids) != next(ids):
            return f"for {text[:20]!r}"
    return ""


def _steps(part: Any) -> Any:
    """What a normalizer or pre-tokenizer does to a text; how it counts places changes no id."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps = state.get("normalizers", state.get("pretokenizers", [state]))
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def _flags(token: Any) -> tuple[Any, ...]:
    """All of an added token that changes ids."""
    return token.content, token.lstrip, token.rstrip, token.single_word, token.normalized


def _same_model(tokenizer: Any, reference: Any) -> bool:
    """Whether vocabulary, merges and settings are those of the file, from which the plain class has them.

    For the others they are written out, which takes 0.15 s for 150,000 tokens.
    """
    from transformers import PreTrainedTokenizerFast

    if type(tokenizer) is PreTrainedTokenizerFast:
        return True
    return bool(tokenizer.backend_tokenizer.model.__getstate__() == reference.__getstate__())


def plain_backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside, as `apply_chat_template` uses it.

    A call may have left padding and truncation in it.
    """
    backend = tokenizer.backend_tokenizer
    if backend.padding is not None:
        backend.no_padding()
    if backend.truncation is not None:
        backend.no_truncation()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def tokenizer_json(tokenizer: Any) -> str:
    """All that defines the ids. Padding and truncation do not: a call changes them."""
    text: str = plain_backend(tokenizer).to_str()
    return text


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of its `tokenizer_json`, as it stands: to sort it would take ten times as long."""
    return digest_of(tokenizer_json(tokenizer))


def digest_of(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts, longest first; without texts it never matches."""
    longest_first = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
