"""Matrix products with float32 accumulation, kept on the fast path of every platform."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dspark_jax.speculators_common.storage import runs_on_cpu


def matmul(x: Float[Array, "*axes in"], kernel: Float[Array, "in out"]) -> Float[Array, "*axes out"]:
    """`x @ kernel` in the dtype of the kernel, with a float32 result.

    XLA:CPU has a fast bfloat16 product for two rows or more and a float32 result; a lone row becomes a scalar loop eight times slower, over a
    converted copy of the kernel. So a lone row is doubled and the second one dropped.
    """
    x = x.astype(kernel.dtype)
    rows = int(np.prod(x.shape[:-1]))
    if rows == 1 and x.dtype == jnp.bfloat16 and runs_on_cpu():
        twice = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
        product = jnp.matmul(twice, kernel, preferred_element_type=jnp.float32)[:1]
        return product.reshape(*x.shape[:-1], kernel.shape[1])
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
