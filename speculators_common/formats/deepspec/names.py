"""What marks a file of DeepSpec: the name in `architectures`, one for each style of layers, and fields of drafts."""

from __future__ import annotations

QWEN3_ARCHITECTURE, QWEN3_FAMILY = "Qwen3DSparkModel", "deepspec_qwen3"
GEMMA4_ARCHITECTURE, GEMMA4_FAMILY = "Gemma4DSparkModel", "deepspec_gemma4"
DRAFT_FIELDS = ("dspark_config", "dflash_config", "target_layer_ids", "mask_token_id", "markov_rank")
