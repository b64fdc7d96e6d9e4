"""What torch's own user sees: small programs of plain torch, and a run of them around shardfn."""
