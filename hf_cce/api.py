"""``apply_cce`` and ``remove_cce``: find the causal LM inside its wrappers, and patch it or raise."""

from __future__ import annotations

import functools
import logging
import os
from importlib.metadata import version
from typing import Any, TypeVar

from torch import nn

from hf_cce.config import CCEConfig
from hf_cce.families import class_names, families
from hf_cce.patches.causal_lm import Patch, patch, unpatch
from hf_cce.patches.classes import patch_class, unpatch_class
from hf_cce.patches.others import why_other
from hf_cce.patches.refused import why_refuse, why_refuse_class

Target = TypeVar("Target")
DISABLE = "HF_CCE_DISABLE"
_warn_once = functools.cache(logging.getLogger(__name__).warning)


def apply_cce(model: Target, config: CCEConfig | None = None, **options: Any) -> Target:
    """Patch a model so that training computes its loss without materializing logits.

    The loss is unchanged up to rounding. In bfloat16 on an NVIDIA GPU the gradients have the error of the gradient filter, which
    ``gradient_filter=None`` disables. Evaluation without labels and generation run the model's own code.

    Args:
        model: a causal LM of Transformers, bare or inside PEFT, DDP, FSDP, DeepSpeed, accelerate or ``torch.compile``. Or a
            class such as ``LlamaForCausalLM``, or a model type such as ``"llama"``, to patch all instances created later.
        config: options of the loss. Patching again changes them.
        **options: individual options of ``CCEConfig``, which override those of ``config``.

    Returns:
        ``model``, the same object, whose causal LM has a new method ``cce_stats()``. With ``HF_CCE_DISABLE=1`` in the
        environment nothing is patched, and the counters stay at 0.

    Raises:
        TypeError: an option does not exist, or ``config`` is not a ``CCEConfig``.
        ValueError: an option has an invalid value, or the model is not supported. The message says why; nothing is patched.
        RuntimeError: Transformers is older than 5.0.
    """
    config = CCEConfig.of(config, **options)
    _check_version()
    if os.environ.get(DISABLE, "") not in ("", "0"):
        _warn_once("hf_cce is disabled by %s=%s: no model is patched", DISABLE, os.environ[DISABLE])
        if not isinstance(model, (str, type)):
            causal_lm(model).cce_stats = functools.partial(dict.fromkeys, vars(Patch(config).stats), 0)  # type: ignore[assignment]
        return model
    if isinstance(model, (str, type)):
        cls = _class_of(model)
        _refuse(cls, why_refuse_class(cls) or why_other(cls))
        patch_class(cls, config)
    else:
        base = causal_lm(model)
        _refuse(type(base), why_refuse(base) or why_other(base))
        patch(base, config, model)  # type: ignore[arg-type]
    return model


def remove_cce(model: Target) -> Target:
    """Restore a model, class or model type that ``apply_cce`` patched.

    For a class or a model type, instances created later are not patched; existing instances stay patched. Without a patch,
    nothing happens.

    Returns:
        ``model``, the same object.
    """
    if isinstance(model, (str, type)):
        unpatch_class(_class_of(model))
        return model
    unpatch(causal_lm(model))
    return model


def supported_models() -> list[str]:
    """Return the model types that ``apply_cce`` takes by name, sorted. Instances of other classes with an LM head work too."""
    return sorted(family.model_type for family in families() if family.status != "refused")


def _check_version() -> None:
    installed = version("transformers")
    if int(installed.split(".")[0]) < 5:
        raise RuntimeError(
            f"hf_cce requires transformers >= 5.0, but {installed} is installed. Run: pip install -U transformers"
        )


def _class_of(target: str | type) -> type:
    """Return the class itself, or the causal LM class of a model type."""
    if isinstance(target, type):
        if not issubclass(target, nn.Module):
            raise ValueError(
                f"model must be a model instance, a model class or a model type, got the class {target.__name__}"
            )
        return target
    import transformers

    names = class_names()
    if target not in names:
        raise ValueError(
            f"model: {target!r} is not a causal LM model type of transformers {transformers.__version__}. Pass a model type "
            'such as "llama" (supported_models() lists them), a model class or a model. To use a folder or a name on the Hub, '
            "load it first: AutoModelForCausalLM.from_pretrained(...)"
        )
    return getattr(transformers, names[target])


def causal_lm(model: Any) -> nn.Module:
    """Return the causal LM inside the wrappers of torch.compile, DDP, FSDP, DeepSpeed and PEFT."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a model instance, a model class or a model type, got {type(model).__name__}")
    while (inner := _wrapped(model)) is not None:
        model = inner
    return model


def _wrapped(model: Any) -> nn.Module | None:
    """Return the module that ``model`` wraps, or None if it is not a wrapper."""
    names: tuple[str, ...] = ("_orig_mod",)  # torch.compile
    if callable(getattr(type(model), "get_base_model", None)):  # PEFT
        return model.get_base_model()
    if any(kind.__module__.partition(".")[0] == "peft" for kind in type(model).__mro__):
        names += "base_model", "model"  # a PeftMixedModel, a tuner
    elif not hasattr(type(model), "get_output_embeddings"):
        names += "module", "_fsdp_wrapped_module"  # DDP, DataParallel, DeepSpeed; FSDP1
    return next((inner for name in names if isinstance(inner := model._modules.get(name), nn.Module)), None)


def _refuse(cls: type, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(
            f"model: {cls.__name__} cannot be patched: {reason}. It is unchanged; train it without hf_cce."
        )
