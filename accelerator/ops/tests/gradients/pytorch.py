#!/usr/bin/env python3
"""Writes outputs and gradients of PyTorch's functions in f64, as reference values for the tests.

    python3 accelerator/ops/tests/gradients/pytorch.py > accelerator/ops/tests/gradients/pytorch.json    # PyTorch 2.15
"""

import json
import math

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)


def numbers(shape, seed):
    """Returns the same numbers as `numbers` in the tests."""
    mask = (1 << 64) - 1
    state = (seed * 0x9E3779B97F4A7C15) & mask | 1
    values = []
    for _ in range(math.prod(shape)):
        state = (state * 6364136223846793005 + 1442695040888963407) & mask
        values.append((state >> 40) / (1 << 23) - 1.0)
    return torch.tensor(values).reshape(shape)


def attention(mask=None):
    def run(query, key, value):
        query, key, value = (x.unflatten(2, (2, 4)).transpose(1, 2) for x in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return context.transpose(1, 2).flatten(2)

    return run


qkv = [[2, 5, 8], [2, 7, 8], [2, 7, 8]]
# In PyTorch, True marks a pair that takes part in attention.
padding = numbers([2, 7], 40) <= 0.4
pairs = numbers([2, 5, 7], 41) <= 0.4
pairs[:, :, 0] = padding[:, 0] = True

CASES = {
    "gelu": ([[5, 9]], lambda x: F.gelu(x * 6)),
    "gelu_approximate": ([[5, 9]], lambda x: F.gelu(x * 6, approximate="tanh")),
    "silu": ([[5, 9]], lambda x: F.silu(x * 6)),
    "layer_norm": ([[5, 12], [12], [12]], lambda x, w, b: F.layer_norm(x, [12], w, b, 1e-5)),
    "rms_norm": ([[5, 12], [12]], lambda x, w: F.rms_norm(x, [12], w, 1e-5)),
    "batch_norm": ([[4, 3, 6], [3], [3]], lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5)),
    "cross_entropy": ([[6, 5]], lambda x: F.cross_entropy(x * 9, torch.arange(6) * 3 % 5).reshape(1)),
    "embedding": ([[6, 5]], lambda x: F.embedding(torch.arange(8).reshape(2, 4) * 5 % 6, x)),
    "avg_pool2d": ([[2, 3, 7, 8]], lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 1))),
    "avg_pool2d_without_padding": ([[2, 3, 7, 8]], lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "max_pool2d": ([[2, 3, 7, 8]], lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 1))),
    "conv2d": ([[2, 4, 7, 8], [6, 2, 3, 2], [6]], lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 2), (1, 2), 2)),
    "attention": (qkv, attention()),
    "attention_with_padding": (qkv, attention(padding[:, None, None])),
    "attention_with_pairs": (qkv, attention(pairs[:, None])),
}

results = {}
for name, (shapes, function) in CASES.items():
    inputs = [numbers(shape, seed).requires_grad_() for seed, shape in enumerate(shapes, 1)]
    output = function(*inputs)
    (output * numbers(output.shape, 99)).sum().backward()
    results[name] = [x.flatten().tolist() for x in [output.detach(), *(x.grad for x in inputs)]]
print("{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items()) + "}")
