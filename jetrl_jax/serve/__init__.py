"""Serving: a policy behind JetStream's orchestrator and gRPC server.

`python -m jetrl_jax.serve` starts it, `python -m jetrl_jax.serve.ask` asks
it. Needs the extra `jetstream`. `shim` is the only file that mends the
published package, `engine` and `orchestrator` are thin subclasses of its
classes, and `requests` and `text` know nothing of it.
"""
