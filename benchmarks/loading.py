"""The cost of loading a checkpoint: seconds, bytes per second, and memory beyond the final arrays.

A new process loads the checkpoint, and this one measures its anonymous memory. Mapped pages of files do not count,
because the kernel can drop them. Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dspark_jax.architectures.registry import retrieve
from dspark_jax.pipelines.checkpoints.loading import load_target

_SAMPLE_SECONDS = 0.002
_STATUS_FIELDS = ("RssAnon", "VmHWM")


def model_config(num_bytes: int, *, tied: bool) -> dict[str, Any]:
    """`config.json` of a Llama whose bfloat16 weights take about `num_bytes`, an eighth of them in the embedding."""
    hidden = 2048 if num_bytes > 500_000_000 else 512
    width, kv_width = 11 * hidden // 4, hidden // 4
    layer_bytes = 2 * (2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * width)
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": max(1, round(num_bytes * (7 if tied else 6) / 8 / layer_bytes)),
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": kv_width // 128,
        "head_dim": 128,
        "vocab_size": max(64, num_bytes // 8 // (2 * hidden)),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def write_checkpoint(directory: Path, config: dict[str, Any], *, shard_bytes: int) -> int:
    """Random bfloat16 weights in shards of about `shard_bytes` with their index; returns the bytes of all tensors."""
    entry = retrieve(config["architectures"][0])
    recipes = entry.recipes(entry.parse_config(config, "config.json", None), ())
    shapes = {name: shape for recipe in recipes.values() for name, shape in recipe.tensors.items()}
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    total = number = 0
    for index, (name, shape) in enumerate(shapes.items()):
        shard[name] = (
            (0.02 * rng.standard_normal(math.prod(shape), np.float32)).astype(ml_dtypes.bfloat16).reshape(shape)
        )
        if sum(tensor.nbytes for tensor in shard.values()) >= shard_bytes or index == len(shapes) - 1:
            file = f"model-{number:05}.safetensors"
            save_file(shard, directory / file)
            weight_map.update(dict.fromkeys(shard, file))
            total += sum(tensor.nbytes for tensor in shard.values())
            shard, number = {}, number + 1
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    return total


def load_and_tell(checkpoint: str, dtype: str) -> None:
    """The child: load, then print one JSON object for the process that watches."""
    jax.block_until_ready(jnp.zeros(8, dtype))  # the backend's own start is not loading
    base = memory_of("self")
    started = time.monotonic()
    target = load_target(checkpoint, dtype)
    arrays = jax.block_until_ready(jax.tree.leaves(nnx.state(target.module)))
    told: dict[str, Any] = {"started": started, "finished": time.monotonic(), "base": base, "after": memory_of("self")}
    told["backend"] = jax.default_backend()
    print(
        json.dumps(
            {
                **told,
                "array_bytes": sum(array.nbytes for array in arrays),
                "file_bytes": target.checkpoint.bytes_on_disk,
            }
        )
    )


def measure(checkpoint: str, dtype: str) -> tuple[dict[str, float], str]:
    """Load once in a new process and sample its memory from here, so that no lock of that process delays the samples.

    Returns the figures and the backend.
    """
    command = [sys.executable, __file__, "--load", checkpoint, "--dtype", dtype]
    samples = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            samples.append((time.monotonic(), memory_of(str(process.pid)).get("RssAnon", 0)))
            time.sleep(_SAMPLE_SECONDS)
        assert process.stdout is not None
        out = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"loading {checkpoint} failed with status {process.returncode}")
    told = json.loads(out)
    peak = max(
        [
            told["after"]["RssAnon"],
            *(anonymous for moment, anonymous in samples if told["started"] <= moment <= told["finished"]),
        ]
    )
    seconds = told["finished"] - told["started"]
    figures = {
        "seconds": seconds,
        "gigabytes_per_second": told["file_bytes"] / 1e9 / seconds,
        "array_bytes": told["array_bytes"],
        "file_bytes": told["file_bytes"],
        "peak_ratio": (peak - told["base"]["RssAnon"]) / told["array_bytes"],
        "peak_ratio_with_file_pages": (told["after"]["VmHWM"] - told["base"]["VmHWM"]) / told["array_bytes"],
    }
    return figures, told["backend"]


def memory_of(process: str) -> dict[str, int]:
    """Bytes of anonymous memory now and of all resident memory at its highest; empty for a process that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in _STATUS_FIELDS if name in fields}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the synthetic checkpoint (1)")
    parser.add_argument("--shard-gigabytes", type=float, default=0.25, help="size of its shards (0.25)")
    parser.add_argument("--untied", action="store_true", help="with a head of its own")
    parser.add_argument("--checkpoint", help="load this directory, .gguf file or smollm2 instead")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the loaded arrays (bfloat16)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="loads, a process each; medians are printed (3)")
    parser.add_argument("--load", metavar="CHECKPOINT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        load_and_tell(args.load, args.dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or folder
        if not args.checkpoint:
            config = model_config(int(args.gigabytes * 1e9), tied=not args.untied)
            write_checkpoint(Path(folder), config, shard_bytes=int(args.shard_gigabytes * 1e9))
        runs = [measure(checkpoint, args.dtype) for _ in range(args.repeats)]
    median = {name: statistics.median(figures[name] for figures, _ in runs) for name in runs[0][0]}
    print(
        f"files {median['file_bytes'] / 1e9:.2f} GB, arrays {median['array_bytes'] / 1e9:.2f} GB, {args.dtype}, "
        f"{runs[0][1]}"
    )
    print(f"load {median['seconds']:.2f} s, {median['gigabytes_per_second']:.2f} GB/s of files")
    print(
        f"peak anonymous memory {median['peak_ratio']:.2f} x the arrays (allowed 2), with mapped files "
        f"{median['peak_ratio_with_file_pages']:.2f} x"
    )


if __name__ == "__main__":
    main()
