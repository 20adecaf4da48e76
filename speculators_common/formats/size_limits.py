"""How large the numbers of a config may be: far beyond every published model, and small enough that no size, index or
product of sizes overflows and that a table with an entry for each layer, slot or expert is quickly made.

A file that states more is wrong; refusing it by name beats running out of memory.
"""

from __future__ import annotations

INT32_MAX = 2**31 - 1  # token ids, positions and indices are int32 in every compiled program
MAX_SIZE = 2**24  # width of a hidden state, a head or a feed-forward layer, number of heads
MAX_LAYERS = 1024
MAX_EXPERTS = 2**16
MAX_BLOCK_SIZE = 256  # every slot of a block is unrolled when a program is traced
# Normal float32 numbers: larger and smaller ones would become infinite and zero in a compiled program.
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38
