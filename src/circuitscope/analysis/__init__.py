"""Reading circuits out of models: scores, decay, phases, interventions. Model and tokens in, tables out."""

from circuitscope.analysis.edges import Edges as Edges
from circuitscope.analysis.edges import named_edges as named_edges
from circuitscope.analysis.scores import binding_score as binding_score
from circuitscope.analysis.scores import duplicate_score as duplicate_score
from circuitscope.analysis.scores import induction_score as induction_score
from circuitscope.analysis.scores import previous_token_score as previous_token_score
from circuitscope.analysis.scores import recall_score as recall_score
from circuitscope.analysis.scores import score as score
from circuitscope.analysis.scores import summarize as summarize
from circuitscope.analysis.scores import value_score as value_score
