"""The recorded drafts of the families whose tests run on all of them."""

from __future__ import annotations

DEEPSPEC_VARIANTS = (  # folders of tests/data/A_deepspec_qwen3
    "vanilla",
    "gated",
    "rnn",
    "vanilla_plainconf",
    "rank0_plainconf",
    "rank0_noconf",
    "gated_attnbias",
    "vanilla_bf16disk",
)
GEMMA4_VARIANTS = ("keqv_softcap_vanilla", "sepv_nosoftcap_plainconf", "unified_keqv_softcap")  # of B_deepspec_gemma4
COMPACT_VARIANTS = ("markov", "rnn", "markov_sts")  # of H_compact
