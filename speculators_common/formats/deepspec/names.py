"""Names of the DeepSpec format: one architecture and family per layer style, and fields that only a draft states."""

from __future__ import annotations

QWEN3_ARCHITECTURE, QWEN3_FAMILY = "Qwen3DSparkModel", "deepspec_qwen3"
GEMMA4_ARCHITECTURE, GEMMA4_FAMILY = "Gemma4DSparkModel", "deepspec_gemma4"
DRAFT_FIELDS = ("dspark_config", "dflash_config", "target_layer_ids", "mask_token_id", "markov_rank")
