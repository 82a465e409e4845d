"""lm-evaluation-harness over a server and over transformers: `python client_lm_eval.py URL MODEL_DIR`.

Prints JSON: for each model of lm_eval the answers to a local task of choices and to one of texts.
"""

import json
import pathlib
import sys
import tempfile

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
TEXTS = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 40}
metric_list: [{metric: exact_match}]
"""


def main(url: str, model: str) -> None:
    directory = pathlib.Path(tempfile.mkdtemp())
    data = directory / "pens.jsonl"
    rows = [
        {
            "question": f"Ada has {i} pens and buys {3 * i} more. How many?",
            "choices": [str(4 * i), "none at all", "é"],
            "answer": 0,
        }
        for i in range(2, 10)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, task in (("choices", CHOICES), ("texts", TEXTS)):
        (directory / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + task)
    tasks = TaskManager(include_path=str(directory))

    def answers(kind, arguments, names, **options):
        found = lm_eval.simple_evaluate(
            model=kind,
            model_args=arguments,
            tasks=names,
            task_manager=tasks,
            log_samples=True,
            bootstrap_iters=0,
            **options,
        )
        return {name: [row["resps"] for row in rows] for name, rows in found["samples"].items()}

    both, served = ["choices", "texts"], f"model=policy,tokenizer={model},max_length=256"
    completions, chat = f"{url}/v1/completions", f"{url}/v1/chat/completions"
    own = f"pretrained={model},dtype=float32,max_length=256"
    found = {
        "completions": answers(
            "local-completions",
            f"{served},base_url={completions},num_concurrent=2",
            both,
            batch_size=4,
        ),
        "transformers": answers("hf", own, both, device="cpu"),
        "chat": answers(
            "local-chat-completions",
            f"model=policy,base_url={chat}",
            ["texts"],
            apply_chat_template=True,
        ),
        "transformers_chat": answers("hf", own, ["texts"], device="cpu", apply_chat_template=True),
        "version": lm_eval.__version__,
    }
    print(json.dumps(found, default=str))


main(*sys.argv[1:])
