"""What marks a file of z-lab: the name in `architectures`, which the speculators library uses too, and fields of
drafts.
"""

from __future__ import annotations

ARCHITECTURE, FAMILY = "DFlashDraftModel", "zlab_dflash"
DRAFT_FIELDS = ("dflash_config", "target_layer_ids", "mask_token_id")
