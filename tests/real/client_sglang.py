"""SGLang's RuntimeEndpoint: `python client_sglang.py endpoint URL`. Prints JSON.

And its bench_serving: `python client_sglang.py bench PACKAGES FLAGS…`; in PACKAGES is what its environment lacks,
`datasets`.
"""

import json
import runpy
import sys

import launch_sglang  # noqa: F401  SGLang cannot be imported on a CPU without it.


def endpoint(url: str) -> None:
    import sglang
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
    from sglang.lang.choices import unconditional_likelihood_normalized

    backend = RuntimeEndpoint(url)
    sglang.set_default_backend(backend)
    choices = [" yes", " no"]

    @sglang.function
    def ask(s, question):
        s += question
        s += sglang.gen("free", max_tokens=8, temperature=0)
        scored = {"return_logprob": True, "logprob_start_len": 0}
        s += sglang.gen("scored", max_tokens=8, temperature=0, stop=["e"], **scored)
        s += sglang.select("likely", choices=choices)
        method = unconditional_likelihood_normalized
        s += sglang.select("normalized", choices=choices, choices_method=method)

    found = ask.run(question="Ada has 12 pens")
    streamed = "".join(ask.run(question="Ada has 12 pens", stream=True).text_iter("free"))
    batch = ask.run_batch([{"question": "Ada has 1"}, {"question": "How many"}])
    answer = {
        "free": found["free"],
        "streamed": streamed,
        "num_scored": len(found.get_meta_info("scored")["input_token_logprobs"]),
        "selected": [[one["likely"], one["normalized"]] for one in (found, *batch)],
        "context_length": backend.get_server_info()["context_length"],
        "version": sglang.__version__,
    }
    backend.flush_cache()
    print(json.dumps(answer))


if __name__ == "__main__":
    verb, first, *flags = sys.argv[1:]
    if verb == "endpoint":
        endpoint(first)
    else:
        sys.path.append(first)
        sys.argv[1:] = flags
        runpy.run_module("sglang.bench_serving", run_name="__main__")
