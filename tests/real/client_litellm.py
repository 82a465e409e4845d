"""litellm with `stop` and `stream`, and the client of OpenAI: `python client_litellm.py URL`. Prints JSON."""

import importlib.metadata
import json
import sys

import litellm
import openai

MESSAGES = [{"role": "user", "content": "Ada has 12 pens"}]


def main(url: str) -> None:
    options = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 30}

    def chat(**more):
        return litellm.completion(model="openai/policy", messages=MESSAGES, **options, **more)

    def streamed(**more):
        chunks = chat(stream=True, stream_options={"include_usage": True}, **more)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    def text(**more):
        model, prompt = "text-completion-openai/policy", "Ada has"
        return litellm.text_completion(model=model, prompt=prompt, **options, **more)

    whole = chat().choices[0].message.content
    stopped = chat(stop=[whole[6:8]]).choices[0]
    top = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    client = openai.OpenAI(base_url=options["api_base"], api_key="none")
    found = {
        "whole": whole,
        "stop": whole[6:8],
        "stopped": [stopped.message.content, stopped.finish_reason],
        "streamed": streamed(),
        "streamed_stopped": streamed(stop=whole[6:8]),
        "top": [[t.logprob, [best.logprob for best in t.top_logprobs]] for t in top],
        "text": text().choices[0].text,
        "text_streamed": "".join(chunk.choices[0].text or "" for chunk in text(stream=True)),
        "logprobs": text(logprobs=2).choices[0].logprobs.token_logprobs,
        "models": [client.models.retrieve("policy").id, *(one.id for one in client.models.list())],
        "versions": [importlib.metadata.version("litellm"), openai.__version__],
    }
    print(json.dumps(found))


main(*sys.argv[1:])
