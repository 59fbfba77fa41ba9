"""Linear probes: what a linear map can read from an activation or a state, and whether the model uses it.

`fit` takes arrays from anywhere, `probe` runs a definition on every checkpoint of a run, and `target` registers what to
decode.
"""

from circuitscope.analysis.probes.activations import collect as collect
from circuitscope.analysis.probes.definition import Definition as Definition
from circuitscope.analysis.probes.definition import shipped as shipped
from circuitscope.analysis.probes.estimators import CandidateSet as CandidateSet
from circuitscope.analysis.probes.estimators import EmbeddingRidge as EmbeddingRidge
from circuitscope.analysis.probes.fitting import Fit as Fit
from circuitscope.analysis.probes.fitting import fit as fit
from circuitscope.analysis.probes.over_run import SEQUENCES as SEQUENCES
from circuitscope.analysis.probes.over_run import kept_probes as kept_probes
from circuitscope.analysis.probes.over_run import probe as probe
from circuitscope.analysis.probes.over_run import probe_model as probe_model
from circuitscope.analysis.probes.removal import remove as remove
from circuitscope.analysis.probes.targets import TARGETS as TARGETS
from circuitscope.analysis.probes.targets import examples_of as examples_of
from circuitscope.analysis.probes.targets import target as target
from circuitscope.analysis.probes.weights import weights_by_point as weights_by_point
