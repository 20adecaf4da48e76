"""The largest numbers that a config may state.

The limits are far above every published model. They are low enough that no size, index or product of sizes overflows,
and that a list with one entry per layer, slot or expert is built quickly. A file that states a larger number is wrong.
It is refused with the name of the field, before it can exhaust the memory.
"""

from __future__ import annotations

INT32_MAX = 2**31 - 1  # token ids, positions and indices are int32 in every compiled program
MAX_SIZE = 2**24  # width of a hidden state, a head or a feed-forward layer, number of heads
MAX_LAYERS = 1024
MAX_EXPERTS = 2**16
MAX_BLOCK_SIZE = 256  # every slot of a block is unrolled when a program is traced
# The largest and the smallest positive normal float32. In a compiled program, larger numbers become infinite and
# smaller ones become zero.
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38
