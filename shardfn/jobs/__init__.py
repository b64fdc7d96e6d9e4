"""The processes of a job: how they find each other, and what they tell each other."""
