"""Per-token log-probabilities and entropy of a policy for a GRPO-like step, with ``linear_log_probs`` and with full logits.

The step is GRPO's clipped objective with an entropy bonus, on groups of completions with random rewards. It compares how the
policy's log-probabilities are computed, not what is learned. No data, no download:

    python recipes/log_probs.py
    python recipes/log_probs.py --vocabulary 151936 --hidden 896 --groups 2 --tokens 2048 --dtype bfloat16   # a GPU
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cce import linear_log_probs

CLIP, ENTROPY_BONUS = 0.2, 1e-3
LogProbs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def fused(hidden_states: Tensor, weight: Tensor, completions: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p of each token of ``completions`` [B, T] and the entropy at its position, from hidden_states [B, T, D]."""
    result = linear_log_probs(hidden_states, weight, completions, entropy=True)
    assert result.entropy is not None
    return result.log_probs, result.entropy


def full_logits(hidden_states: Tensor, weight: Tensor, completions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same the way most trainers compute it: logits, log_softmax, gather."""
    logits = F.linear(hidden_states, weight)
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_probs.gather(-1, completions[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def advantages_of(rewards: Tensor) -> Tensor:
    """Normalize rewards [groups, completions] by each group's mean and standard deviation; return [groups · completions, 1]."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)


def objective(log_probs: Tensor, entropy: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return GRPO's loss: clipped importance ratios times advantages, minus an entropy bonus, averaged over the mask."""
    ratio = (log_probs - old_log_probs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages) + ENTROPY_BONUS * entropy
    return -(gain * mask).sum() / mask.sum()


class Step:
    """Forward and backward of one update of a small policy on fixed completions."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        heads = args.hidden // 64
        config = LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 8 // 3,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=True,
        )
        policy: Any = LlamaForCausalLM(config)  # Any: transformers' decorator of .to() hides its type
        self.policy = policy.to(device, getattr(torch, args.dtype)).train()
        rows, length = args.groups * args.completions, args.prompt + args.tokens
        g = torch.Generator().manual_seed(args.seed)
        self.prompt = args.prompt
        self.ids = torch.randint(args.vocabulary, (rows, length), generator=g).to(device)
        lengths = torch.randint(args.tokens // 2, args.tokens + 1, (rows, 1), generator=g)
        self.mask = (torch.arange(args.tokens) < lengths).float().to(device)
        self.advantages = advantages_of(torch.rand(args.groups, args.completions, generator=g)).to(device)
        with torch.no_grad():  # perturbed, so that the old policy favors neither implementation
            old, _ = self.log_probs(full_logits)
            self.old = old + 0.1 * torch.randn(old.shape, generator=g).to(device)

    def log_probs(self, way: LogProbs) -> tuple[Tensor, Tensor]:
        """Return log p and entropy [B, T] of the completion tokens."""
        hidden = self.policy.model(input_ids=self.ids, use_cache=False).last_hidden_state
        # The token at t is sampled from the hidden state at t − 1.
        return way(hidden[:, self.prompt - 1 : -1], self.policy.lm_head.weight, self.ids[:, self.prompt :])

    def run(self, way: LogProbs) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, log p and entropy; the gradients are in the policy."""
        self.policy.zero_grad(set_to_none=True)
        log_probs, entropy = self.log_probs(way)
        loss = objective(log_probs, entropy, self.old, self.advantages, self.mask)
        loss.backward()
        return loss.detach(), log_probs.detach(), entropy.detach()

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.policy.parameters() if p.grad is not None])


def measure(step: Step, way: LogProbs, repeats: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a step's time, memory (on a GPU) and loss, and its log p, entropy and gradients on the CPU."""
    step.run(way)  # warm-up
    step.policy.zero_grad(set_to_none=True)
    gpu = step.ids.is_cuda
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else 0
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        loss, log_probs, entropy = step.run(way)
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() - before if gpu else None
    row = {"ms": sorted(times)[len(times) // 2], "step_bytes": peak, "loss": loss.item()}
    return row, [x.cpu() for x in (log_probs, entropy, step.gradients())]


def run(args: argparse.Namespace) -> dict[str, Any]:
    step = Step(args, torch.device(args.device))
    rows, values = {}, {}
    for name, way in {"linear_log_probs": fused, "full logits": full_logits}.items():
        rows[name], values[name] = measure(step, way, args.repeats)
    ours, theirs = values.values()
    largest = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["recipes/log_probs.py", *sys.argv[1:]]),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "device": torch.cuda.get_device_name() if step.ids.is_cuda else args.device,
        "versions": {name: version(name) for name in ("torch", "transformers", "hf-cce")}
        | {"triton": version("triton") if step.ids.is_cuda else None},
        "rows": rows,
        "largest_difference": {"log_probs": largest[0], "entropy": largest[1]},
        "relative_difference_of_gradients": float((ours[2] - theirs[2]).double().norm() / theirs[2].double().norm()),
    }


def show(report: dict[str, Any]) -> None:
    for name, row in report["rows"].items():
        memory = "" if row["step_bytes"] is None else f", {row['step_bytes'] / 2**20:,.1f} MiB"
        print(f"{name:16} {row['ms']:10,.1f} ms a step{memory}, loss {row['loss']:.7f}")
    print(
        f"Largest difference: log p {report['largest_difference']['log_probs']:.1e}, "
        f"entropy {report['largest_difference']['entropy']:.1e} nats; "
        f"gradients of the policy {report['relative_difference_of_gradients']:.1e} of their norm."
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
        ("groups", 2, "prompts"),
        ("completions", 4, "of each prompt"),
        ("prompt", 16, "tokens of a prompt"),
        ("tokens", 128, "of a completion at most, two or more"),
        ("vocabulary", 32_768, "of the policy"),
        ("hidden", 128, "width of the policy, a multiple of 64"),
        ("layers", 1, "of the policy"),
        ("repeats", 3, "timed steps of each way; the median counts"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning}; default: {default:,}")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all of it here")
    args = parser.parse_args(arguments)
    small = [name for name in ("groups", "prompt", "vocabulary", "layers", "repeats") if getattr(args, name) < 1]
    small += [name for name in ("completions", "tokens") if getattr(args, name) < 2]
    if small or args.hidden < 64 or args.hidden % 64:
        parser.error(
            f"too small: --{', --'.join(small)}" if small else f"--hidden must be a multiple of 64, got {args.hidden}"
        )
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    report = run(args)
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
