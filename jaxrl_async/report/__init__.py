"""report.html: one self-contained page of a run, from its workdir alone."""

from jaxrl_async.report.page import write_report

__all__ = ["write_report"]
