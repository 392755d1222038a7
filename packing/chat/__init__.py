"""Messages to examples through the tokenizer's own chat template: what is trained is what should be.

messages -> in the template's dialect (`dialect`) -> rendered, with a place for each (`template`) -> trained
spans, found and checked by what probes showed of the template (`probes`, `calibrate`, `spans`) -> ids and
labels (`encode`, `ids`), by tiktoken (`bpe`, built from `recipe`) where that is shown to be equal (`proof`).
No text may spell a control token (`control`). `audit` asks a template what decides whether training on it is
right; `tokenizer` loads.
"""

from packing.chat.audit import Audit, Finding, audit
from packing.chat.encode import ENCODING_VERSION, ChatEncoder, ChatOptions, EncodersDiffer, encode_chat
from packing.chat.tokenizer import load_tokenizer, tokenizer_digest

__all__ = [
    "ENCODING_VERSION",
    "Audit",
    "ChatEncoder",
    "ChatOptions",
    "EncodersDiffer",
    "Finding",
    "audit",
    "encode_chat",
    "load_tokenizer",
    "tokenizer_digest",
]
