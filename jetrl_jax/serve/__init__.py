"""Serves a policy with JetStream's orchestrator and gRPC server.

`python -m jetrl_jax.serve` starts the server and `python -m
jetrl_jax.serve.ask` sends it a prompt. Both need the extra `jetstream`. `shim`
is the only file that patches the published package. `engine` and `orchestrator`
are thin subclasses of its classes, and `requests` and `text` do not use it.
"""
