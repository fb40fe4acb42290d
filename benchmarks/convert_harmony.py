"""Harmony's measurements (harmony_1080ti.json) into the built-in profiles of `counterpoint/planner/data`.

    python benchmarks/convert_harmony.py harmony_1080ti.json counterpoint/planner/data

Times: forward as measured; backward less the forward that it repeats; update was measured on the host, the device's is
28 bytes per parameter at 484 GB/s. Bytes: a backward's peak less its weights, its input, its output's gradient, and the
gradients of its weights that are there at the peak (what a line through the peaks at sizes 1 and 2 leaves at size 0,
less the weights) is what it holds of its own: two thirds of it are taken as saved by autograd, which is what counting a
block gives, the rest as transient. A forward's peak less weights, input and output is its transient part. Values are
the layers' inputs less BERT's mask (2 KiB a sample), which is a batch input.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoint.core.files import to_json
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost

MODELS = {
    "bert_96": ("bert96-1080ti", "bert96_1080ti", 512, 2048),
    "gpt2_xl": ("gpt2-xl-1080ti", "gpt2_xl_1080ti", 1024, 0),
}
DEVICE_MEMORY_BYTES_PER_S = 484 * 10**9
UPDATE_BYTES_PER_WEIGHT_BYTE = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="harmony_1080ti.json")
    parser.add_argument("folder", type=Path, help="where the profiles go")
    arguments = parser.parse_args()
    models = json.loads(arguments.source.read_text())["models"]
    for key, (name, file, tokens, mask_bytes) in MODELS.items():
        profile = converted(name, models[key]["layers"], tokens, mask_bytes)
        text = json.dumps(to_json(profile), separators=(",", ":"))
        (arguments.folder / f"{file}.json").write_text(text.replace(',{"name"', ',\n{"name"') + "\n")


def converted(name: str, layers: list[dict[str, Any]], tokens: int, mask_bytes: int) -> Profile:
    def input_bytes(layer: int, size: int) -> int:
        if layer == len(layers):
            return 0
        row = layers[layer]
        masked = mask_bytes and row["input_bytes_1"] % 4096 == mask_bytes
        known = row.get(f"input_bytes_{size}", row["input_bytes_1"] * size)
        return int(known) - (mask_bytes * size if masked else 0)

    costs = tuple(_cost(row, index, input_bytes) for index, row in enumerate(layers))
    values = tuple(ValueCost(i, (i + 1,), Curve.proportional(input_bytes(i + 1, 1))) for i in range(len(layers) - 1))
    return Profile(name, costs, values, tokens)


def _cost(row: dict[str, Any], layer: int, input_bytes: Callable[[int, int], int]) -> LayerCost:
    forward = {size: row[f"forward_s_{size}"] for size in _sizes(row, "forward_s")}
    backward = {size: row[f"backward_with_recompute_s_{size}"] for size in _sizes(row, "backward_with_recompute_s")}
    weight, constant = row["weight_bytes"], row["buffer_bytes"]
    fixed = 2 * row["backward_peak_bytes_1"] - row["backward_peak_bytes_2"]
    at_peak = min(max(fixed, weight + constant), 2 * weight + constant)

    def held(size: int) -> int:
        peak = row[f"backward_peak_bytes_{size}"]
        return max(0, peak - at_peak - input_bytes(layer, size) - input_bytes(layer + 1, size))

    def transient(size: int) -> int:
        peak = row[f"forward_peak_bytes_{size}"]
        return max(0, peak - weight - constant - input_bytes(layer, size) - input_bytes(layer + 1, size))

    return LayerCost(
        name=f"layer {layer}",
        forward_ns=Curve(tuple((size, round(time * 10**9)) for size, time in forward.items())),
        backward_ns=Curve(tuple((s, max(0, round((t - forward[s]) * 10**9))) for s, t in backward.items())),
        update_ns=weight * UPDATE_BYTES_PER_WEIGHT_BYTE * 10**9 // DEVICE_MEMORY_BYTES_PER_S,
        host_update_ns=round(row["update_s"] * 10**9),
        weight_bytes=weight,
        grad_bytes=weight,
        state_bytes=row["state_bytes"],
        constant_bytes=constant,
        saved_bytes=Curve(tuple((size, held(size) * 2 // 3) for size in backward)),
        forward_workspace_bytes=Curve(tuple((size, transient(size)) for size in forward)),
        backward_workspace_bytes=Curve(tuple((size, held(size) - held(size) * 2 // 3) for size in backward)),
    )


def _sizes(row: dict[str, Any], prefix: str) -> list[int]:
    return sorted(int(key.rsplit("_", 1)[1]) for key in row if key.rsplit("_", 1)[0] == prefix)


if __name__ == "__main__":
    main()
