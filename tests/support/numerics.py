"""The accuracy rule of all tests.

A result is compared with the exact one (computed in float64) and with its *baseline*: the result of plain PyTorch, or of the
unpatched model, in the same dtype. The budget follows from the baseline's error, not from a literal tolerance; only a few
tests, such as those that compare whole training runs, set their own tolerance.
"""

from typing import Any

import torch
from torch import Tensor


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return ‖actual − exact‖ / ‖exact‖ in float64, or ‖actual‖ if ``exact`` is all zero; inf if ``actual`` has NaN or inf."""
    exact = exact.detach().double()
    actual = actual.detach().to(exact)
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)} against {tuple(exact.shape)}"
    if not actual.numel():
        return 0.0
    difference, size = (actual - exact).norm(), exact.norm()
    error = float(difference / size) if size > 0 else float(difference)
    return error if error == error else float("inf")


def budget(baseline_error: float, dtype: torch.dtype) -> float:
    """Return the error allowed for a result of ``dtype`` if plain PyTorch in that dtype has ``baseline_error``.

    float32 and float64: the two results differ only in the order of summation. Allow twice the baseline's error plus sixteen
    units of rounding, because a sum of a few numbers may happen to have no error at all.
    float16 and bfloat16: the baseline's error plus a sixteenth of a unit of rounding, for the same reason.
    """
    unit = torch.finfo(dtype).eps
    return baseline_error + unit / 16 if dtype in (torch.float16, torch.bfloat16) else 2 * baseline_error + 16 * unit


def exponent_rounding(largest_logit: float) -> float:
    """Return the relative error of a probability recomputed as exp(logit - logsumexp), both in float32.

    Full logits first subtract the largest logit, which is exact. The difference matters for logits beyond a thousand.
    """
    return 2 * torch.finfo(torch.float32).eps * largest_logit


def is_accurate(actual: Tensor, baselines: list[Tensor], exact: Tensor, dtype: torch.dtype) -> bool:
    """Return True if ``actual`` is as close to ``exact`` as ``budget`` allows for the worst of ``baselines``."""
    return relative_error(actual, exact) <= budget(max(relative_error(x, exact) for x in baselines), dtype)


def assert_accurate(
    actual: Tensor, baseline: Tensor | list[Tensor], exact: Tensor, what: str, dtype: torch.dtype | None = None
) -> None:
    """Fail unless ``actual`` is as close to ``exact`` as ``budget`` allows; ``dtype`` is that of the computation.

    If ``baseline`` is a list of results that round differently, the worst one counts.
    """
    baselines, dtype = baseline if isinstance(baseline, list) else [baseline], dtype or actual.dtype
    error, allowed = relative_error(actual, exact), budget(max(relative_error(x, exact) for x in baselines), dtype)
    assert error <= allowed, f"{what}: relative error {error:.2e} exceeds {allowed:.2e}"


def assert_all_accurate(
    actual: Any, baseline: Any, exact: Any, what: str = "", dtype: torch.dtype | None = None
) -> None:
    """Run ``assert_accurate`` for each tensor of three sequences of equal length, or of three dictionaries, by name."""
    if isinstance(actual, dict):
        assert actual.keys() == baseline.keys() <= exact.keys()
    else:
        assert len(actual) == len(baseline) == len(exact)
    for key in actual if isinstance(actual, dict) else range(len(actual)):
        assert_accurate(actual[key], baseline[key], exact[key], f"{what} {key}", dtype)
