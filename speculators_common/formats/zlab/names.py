"""Names of the z-lab format. The speculators library uses the same architecture name."""

from __future__ import annotations

ARCHITECTURE, FAMILY = "DFlashDraftModel", "zlab_dflash"
DRAFT_FIELDS = ("dflash_config", "target_layer_ids", "mask_token_id")
