"""When things happen: transitions in curves, what the loss bump did to accuracy, and the order of events in a run."""

from circuitscope.analysis.phases.detection import transitions as transitions
from circuitscope.analysis.phases.order import order as order
from circuitscope.analysis.phases.verdict import verdict as verdict
