"""The embedded inference server: a JAX engine, and SGLang's HTTP API over it."""
