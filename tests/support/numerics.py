"""The one place that says how close is close enough.

A result is judged against the exact one (computed in float64) and against its *twin*: what plain PyTorch, or the unpatched
model, gives in the same dtype. The budget is data-derived: no literal tolerances anywhere else in the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """‖actual − exact‖ / ‖exact‖ in float64; ‖actual‖ where ``exact`` is all zero. NaN or inf in ``actual`` gives inf."""
    exact = exact.detach().double()
    actual = actual.detach().to(exact)
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)} against {tuple(exact.shape)}"
    if not actual.numel():
        return 0.0
    difference, size = (actual - exact).norm(), exact.norm()
    error = float(difference / size) if size > 0 else float(difference)
    return error if error == error else float("inf")


def budget(twin_error: float, dtype: torch.dtype) -> float:
    """The error a result of ``dtype`` may have when plain PyTorch in that dtype has ``twin_error``.

    float32 and float64: both are exact up to the order of summation, which differs; so twice the twin's error plus
    sixteen units of rounding (a result that is a sum of a few numbers has an error of that order by luck, or none).
    float16 and bfloat16: no more than the twin's, plus a sixteenth of a unit of rounding for the same luck.
    """
    unit = torch.finfo(dtype).eps
    return twin_error + unit / 16 if dtype in (torch.float16, torch.bfloat16) else 2 * twin_error + 16 * unit


def exponent_rounding(largest_logit: float) -> float:
    """The relative error of a probability that is recomputed as exp(logit - logsumexp) from both in float32.

    Full logits subtract the largest logit first, which is exact; it shows where logits are beyond a thousand.
    """
    return 2 * torch.finfo(torch.float32).eps * largest_logit


def as_good(actual: Tensor, twins: list[Tensor], exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``actual`` is as close to ``exact`` as ``budget`` allows for the worst of ``twins``."""
    return relative_error(actual, exact) <= budget(max(relative_error(twin, exact) for twin in twins), dtype)


def assert_as_good(
    actual: Tensor, twin: Tensor | list[Tensor], exact: Tensor, what: str, dtype: torch.dtype | None = None
) -> None:
    """Fail unless ``actual`` is as close to ``exact`` as ``budget`` allows; ``dtype`` is that of the computation.

    ``twin``: of several, which round differently, the worst counts.
    """
    twins, dtype = twin if isinstance(twin, list) else [twin], dtype or actual.dtype
    error, allowed = relative_error(actual, exact), budget(max(relative_error(each, exact) for each in twins), dtype)
    assert error <= allowed, f"{what}: relative error {error:.2e} exceeds {allowed:.2e}"
