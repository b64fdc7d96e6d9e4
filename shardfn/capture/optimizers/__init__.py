"""Steps of torch's optimizers, on tensors with values or while a call is captured."""
