"""`loss.backward()` through a call, next to bucketed_grad and torch.compile."""
