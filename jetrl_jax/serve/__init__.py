"""Serves a policy over HTTP, as OpenAI's API has it.

`jetrl_jax serve` starts the server and `jetrl_jax ask` sends it a prompt. One
thread decodes for all requests on the engine that samples rollouts. Needs the
extra `serve`. The folder `jetstream` serves over gRPC instead.
"""
