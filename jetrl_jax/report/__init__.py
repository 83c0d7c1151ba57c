"""One HTML page of a run, of several beside each other, or of a folder."""

from jetrl_jax.report.contents import write_report

__all__ = ['write_report']
