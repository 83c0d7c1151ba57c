"""Serves a policy with JetStream's orchestrator and gRPC server.

Needs the extra `jetstream`. `shim` is the only file that patches the published
package; `engine` and `orchestrator` are thin subclasses of its classes.
"""
