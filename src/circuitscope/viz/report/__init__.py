"""The interactive report of one run or several: a single HTML file that needs no network."""

from circuitscope.viz.report.document import Report as Report
from circuitscope.viz.report.document import report as report
