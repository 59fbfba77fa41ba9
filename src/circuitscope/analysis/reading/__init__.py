"""How analysis looks at a model: as layers with readings, and by runs with hooks that leave the model as it was."""
