"""One HTML page of a run, of several side by side, or of a folder."""

from jetrl_jax.report.contents import write_report

__all__ = ['write_report']
