"""Axolotl: ``plugins: [hf_cce.integrations.axolotl_plugin.CCEPlugin]`` in the YAML file; options under ``hf_cce:``.

    plugins:
      - hf_cce.integrations.axolotl_plugin.CCEPlugin
    hf_cce:
      gradient_filter: auto
      memory_budget: 512MiB

Read and tested with Axolotl 0.19.0, whose ``BasePlugin`` documents when each method is called.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from hf_cce import CCECallback, CCEConfig, apply_cce


class HfCCEArgs(BaseModel):
    """The keys that the plugin adds to Axolotl's configuration."""

    # Options of ``CCEConfig``. Not a model, whose null fields Axolotl drops: ``gradient_filter: null`` has a meaning
    hf_cce: dict[str, Any] | None = None

    @field_validator("hf_cce")
    @classmethod
    def options_exist(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Reject unknown options and wrong values when the file is read, not after the model has been loaded."""
        try:
            CCEConfig.of(None, **(value or {}))
        except TypeError as error:  # pydantic does not report a TypeError
            raise ValueError(str(error)) from error
        return value


class CCEPlugin(BasePlugin):
    """Patch the model that Axolotl loads, including adapters, and add a callback that checks for the fused loss."""

    def get_input_args(self) -> str:
        return f"{__name__}.{HfCCEArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        apply_cce(model, self._config(cfg))

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[CCECallback]:
        return [CCECallback(self._config(cfg))]

    @staticmethod
    def _config(cfg: Any) -> CCEConfig:
        return CCEConfig(**(cfg.hf_cce or {}))
