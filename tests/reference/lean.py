"""The Lean definitions once more, coordinate by coordinate, in Python's own numbers.

Written from `TheFormalEra/Ops/*.lean`, line for line and under its names. A function of indices is a list of
lists; a row index of any type is its first axis. No tensor, no broadcasting, nothing of `gemloupe`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Visible = Callable[[int], bool]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def silu(x: float) -> float:
    return x * sigmoid(x)


def geluTanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def softcap(c: float, x: float) -> float:
    return c * math.tanh(x / c)


def softmax(s: list[float], visible: Visible) -> list[float]:
    total = sum(math.exp(s[m]) for m in range(len(s)) if visible(m))
    return [math.exp(s[i]) / total if visible(i) else 0.0 for i in range(len(s))]


def _gqa(scale: float, q: Any, k: Any, v: Any, sees: Callable[[int, int], bool]) -> Any:
    def out(s: int, c: int, g: int, d: int) -> float:
        logit = [scale * sum(q[s][c][g][e] * k[i][c][e] for e in range(len(k[i][c]))) for i in range(len(k))]
        pattern = softmax(logit, lambda i: sees(s, i))
        return sum(pattern[i] * v[i][c][d] for i in range(len(k)))

    return [
        [
            [[out(s, c, g, d) for d in range(len(v[0][c]))] for g in range(len(q[s][c]))]
            for c in range(len(q[s]))
        ]
        for s in range(len(q))
    ]


def causalGQA(scale: float, pos: list[int], q: Any, k: Any, v: Any) -> Any:
    return _gqa(scale, q, k, v, lambda s, i: i <= pos[s])


def slidingGQA(scale: float, window: int, pos: list[int], q: Any, k: Any, v: Any) -> Any:
    return _gqa(scale, q, k, v, lambda s, i: i <= pos[s] and pos[s] < i + window)


def decodeGQA(scale: float, q: Any, k: Any, v: Any) -> Any:
    return causalGQA(scale, [len(k) - 1], [q], k, v)[0]


def sigmoidGate(o: Any, gate: Any) -> Any:
    return [[o[t][i] * sigmoid(gate[t][i]) for i in range(len(o[t]))] for t in range(len(o))]


def linear(w: Any, x: Any) -> Any:
    return [[sum(row[k] * w[n][k] for k in range(len(row))) for n in range(len(w))] for row in x]


def gateUp(wg: Any, wu: Any, x: Any) -> Any:
    size = len(wg)
    gate, up = linear(wg, x), linear(wu, x)
    return [[gate[t][n] if n < size else up[t][n - size] for n in range(2 * size)] for t in range(len(x))]


def siluMul(gu: Any) -> Any:
    return [[silu(row[i]) * row[len(row) // 2 + i] for i in range(len(row) // 2)] for row in gu]


def geluMul(gu: Any) -> Any:
    return [[geluTanh(row[i]) * row[len(row) // 2 + i] for i in range(len(row) // 2)] for row in gu]


def residual(r: float, x: Any, h: Any) -> Any:
    return [[x[t][i] + r * h[t][i] for i in range(len(x[t]))] for t in range(len(x))]


def embed(c: float, e: Any, tokens: list[int]) -> Any:
    return [[c * number for number in e[token]] for token in tokens]


def lmHead(mul: float, cap: float | None, w: Any, x: Any) -> Any:
    return [[mul * y if cap is None else softcap(cap, mul * y) for y in row] for row in linear(w, x)]


def rms(eps: float, x: list[float]) -> float:
    return math.sqrt(sum(number**2 for number in x) / len(x) + eps)


def rmsnorm(eps: float, x: Any, w: list[float]) -> Any:
    return [[row[h] / rms(eps, row) * w[h] for h in range(len(row))] for row in x]


def rmsnormOffset(eps: float, x: Any, w: list[float]) -> Any:
    return [[row[h] / rms(eps, row) * (1 + w[h]) for h in range(len(row))] for row in x]


def rmsnormUnit(eps: float, x: Any) -> Any:
    return [[number / rms(eps, row) for number in row] for row in x]


def rmsnormGated(eps: float, x: Any, z: Any, w: list[float]) -> Any:
    return [
        [w[h] * (x[t][h] / rms(eps, x[t])) * silu(z[t][h]) for h in range(len(x[t]))] for t in range(len(x))
    ]


def l2norm(eps: float, x: Any) -> Any:
    return [[number / math.sqrt(sum(n**2 for n in row) + eps) for number in row] for row in x]


def invFreq(theta: float, denom: int, active: int, i: int) -> float:
    return theta ** (-(2 * i / denom)) if i < active else 0.0


def rope(theta: float, rot: int, denom: int, active: int, pos: list[int], x: Any) -> Any:
    half = rot // 2

    def turned(t: int, d: int) -> float:
        row = x[t]
        if d < half:
            a = pos[t] * invFreq(theta, denom, active, d)
            partner = row[d + half] if d + half < len(row) else 0.0
            return row[d] * math.cos(a) - partner * math.sin(a)
        if d < 2 * half:
            a = pos[t] * invFreq(theta, denom, active, d - half)
            return row[d] * math.cos(a) + row[d - half] * math.sin(a)
        return row[d]

    return [[turned(t, d) for d in range(len(x[t]))] for t in range(len(x))]


def ropeStd(theta: float, rot: int, pos: list[int], x: Any) -> Any:
    return rope(theta, rot, rot, rot // 2, pos, x)
