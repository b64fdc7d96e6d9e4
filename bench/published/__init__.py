"""What others have measured and published, beside what `lowered.time` and `lowered.memory` say of
the same programs.
"""
