"""Steps of torch's optimizers: run as they are, on tensors with values or while a call is captured."""
