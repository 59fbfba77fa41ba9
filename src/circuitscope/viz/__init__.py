"""Figures. Functions take runs or tables and return matplotlib objects; nothing opens a window.

phi_figure.phi_figure, heatmap.heatmap   attention and Φ
dynamics.dynamics                        loss, accuracy and scores over training
scores.scores, decay.decay               circuit scores and the decay of off-diagonal terms over training
probes.probes                            what linear probes read
sweep.sweep                              accuracy by learning rate and the learning-rate windows of a sweep
step_axis.StepAxis                       which steps they draw, and whether on a log scale
report.report                            an interactive page about runs
Each figure is a `style.Sheet`: a Figure with `.data`, the numbers it drew; `style.save` writes it.
"""
