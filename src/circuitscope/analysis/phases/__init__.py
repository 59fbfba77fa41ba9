"""When things happen: transitions in curves, the evidence for them, and the order of events in a run."""

from circuitscope.analysis.phases.detection import order as order
from circuitscope.analysis.phases.detection import transitions as transitions
from circuitscope.analysis.phases.detection import verdict as verdict
