"""lm-evaluation-harness with a tiny model: its model ``hf`` gives the same log-likelihoods and greedy flags without logits."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import environment, run
from models import logits_made, tiny_llama
from numerics import assert_accurate
from test_trl import WORDS, text, tokenizer

pytest.importorskip("lm_eval", reason="not part of the environment: make test-lm-eval")
ROWS = 12


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    from hf_cce.integrations.lm_eval import CCEHFLM

    return {
        name: cls(pretrained=tiny_llama().eval(), tokenizer=tokenizer(), batch_size=4, device="cpu", max_length=48)
        for name, cls in (("hf", HFLM), ("hf_cce", CCEHFLM))
    }


def requests(kind: str, model: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    contexts = [text(i, 20 + i) for i in range(ROWS)]
    if kind == "loglikelihood_rolling":
        pairs: list[tuple[str, ...]] = [(context,) for context in contexts]
    else:
        pairs = [(context, " " + text(100 + i, 1 + i % 5)) for i, context in enumerate(contexts)]
        pairs += [(contexts[0], " " + word) for word in WORDS[:3]]  # one-token continuations of the same context
        for context in contexts[:4]:  # some greedy ones
            ids = torch.tensor([model.tok_encode(context)])
            word = model.model(ids).logits[0, -1].argmax()
            pairs.append((context, " " + model.tok_decode([int(word)])))
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in pairs]


@pytest.mark.usefixtures("small_scratch")
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_answers_match_hf(kind: str, models: dict[str, Any]) -> None:
    found = {}
    for name, model in models.items():
        instances = requests(kind, models["hf"])
        with logits_made(tokens=64) as made, torch.no_grad():
            found[name] = getattr(model, kind)(instances)
        assert bool(made) == (name == "hf")
    if kind == "loglikelihood":
        assert [greedy for _, greedy in found["hf_cce"]] == [greedy for _, greedy in found["hf"]]
        assert any(greedy for _, greedy in found["hf"])
        found = {name: [value for value, _ in each] for name, each in found.items()}
    ours, theirs = (torch.tensor(found[name]) for name in ("hf_cce", "hf"))
    assert_accurate(ours, theirs, theirs, kind, torch.float32)


@pytest.mark.slow
def test_lm_eval_command(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [
        {"question": text(i, 8), "choices": [text(100 + i, 2), text(200 + i, 3)], "answer": i % 2} for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    (tmp_path / "own.yaml").write_text(
        f"""task: own
dataset_path: json
dataset_kwargs:
  data_files: {{test: {tmp_path / "rows.jsonl"}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
        "utf-8",
    )
    found = {}
    shared = ["--model_args", f"pretrained={tmp_path / 'model'}", "--tasks", "own", "--include_path", str(tmp_path)]
    for name, module in (("hf", "lm_eval"), ("hf_cce", "hf_cce.integrations.lm_eval")):
        own = ["--model", name, "--device", "cpu", "--output_path", str(tmp_path / name)]
        command = [sys.executable, "-m", module, "run", *shared, *own]
        done = run(command, environment(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(tmp_path / "cache")))
        assert done.returncode == 0, done.stderr[-3000:]
        (path,) = (tmp_path / name).rglob("results*.json")
        found[name] = json.loads(path.read_text("utf-8"))["results"]["own"]
    assert found["hf_cce"] == found["hf"] and "acc,none" in found["hf"]
