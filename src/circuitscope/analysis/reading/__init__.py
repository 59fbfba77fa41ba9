"""How analysis looks at a model: any model as layers with readings, and runs with hooks that leave it as it was."""
